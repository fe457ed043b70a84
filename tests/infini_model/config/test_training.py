"""Settings of the length of a training run."""

import pytest

from infini_model.config import load_config
from infini_model.runtime.errors import ConfigError


def test_epochs_and_max_steps_replace_each_other() -> None:
    asked = load_config(overrides=["training.max_steps=9", "training.epochs=2.5"]).training
    assert (asked.epochs, asked.max_steps) == (2.5, None)
    with pytest.raises(ValueError, match="converted to steps when training starts"):
        _ = asked.total_steps
    written = load_config(overrides=["training.epochs=2"]).model_dump(mode="json")
    back = load_config(overrides=[written, "training.max_steps=9"]).training
    assert (back.epochs, back.max_steps, back.total_steps) == (None, 9, 9)
    for both in ("training={epochs: 2, max_steps: 9}", "training.max_steps=null"):
        with pytest.raises(ConfigError, match=r"^training: takes exactly one of max_steps"):
            load_config(overrides=[both])
