"""The hooks of the training loop.

To add a callback, subclass `Callback` in a new file and add it to the list in
`infini_model.training.train.default_callbacks`. Hooks run on every rank, so they may use collective
operations, and in the order of that list.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVarTuple

if TYPE_CHECKING:
    from infini_model.training.train import Trainer

# How a training ended, in MLflow's words.
Status = Literal["FINISHED", "FAILED", "KILLED"]
Arguments = TypeVarTuple("Arguments")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """An optimizer step that has been computed.

    Attributes:
        number: 1 for the first step.
        targets: Number of targets of the global batch: neither padding nor what is not learned.
        loss: Mean loss over them, in nats.
        rank_loss: Sum of the losses of this rank's share of the batch.
        grad_norm: Norm of all gradients before clipping.
        learning_rate: Learning rate of the matrices.
        loss_scale: Loss scale in fp16 after the step; None in other precisions.
        overflowed: Whether gradients overflowed in fp16, so that the update was skipped.
        first_window: Windows read before those of the step, over all ranks.
        windows_read: Windows read with them.
        peak_bytes: Most memory of this rank's tensors at once during the step; None on the CPU.
        seconds: Wall-clock time of the step.
        wait_seconds: How much of it the step waited for its batches.
    """

    number: int
    total: int
    targets: int
    loss: float
    rank_loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None
    overflowed: bool
    first_window: int
    windows_read: int
    peak_bytes: int | None
    seconds: float
    wait_seconds: float
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
        loss: Mean loss over the targets, in nats.
        bits_per_byte: The same in bits for each byte of text; None without any.
        by_source: The mean loss of each named source that has some.
    """

    step: int
    split: str
    loss: float
    bits_per_byte: float | None
    by_source: Mapping[str, float]


class Callback:
    """Base class whose hooks do nothing."""

    def attach(self, trainer: Trainer) -> None:
        """The trainer is made that will call the other hooks."""

    def on_start(self, step: int) -> None:
        """The training starts, or resumes after `step` steps."""

    def before_step(self, number: int) -> None:
        """Step `number` begins; on a GPU the one before it may still be computed."""

    def after_gradients(self) -> None:
        """This rank's gradients are computed, or launched on a GPU.

        It has not waited for the others' losses yet.
        """

    def on_non_finite(self, step: Step) -> None:
        """The loss or a gradient is NaN or infinite; the weights are those from before the step.

        With `logging.debug` the parameters hold the gradients of the step, not clipped. The
        training ends after this hook.
        """

    def metrics(self, step: Step) -> Mapping[str, float]:  # noqa: ARG002
        """Metrics of a step, by their MLflow names."""
        return {}

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """The step is complete; `metrics` holds the metrics of all callbacks.

        On a GPU the next step has been launched by then, unless this one is followed by a
        validation, a checkpoint or the end.
        """

    def expect_long_work(self) -> None:
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

    def __init__(self, members: Iterable[Callback] = ()) -> None:
        self.members = list(members)

    def call(self, hook: Callable[[Callback, *Arguments], None], *args: *Arguments) -> None:
        """Call a hook of all members: `call(Callback.on_start, step)`."""
        for member in self.members:
            getattr(member, hook.__name__)(*args)

    def finish_step(self, step: Step) -> None:
        """Collect the metrics of all members, then call `after_step` of each with all of them."""
        metrics = {name: v for each in self.members for name, v in each.metrics(step).items()}
        self.call(Callback.after_step, step, metrics)

    def finish_evaluation(self, evaluation: Evaluation, is_stopped: Callable[[], bool]) -> None:
        """As `finish_step`, with `evaluation_metrics` and, unless stopped, `after_evaluation`."""
        found = [each.evaluation_metrics(evaluation) for each in self.members]
        metrics = {name: value for each in found for name, value in each.items()}
        if not is_stopped():
            self.call(Callback.after_evaluation, evaluation, metrics)

    def end(self, status: Status) -> None:
        """Call `on_end` of all members; an error in one is logged and keeps none from ending."""
        for member in self.members:
            try:
                member.on_end(status)
            except Exception as error:
                # An error that ended the training is reported; this one may follow from it.
                message = f"{type(member).__name__} failed at the end of the training: {error!r}"
                log.error(message, exc_info=status != "FAILED")  # noqa: TRY400
