"""The loss of a model on a split, in total and by segment."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, computed_field
from torch import Tensor


class Score(BaseModel):
    """The losses of the windows of a split.

    Attributes:
        windows: Windows scored.
        tokens: Tokens predicted, without masked ones; of prompts and answers, the answers.
        loss: Mean loss in nats per token, for each of these; None without any.
        loss_by_segment: Mean loss of each segment of the window.
    """

    model_config = ConfigDict(frozen=True)

    windows: int
    tokens: int
    loss: float | None
    loss_by_segment: list[float | None]

    @classmethod
    def of_totals(cls, windows: int, totals: Tensor) -> Score:
        """The score from sums and counts by segment, [2, S], see `Scorer.score`."""
        sums, counts = totals.cpu()
        # Shares of an answer add up to almost 1.
        tokens = round(float(counts.sum()))
        return cls(
            windows=windows,
            tokens=tokens,
            loss=float(sums.sum() / counts.sum()) if tokens else None,
            loss_by_segment=[
                total / count if count else None
                for total, count in zip(sums.tolist(), counts.tolist(), strict=True)
            ],
        )

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own pattern
    @property
    def perplexity(self) -> float | None:
        """exp(loss), capped at e^700 to avoid overflow."""
        return None if self.loss is None else math.exp(min(self.loss, 700.0))


EMPTY = Score(windows=0, tokens=0, loss=None, loss_by_segment=[])
