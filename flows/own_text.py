"""What `infini run` trains on a user's documents when neither a preset nor a file is named.

The choice depends on how much text there is and on whether there is a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from flows.presets import DEFAULT_PRESET, Invocation
from infini_model.config import Config, merge
from infini_model.config.data import FilesSource
from infini_model.data.sources.listing import list_files
from infini_model.training.launch.devices import choose_gpus

ON_A_GPU = "one-gpu"
MEGABYTE = 1_000_000
# From so many bytes of text on: the vocabulary of the BPE that is trained on it.
SMALL_VOCABULARIES = {0: 512, MEGABYTE // 4: 1024, MEGABYTE: 2048, 30 * MEGABYTE: 4096}
LARGE_VOCABULARIES = {0: 8192, 10 * MEGABYTE: 16384, 100 * MEGABYTE: 32768}
# Tokens of a step of the default preset, and of a micro-batch of the one for a GPU.
SMALL_STEP, LARGE_STEP = 2 * 1024, 8 * 4096
# What is assumed of documents that are not files of this machine.
UNKNOWN_SIZE = 100 * MEGABYTE


def configure_own_text(typed: Mapping[str, Any], config: Config) -> tuple[Invocation, str]:
    """Choose the settings for own documents; return them and a line that says what was chosen.

    `config` is what `typed` means over the default preset. Raises `DeviceError` for a GPU that does
    not exist, `DataError` if a pattern matches no file, `ConfigError` as `configure` does.
    """
    known = _size(config)
    size = UNKNOWN_SIZE if known is None else known
    text = "text of unknown size" if known is None else f"{decimal(known)} of text"
    if choose_gpus(config.launch.gpus):
        preset, change, machine = ON_A_GPU, _large(size), "a GPU"
    else:
        preset, change, machine = DEFAULT_PRESET, _small(size), "no GPU"
    invocation = Invocation.of([preset], None, merge(change, typed))
    training, tokenizer = invocation.config.training, invocation.config.data.tokenizer
    length = f"{training.max_steps:,} steps" if training.max_steps else f"{training.epochs} epochs"
    spec = f"a BPE of {tokenizer.vocab_size:,}" if tokenizer.spec == "train" else tokenizer.spec
    return invocation, (
        f"{text}, {machine}: --preset {preset}, {length}, tokenizer: {spec}; --preset NAME and "
        "settings choose otherwise"
    )


def _size(config: Config) -> int | None:
    """Add up the bytes of the documents; None unless all are files of this machine."""
    size = 0
    for source in config.data.named_sources.values():
        if not isinstance(source, FilesSource) or any("://" in path for path in source.paths):
            return None
        size += sum(Path(path).stat().st_size for path in list_files(source, Path()))
    return size


def _small(size: int) -> dict[str, Any]:
    """Minutes on two cores: ten epochs, at about three bytes a token."""
    return _settings(_at(SMALL_VOCABULARIES, size), 10 * size // (3 * SMALL_STEP), 1000)


def _large(size: int) -> dict[str, Any]:
    """Four epochs (arXiv 2305.16264), at about four bytes a token; larger steps for more text."""
    steps = size // LARGE_STEP
    accumulation = max(each for each in (1, 2, 4, 8, 16) if each == 1 or steps // each >= 1000)
    change = _settings(_at(LARGE_VOCABULARIES, size), steps // accumulation, 5000)
    change["training"]["gradient_accumulation_steps"] = accumulation
    change["model"] = {"vocab_size": None}
    if size < 1000 * MEGABYTE:
        change["data"]["splits"] = {"train": 0.9, "validation": 0.05, "test": 0.05}
    return change


def _settings(vocabulary: int, steps: int, most: int) -> dict[str, Any]:
    steps = min(max(steps, 200), most)
    return {
        "data": {"tokenizer": {"spec": "train", "vocab_size": vocabulary}},
        "training": {"max_steps": steps, "warmup_steps": steps // 20},
    }


def _at(by_size: Mapping[int, int], size: int) -> int:
    """The value of the largest key that `size` reaches."""
    return by_size[max(key for key in by_size if key <= size)]
