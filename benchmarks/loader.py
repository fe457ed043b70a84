"""Tokens per second from shards to batches in host memory, on one core.

`infini` is this project's loader, in each mode of packing. `DataLoader` is PyTorch's, over the same
tokens from `datasets` in torch format, already cut into blocks across documents (not timed). Both
shuffle and return int64 `input_ids` and `labels` of the same shape, and both run on one core
including their threads.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from benchmarks.corpus import text_to_shards, write_corpus
from benchmarks.report import Cell, Ratio, publish, speed_ratio, take_turns
from infini_model.config import PackingConfig
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.objectives.causal import CausalLM

Mode: TypeAlias = Literal["packed", "document", "aligned"]
OURS, PEER = "infini", "DataLoader"
# The small batches of the quickstart, and batches of long windows.
SHAPES = ((8, 512), (8, 8192))
MODES: tuple[Mode, ...] = ("packed", "document", "aligned")
SEGMENT_LENGTH = 256
OBJECTIVE = CausalLM()


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loader", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=30.0, help="maximum size of the text")
    parser.add_argument("--seconds", type=float, default=1.0, help="per peer and turn")
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


def infini(mode: Mode, dataset_dir: Path, batch: int, length: int) -> Iterator[int]:
    """Our loader with a training's inputs and labels; yields the token count of each batch."""
    packing = PackingConfig(mode=mode, context_length=length)
    windows = open_windows(dataset_dir, "train", packing, SEGMENT_LENGTH)
    with Loader(windows, batch_size=batch) as loader:
        for batches in loader:
            inputs = [OBJECTIVE.inputs(each) for each in batches]
            yield sum(checked(each.input_ids, each.labels, batch, length) for each in inputs)


def peer(dataset_dir: Path, batch: int, length: int) -> Iterator[int]:
    """PyTorch's loader, epoch after epoch; yields the token count of each batch."""
    loader = torch.utils.data.DataLoader(
        blocks(dataset_dir, length), batch_size=batch, shuffle=True, drop_last=True
    )
    while True:
        for found in loader:
            ids = found["input_ids"]
            # As common collators do: the model shifts the labels itself.
            yield checked(ids, ids.clone(), batch, length)


def blocks(dataset_dir: Path, length: int) -> Any:
    """The shards of the train split through `datasets`, cut into blocks, in torch format."""
    import datasets

    datasets.disable_progress_bars()
    documents = datasets.load_from_disk(str(dataset_dir))["train"].select_columns("input_ids")

    def cut(rows: dict[str, Any]) -> dict[str, Any]:
        ids = np.concatenate(list(rows["input_ids"]))
        return {"input_ids": list(ids[: len(ids) // length * length].reshape(-1, length))}

    cut_up = documents.with_format("numpy").map(cut, batched=True, load_from_cache_file=False)
    return cut_up.with_format("torch")


def checked(ids: Tensor, labels: Tensor, batch: int, length: int) -> int:
    """The token count of a batch, after checking its shape and dtype."""
    for tensor in (ids, labels):
        assert tensor.shape == (batch, length)
        assert tensor.dtype == torch.int64
    return ids.numel()


def seconds_per_token(batches: Iterator[int], seconds: float) -> Callable[[], float]:
    """A peer for `take_turns` that reads batches for `seconds`."""

    def measure() -> float:
        tokens, passed, began = 0, 0.0, time.perf_counter()
        while passed < seconds:
            tokens += next(batches)
            passed = time.perf_counter() - began
        return passed / tokens

    # Warm up: open files, start threads, load pages into memory.
    next(batches)
    return measure


def compare(
    mode: Mode, dataset_dir: Path, batch: int, length: int, options: argparse.Namespace
) -> tuple[dict[str, Cell], Ratio]:
    """The table row of one mode and batch shape, and our speed relative to PyTorch's."""
    streams = {
        name: seconds_per_token(make(dataset_dir, batch, length), options.seconds)
        for name, make in ((OURS, functools.partial(infini, mode)), (PEER, peer))
    }
    seconds = take_turns(streams, options.turns)
    ratio = speed_ratio(seconds[OURS], seconds[PEER])
    rates = {f"{name} M tokens/s": 1e-6 / statistics.median(each) for name, each in seconds.items()}
    shape = f"{batch} x {length}"
    return {"mode": mode, "batch": shape, **rates, f"speed / {PEER}": ratio}, ratio


def main() -> None:
    """Measure all modes and shapes on one core and print the results."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", options.megabytes)
        text_to_shards(Path(folder) / "corpus", "bytes", Path(folder))
        dataset_dir = Path(folder) / "datasets" / "latest"
        # Threads started from here on inherit the single core.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
        compared = [
            compare(mode, dataset_dir, *shape, options)
            for mode, shape in itertools.product(MODES, SHAPES)
        ]
    rows = [row for row, _ in compared]
    ratios = {f"{PEER}, {row['mode']}, {row['batch']}": ratio for row, ratio in compared}
    publish("loader", "Shards to batches in host memory, on one core", rows, ratios)


if __name__ == "__main__":
    main()
