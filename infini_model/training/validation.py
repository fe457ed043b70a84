"""Validation during training: the loss on the held-out splits, and what the memory contributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from infini_model.data.loading.windows import Windows, validation_batches
from infini_model.training.distributed import World
from infini_model.training.parallel import TrainModule

# Windows of the probe, some of those that the validation scores; each costs as much as two.
PROBE_WINDOWS = 8


def validate_split(
    windows: Windows,
    model: TrainModule,
    world: World,
    *,
    batch_size: int,
    max_windows: int | None,
    is_stopped: Callable[[], bool],
) -> Tensor | None:
    """Loss sums and target counts of a sample of the split, the same on all ranks.

    Args:
        windows: Windows of the split.
        model: Scores the batches, as in the evaluation report.
        world: The ranks that share the work.
        batch_size: Windows per batch of a rank.
        max_windows: Size of the sample; None scores the whole split.
        is_stopped: Called after each batch on all ranks; if true, validation stops and returns
            None.

    Returns:
        By segment of the window, [2, S] float64 on the CPU.
    """
    totals: Tensor | None = None
    for batch in validation_batches(windows, batch_size, world.rank, world.size, max_windows):
        scored = model.score(batch)
        totals = scored if totals is None else totals + scored
        if is_stopped():
            return None
    return None if totals is None else world.sum(totals).cpu()


def loss_by_segment(sums: Tensor, targets: Tensor) -> dict[str, float]:
    """Mean losses of the segments 1, 2, 3-4, 5-8 and so on, which are few for long windows.

    Those without targets are left out, as is the only segment of a window.

    Args:
        sums: Of the losses, by segment, [S].
        targets: Their number, [S].
    """
    found, first = dict[str, float](), 0
    while first < len(sums) > 1:
        last = min(2 * first or 1, len(sums))
        if count := float(targets[first:last].sum()):
            name = str(last) if last == first + 1 else f"{first + 1}-{last}"
            found[name] = float(sums[first:last].sum()) / count
        first = last
    return found


class MemoryProbe(NamedTuple):
    """A few windows, scored with memory and without.

    Attributes:
        loss: Mean loss over their targets, in nats.
        gain: How much lower that is than without memory.
        error: Standard error of the gain, of differences that are paired by window; infinite for a
            single one.
    """

    loss: float
    gain: float
    error: float


def probe_memory(
    windows: Windows, model: TrainModule, world: World, *, batch_size: int, max_windows: int | None
) -> MemoryProbe | None:
    """Probe a fixed part of the sample of `validate_split`, the same on all ranks.

    Arguments are those of `validate_split`. None if no window has a target.
    """
    most = PROBE_WINDOWS if max_windows is None else min(PROBE_WINDOWS, max_windows)
    sums: Tensor | None = None
    for batch in validation_batches(windows, batch_size, world.rank, world.size, most):
        paired = _paired_sums(model.score_with_and_without_memory(batch))
        sums = paired if sums is None else sums + paired
    if sums is None:
        return None
    loss, gain, targets, *squares, count = world.sum(sums).tolist()
    if not targets:
        return None
    mean = gain / targets
    of_gains, of_both, of_targets = squares
    residuals = max(0.0, of_gains - 2.0 * mean * of_both + mean * mean * of_targets)
    error = float("inf")
    if count > 1:
        error = (residuals * count / (count - 1)) ** 0.5 / targets
    return MemoryProbe(loss / targets, mean, error)


def _paired_sums(scored: Tensor) -> Tensor:
    """What mean and standard error are computed from, [7], of losses and counts [3, B]."""
    with_memory, without, targets = scored
    gains = without - with_memory
    terms = [with_memory, gains, targets, gains * gains, gains * targets, targets * targets]
    return torch.stack([each.sum() for each in (*terms, (targets > 0).double())])
