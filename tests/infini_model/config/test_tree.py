"""The whole tree: what each key says of itself, and which ones decide the weights."""

from infini_model.config import Config, load_config


def test_every_section_says_whether_it_decides_the_weights() -> None:
    for name, field in Config.model_fields.items():
        assert "decides_weights" in vars(field.annotation), name  # type: ignore[arg-type]
    deciding = {"run": {"seed"}} | {
        name: set(Config.model_fields[name].annotation.model_fields)  # type: ignore[union-attr]
        for name in ("packing", "model", "training")
    }
    # The width of a head is written down only where it was asked for.
    config = load_config(overrides=["model.head_dim=16"])
    assert {name: set(section) for name, section in config.identity.items()} == deciding


def test_every_key_says_what_it_is() -> None:
    """The descriptions are the help of the UI's form."""
    for section in Config.model_fields.values():
        for name, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            nested = hasattr(field.annotation, "model_fields")
            assert nested or field.description, f"{section.annotation}.{name} has no description"
