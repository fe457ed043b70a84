"""A model that learns the dataset of a few documents in seconds."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from shared import SMALL

from infini_model.config import Config, validate
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A configuration of 2 layers and 12 steps; each argument overrides a section."""

    def make(**sections: dict[str, object]) -> Config:
        tree: dict[str, dict[str, object]] = {
            "run": {"output_dir": str(tmp_path / "output"), "seed": 3},
            "packing": {"context_length": 64},
            "model": dict(SMALL),
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


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset folder of sums, half of them as conversations, and of one prompt that is long."""
    folder = tmp_path_factory.mktemp("pairs")
    chance = random.Random(5)
    rows: list[dict[str, object]] = [{"prompt": "x" * 100, "answer": "is too long"}]
    for number in range(160):
        first, second = chance.randrange(100), chance.randrange(100)
        prompt, answer = f"{number}: {first} + {second}?", " ".join([str(first + second)] * 3)
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows.append({"prompt": prompt, "answer": answer} if number % 2 else {"messages": said})
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = {"train": 0.7, "validation": 0.2, "test": 0.1}
    source = {"paths": [str(path)], "pairs": True}
    data = validate({"data": {"source": source, "splits": splits}}).data
    manifest = build_dataset(list_sources(data, folder), data, folder / "datasets")
    return folder / "datasets" / manifest.folder_name


@pytest.fixture(scope="session")
def mixture(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset folder of two named sources: texts, and the conversations of `pairs`."""
    folder = tmp_path_factory.mktemp("mixture")
    chance = random.Random(8)
    for number in range(40):
        words = chance.choices(["the", "memory", "of", "a", "segment"], k=chance.randrange(20, 90))
        (folder / f"{number}.txt").write_text(f"{number}. " + " ".join(words))
    sources = {
        "texts": {"paths": [str(folder / "*.txt")]},
        "chats": {"paths": [str(pairs.parents[1] / "sums.jsonl")], "pairs": True},
    }
    splits = {"train": 0.7, "validation": 0.2, "test": 0.1}
    data = validate({"data": {"sources": sources, "splits": splits}}).data
    manifest = build_dataset(list_sources(data, folder), data, folder / "datasets")
    return folder / "datasets" / manifest.folder_name
