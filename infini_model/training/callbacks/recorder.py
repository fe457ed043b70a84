"""Write the metrics of a run: one line of `metrics.jsonl` per step and per evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from infini_model.data.loading.loader import Loader
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.callbacks.callback import Callback, Evaluation, Status, Step
from infini_model.training.callbacks.sinks import Sinks
from infini_model.training.replica import Replica
from infini_model.training.validation import loss_by_segment


class Recorder(Callback):
    """Writes the metrics, on rank 0; `sinks` follow the file."""

    def __init__(
        self, file: MetricsFile, sinks: Sinks, loader: Loader, replica: Replica, step_tokens: int
    ) -> None:
        """`step_tokens` is the number of tokens in a global batch."""
        self._file, self._sinks, self._loader, self._replica = file, sinks, loader, replica
        self._step_tokens = step_tokens
        self._stall_seconds: float | None = None

    def on_start(self, step: int) -> None:  # noqa: ARG002
        """Start the sinks."""
        self._sinks.start()

    def metrics(self, step: Step, seconds: float) -> dict[str, float]:
        """The metrics of a step."""
        values = {
            "train/loss": step.loss,
            "train/learning_rate": step.learning_rate,
            "train/tokens_per_second": self._step_tokens / seconds,
            "train/step_seconds": seconds,
            "train/data_wait_seconds": self._loader.wait_seconds,
        }
        if self._replica.loss_scale is not None:
            values["train/loss_scale"] = self._replica.loss_scale
        if math.isfinite(step.grad_norm):
            values["train/grad_norm"] = step.grad_norm
        else:
            values["train/skipped_steps"] = 1.0
        if self._stall_seconds is not None:
            # The stall was between the previous step and this one.
            values["checkpoint/stall_seconds"] = self._stall_seconds
            self._stall_seconds = None
        return values

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Write the line of the step. Raises `UserError` if the disk is full."""
        self._file.append(step.number, metrics)

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """The loss of the split; of windows with several segments, also by segment."""
        by_segment = loss_by_segment(evaluation.sums, evaluation.targets)
        return {
            f"{evaluation.split}/loss": evaluation.loss,
            **{f"{evaluation.split}/loss_by_segment/{k}": v for k, v in by_segment.items()},
        }

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Write the line of the evaluation. Raises `UserError` if the disk is full."""
        self._file.append(evaluation.step, metrics)

    def after_checkpoint(self, step: int, seconds: float) -> None:  # noqa: ARG002
        """Keep the stall time for the line of the next step."""
        self._stall_seconds = seconds

    def on_end(self, status: Status) -> None:
        """Give the sinks a bounded time to flush."""
        self._sinks.close(status)
        self._file.close()  # Raises on a full disk.
