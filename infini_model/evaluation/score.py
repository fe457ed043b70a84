"""The loss of a model on a split, and where inside the window it falls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

import torch
from pydantic import BaseModel, ConfigDict, computed_field
from torch import Tensor

from infini_model.data.loading.loader import IGNORED, Batch
from infini_model.model.llama import InfiniLlama


class Score(BaseModel):
    """What a model made of the windows of a split.

    Attributes:
        windows: Windows scored.
        tokens: Tokens predicted, masked ones left out.
        loss: Mean cross entropy in nats a token; None where there was no token.
        loss_by_segment: The same for each segment of the window.
    """

    model_config = ConfigDict(frozen=True)

    windows: int
    tokens: int
    loss: float | None
    loss_by_segment: list[float | None]

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own pattern
    @property
    def perplexity(self) -> float | None:
        """exp(loss), or e^700 beyond it: a float holds no more."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


NOTHING = Score(windows=0, tokens=0, loss=None, loss_by_segment=[])


@torch.inference_mode()
def score(
    model: InfiniLlama,
    batches: Iterable[Batch],
    *,
    bf16: bool = False,
    forget: bool = False,
    advance: Callable[[int], None] | None = None,
) -> Score:
    """Score `batches` of windows, on the model's device.

    Args:
        model: The model.
        batches: Windows whose context is a multiple of the model's segment_length.
        bf16: Whether the matrix products are in bfloat16, as in a training on CUDA.
        forget: Empty the memory before every segment, to see what it is worth.
        advance: Called with the number of windows after each batch.
    """
    length, device = model.config.segment_length, model.lm_head.weight.device
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
    windows, sums, counts = 0, torch.zeros(0), torch.zeros(0)
    for batch in batches:
        ids, labels, reset = batch.to(device)
        if forget:
            reset = torch.ones(len(ids), ids.size(1) // length, dtype=torch.bool, device=device)
        with autocast:
            losses = model(ids, labels=labels, reset=reset, reduction="none").loss
        sums = _added(sums, losses.double(), length)
        counts = _added(counts, (labels != IGNORED).double(), length)
        windows += len(ids)
        if advance is not None:
            advance(len(ids))
    pairs = list(zip(sums.tolist(), counts.tolist(), strict=True))
    return Score(
        windows=windows,
        tokens=int(counts.sum()),
        loss=float(sums.sum() / counts.sum()) if counts.sum() else None,
        loss_by_segment=[total / count if count else None for total, count in pairs],
    )


def _added(total: Tensor, values: Tensor, length: int) -> Tensor:
    """`total` [S] with `values` [B, T] added segment by segment, on the CPU in float64."""
    added = values.reshape(len(values), -1, length).sum(dim=(0, 2)).cpu()
    return added if len(total) == 0 else total + added
