"""The hooks of the training loop.

To add a callback, subclass `Callback` in a new file and add one line to `default_callbacks` in
`infini_model.training.callbacks.defaults`. Hooks run on every rank, so they may use collective
operations, and in the order of that list.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from infini_model.data.loading.windows import Batch

# How a training ended, in MLflow's words.
Status = Literal["FINISHED", "FAILED", "KILLED"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """An optimizer step after the backward pass, before or after the update.

    Attributes:
        number: 1 for the first step.
        total: Total steps of the training.
        loss: Mean loss over the targets of the global batch, in nats.
        rank_loss: Sum of the losses of this rank's share of the batch.
        grad_norm: Norm of all gradients before clipping.
        learning_rate: Learning rate of the matrices.
        overflowed: Whether gradients overflowed in fp16, so that the update is skipped.
        first_window: Windows read before the global batch, over all ranks.
        batches: This rank's micro-batches.
        logged: Whether this step is logged.
    """

    number: int
    total: int
    loss: float
    rank_loss: float
    grad_norm: float
    learning_rate: float
    overflowed: bool
    first_window: int
    batches: Sequence[Batch]
    logged: bool

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite, and the gradients too unless they overflowed in fp16."""
        return math.isfinite(self.loss) and (math.isfinite(self.grad_norm) or self.overflowed)


@dataclass(frozen=True)
class Evaluation:
    """The score of a sample of a split, the same on all ranks.

    Attributes:
        step: Steps taken before it.
        split: Name of the split.
        loss: Mean loss over the targets, in nats.
        sums: Of the losses, by segment of the window, float64 [S].
        targets: Their number, by segment, float64 [S].
    """

    step: int
    split: str
    loss: float
    sums: Tensor
    targets: Tensor


class Callback:
    """Base class whose hooks do nothing."""

    def on_start(self, step: int) -> None:
        """The training starts, or resumes after `step` steps."""

    def before_step(self) -> None:
        """A step starts."""

    def before_collective(self) -> None:
        """A collective operation of the step starts, which may wait for the other ranks."""

    def after_gradients(self) -> None:
        """This rank's gradients are computed; it has not waited for the others' losses yet."""

    def after_backward(self, step: Step) -> None:
        """All gradients are there, finite unless `step.overflowed`; no weight has changed yet."""

    def on_non_finite(self, step: Step) -> None:
        """The loss or a gradient is NaN or infinite; the training ends after this hook."""

    def metrics(self, step: Step, seconds: float) -> Mapping[str, float]:  # noqa: ARG002
        """Metrics of a step that took `seconds`, by their MLflow names."""
        return {}

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """The step is complete; `metrics` holds the metrics of all callbacks."""

    def before_pause(self) -> None:
        """Work that may take much longer than a step starts, such as a checkpoint or validation."""

    def evaluation_metrics(self, evaluation: Evaluation) -> Mapping[str, float]:  # noqa: ARG002
        """More metrics at an evaluation, by their MLflow names; the model is in eval mode."""
        return {}

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """A split is scored; `metrics` holds the metrics of all callbacks."""

    def after_checkpoint(self, step: int, seconds: float) -> None:
        """Copying the checkpoint of `step` stalled the training for `seconds`."""

    def on_end(self, status: Status) -> None:
        """The training ends, normally or with an exception."""


class Callbacks:
    """A list of callbacks, called in order."""

    def __init__(self, members: Iterable[Callback]) -> None:
        self._members = list(members)

    def on_start(self, step: int) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.on_start(step)

    def before_step(self) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.before_step()

    def before_collective(self) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.before_collective()

    def after_gradients(self) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.after_gradients()

    def after_backward(self, step: Step) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.after_backward(step)

    def on_non_finite(self, step: Step) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.on_non_finite(step)

    def finish_step(self, step: Step, seconds: float) -> None:
        """Collect the metrics of all members, then call `after_step` of each with all of them."""
        metrics: dict[str, float] = {}
        for member in self._members:
            metrics |= member.metrics(step, seconds)
        for member in self._members:
            member.after_step(step, metrics)

    def before_pause(self) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.before_pause()

    def finish_evaluation(self, evaluation: Evaluation) -> None:
        """As `finish_step`, with `evaluation_metrics` and `after_evaluation`."""
        metrics: dict[str, float] = {}
        for member in self._members:
            metrics |= member.evaluation_metrics(evaluation)
        for member in self._members:
            member.after_evaluation(evaluation, metrics)

    def after_checkpoint(self, step: int, seconds: float) -> None:
        """Call this hook of all members."""
        for member in self._members:
            member.after_checkpoint(step, seconds)

    def on_end(self, status: Status) -> None:
        """Call this hook of all members; an error in one is logged and keeps none from ending."""
        for member in self._members:
            try:
                member.on_end(status)
            except Exception as error:
                # An error that ended the training is reported; this one may follow from it.
                told = f"{type(member).__name__} failed at the end of the training: {error!r}"
                log.error(told, exc_info=status != "FAILED")  # noqa: TRY400
