"""Settings of the model."""

from pathlib import Path

from infini_model.config import dump_config, load_config


def test_head_dim_is_derived_unless_it_is_set(tmp_path: Path) -> None:
    """Also when the other fields are overridden in a tree that was dumped before."""
    file = tmp_path / "config.yaml"
    for override, width in (("model.num_attention_heads=4", 64), ("model.head_dim=16", 16)):
        file.write_text(dump_config(load_config(overrides=[override])))
        assert load_config(file=file, overrides=["model.hidden_size=256"]).model.head_dim == width
