"""The windows of a split to score: a fixed sample, the same in training and in the report."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from infini_model.data.loading.permutation import permute
from infini_model.data.loading.read_ahead import ReadAhead, Request
from infini_model.data.loading.windows import Batch, Windows

# Not the run's seed, so that runs with different seeds are compared on the same windows.
SAMPLE_SEED = 0


def sample_windows(count: int, max_windows: int | None) -> np.ndarray:
    """Numbers of the windows to score out of `count`: int64, at most `max_windows`, all if None.

    The sample is spread over the whole split, and a larger sample contains the smaller ones.
    """
    size = count if max_windows is None else min(count, max_windows)
    positions = np.arange(size)
    if size == count:
        return positions
    return np.sort(permute(positions, count, SAMPLE_SEED, np.zeros_like(positions)))


def validation_batches(
    windows: Windows,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    max_windows: int | None = None,
) -> Iterator[Batch]:
    """This rank's batches of `sample_windows`; each window is in one batch of one rank.

    Every rank yields the same number of batches, as collective operations require; the last may be
    partial. A rank with no window left yields one without valid positions, which adds nothing to a
    sum over targets.
    """
    numbers = sample_windows(len(windows), max_windows)
    together = batch_size * world_size
    steps = [numbers[start : start + together] for start in range(0, len(numbers), together)]
    shares = [step[rank * batch_size : (rank + 1) * batch_size] for step in steps]
    requests = [
        Request(windows, mine if len(mine) else step[:1])
        for step, mine in zip(steps, shares, strict=True)
    ]
    with ReadAhead(windows, requests) as batches:
        for mine, batch in zip(shares, batches, strict=True):
            if len(mine):
                yield batch
            else:
                none = torch.zeros(batch.tokens.shape[:2], dtype=torch.int64)
                yield batch._replace(valid=none)
