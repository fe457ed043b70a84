"""The whole tree: descriptions, and which keys decide the weights."""

import pytest

from infini_model.config import Config, load_config


def test_every_section_declares_whether_it_decides_the_weights() -> None:
    for name, field in Config.model_fields.items():
        assert "decides_weights" in vars(field.annotation), name  # type: ignore[arg-type]
    deciding = {"run": {"seed"}} | {
        name: set(Config.model_fields[name].annotation.model_fields)  # type: ignore[union-attr]
        for name in ("packing", "model", "training")
    }
    # head_dim is dumped only if it was set.
    config = load_config(overrides=["model.head_dim=16"])
    assert {name: set(section) for name, section in config.identity.items()} == deciding


def test_every_key_has_a_description() -> None:
    """The form in the UI shows it as help."""
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            nested = hasattr(field.annotation, "model_fields")
            assert nested or field.description, f"{section.annotation}.{name} has no description"


@pytest.mark.parametrize(
    ("given", "gates"),
    [
        ({}, -2.0),
        ({"training": {"objective": "block_diffusion"}}, 0.0),
        ({"training": {"objective": "block_diffusion"}, "model": {"gate_start": -1.0}}, -1.0),
        (
            {
                "training": {"objective": "block_diffusion"},
                "model": {"initial_weights": "llama", "segment_length": 64},
            },
            -2.0,
        ),
    ],
)
def test_gates_start_open_where_only_the_memory_shows_what_came_before(given, gates):
    assert load_config(overrides=[given]).model.gate_start == gates
