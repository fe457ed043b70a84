"""A model that learns the dataset of a few documents in seconds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infini_model.config import Config, validate

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A configuration of 2 layers and 12 steps; each argument overrides a section."""

    def make(**sections: dict[str, object]) -> Config:
        tree: dict[str, dict[str, object]] = {
            "run": {"output_dir": str(tmp_path / "output"), "seed": 3},
            "packing": {"context_length": 64},
            "model": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "segment_length": 16,
            },
            "training": {
                "max_steps": 12,
                "batch_size": 8,
                "warmup_steps": 2,
                "learning_rate": 3e-3,
            },
            "launch": {"gpus": "cpu"},
            "logging": {"logging_steps": 2, "eval_steps": 5},
            "checkpoint": {"save_steps": 4},
            "tracking": {"mlflow": False, "tensorboard": False},
        }
        for name, section in sections.items():
            tree[name] = tree.get(name, {}) | section
        return validate(tree)

    return make
