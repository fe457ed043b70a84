"""Validation during training: the loss on the held-out splits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infini_model.data.loading.validation import validation_batches
from infini_model.data.loading.windows import Windows
from infini_model.training.parallel.distributed import World
from infini_model.training.replica import Replica


def validate_split(
    windows: Windows,
    replica: Replica,
    world: World,
    *,
    batch_size: int,
    max_windows: int | None,
    is_stopped: Callable[[], bool],
) -> float | None:
    """Mean loss over the targets of a sample of the split, the same on all ranks.

    Args:
        windows: Windows of the split.
        replica: Scores the batches, as in the evaluation report.
        world: The ranks that share the work.
        batch_size: Windows per batch of a rank.
        max_windows: Size of the sample; None scores the whole split.
        is_stopped: Called after each batch on all ranks; if true, validation stops and returns
            None.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    for batch in validation_batches(windows, batch_size, world.rank, world.size, max_windows):
        totals += replica.score(batch).sum(1)
        if is_stopped():
            return None
    loss_sum, targets = world.sum(totals).tolist()
    return float(loss_sum / max(1.0, targets))
