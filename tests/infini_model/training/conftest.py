"""A dataset of a few documents and a model that learns it in seconds."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infini_model.config import Config, validate
from infini_model.data.shards import build_dataset
from infini_model.data.sources import download

WORDS = ("river", "stone", "light", "under", "seven", "quiet", "glass", "morning", "copper")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Sums over as many parts, here and in the processes that tests start: equal to the bit."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dataset folder: 60 documents of bytes, of many lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(7)
    for number in range(60):
        words = chance.choices(WORDS, k=chance.randrange(20, 160))
        (folder / f"{number}.txt").write_text(f"{number}. " + " ".join(words))
    data = {
        "source": {"paths": [str(folder / "*.txt")]},
        "splits": {"train": 0.7, "validation": 0.2, "test": 0.1},
        "workers": 1,
    }
    config = validate({"data": data})
    output = tmp_path_factory.mktemp("output")
    manifest = build_dataset(download(config.data, output), config.data, output)
    return output / "datasets" / manifest.folder_name


MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A configuration of 2 layers and 12 steps; each argument is a section to lay over it."""

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
                "logging_steps": 2,
                "eval_steps": 5,
                "save_steps": 4,
                "gpus": "cpu",
            },
            "tracking": {"mlflow": False, "tensorboard": False},
        }
        for name, section in sections.items():
            tree[name] = tree.get(name, {}) | section
        return validate(tree)

    return make
