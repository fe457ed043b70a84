"""What `infini run` trains on a user's documents when neither a preset nor a file is named.

The choice depends on how much text there is and on whether there is a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.presets import DEFAULT_PRESET, Invocation
from infini_model.config import Config, merge
from infini_model.config.data import FilesSource
from infini_model.data.sources.formats import format_of
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
# Fewer may leave a split empty.
FEW_DOCUMENTS = 20


def configure_own_text(typed: Mapping[str, Any], config: Config) -> tuple[Invocation, list[str]]:
    """The settings for own documents, and lines that say what was chosen and how to choose.

    `config` is what `typed` means over the default preset. Raises `DeviceError` for a GPU that does
    not exist, `DataError` if a pattern matches no file, `ConfigError` as `configure` does.
    """
    preset, change, lines = _choose(config)
    invocation = Invocation.of([preset], None, merge(change, typed))
    training, tokenizer = invocation.config.training, invocation.config.data.tokenizer
    length = f"{training.max_steps:,} steps" if training.max_steps else f"{training.epochs} epochs"
    spec = f"a BPE of {tokenizer.vocab_size:,}" if tokenizer.spec == "train" else tokenizer.spec
    lines[0] += f", {length}, tokenizer: {spec}; --preset NAME and settings choose otherwise"
    return invocation, lines


def _choose(config: Config) -> tuple[str, dict[str, Any], list[str]]:
    """A preset, what is laid over it, and the beginning of the lines that say so."""
    sources = list(config.data.named_sources.values())
    each = [_files(source) for source in sources]
    files = [path for own in each for path in own] if all(each) else []
    size = sum(path.stat().st_size for path in files) if files else UNKNOWN_SIZE
    text = f"{_in_megabytes(size)} of text" if files else "text of unknown size"
    if choose_gpus(config.launch.gpus):
        preset, change, machine = ON_A_GPU, _large(size), "a GPU"
    else:
        preset, change, machine = DEFAULT_PRESET, _small(size), "no GPU"
    lines = [f"{text}, {machine}: --preset {preset}"]
    if 0 < len(files) < FEW_DOCUMENTS and all(map(_are_documents, sources, each)):
        lines.append(
            f"each file is one document, and {len(files)} may leave a split empty: "
            r"""'data.source.separator="\n\n"' makes a document of each paragraph"""
        )
    return preset, change, lines


def _files(source: Any) -> list[Path]:
    """The documents that are files of this machine, if all are."""
    if not isinstance(source, FilesSource) or any("://" in path for path in source.paths):
        return []
    return [Path(path) for path in list_files(source, Path())]


def _are_documents(source: Any, files: list[Path]) -> bool:
    """Check that each file is one document."""
    kinds = {format_of(path.name, source.format).partition(".")[0] for path in files}
    return source.separator is None and kinds == {"text"}


def _in_megabytes(size: int) -> str:
    return f"{size / MEGABYTE:,.1f} MB" if size >= MEGABYTE // 10 else f"{size / 1000:,.1f} kB"


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
