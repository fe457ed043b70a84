"""Log lines of the training: one every few steps, and one for each evaluation."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from infini_model.data.loading.loader import Loader
from infini_model.training.callbacks.callback import Callback, Evaluation, Step

log = logging.getLogger(__name__)


class Console(Callback):
    """Logs `Step [10/100] | Loss: … | ETA: 5:30`; `is_main` is rank 0, which logs evaluations."""

    def __init__(self, loader: Loader, total_steps: int, *, is_main: bool) -> None:
        self._loader, self._total, self._is_main = loader, total_steps, is_main

    def on_start(self, step: int) -> None:
        """Start the clock of the ETA."""
        self._began, self._began_at = time.monotonic(), step

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Log the step, if it is one to log."""
        if not step.logged:
            return
        log.info(
            "Step [%d/%d] | Loss: %.4f | LR: %.2e | Grad Norm: %.4f | Epoch: %.2f | ETA: %s",
            *(step.number, step.total, step.loss, step.learning_rate, step.grad_norm),
            *(self._loader.consumed / len(self._loader.windows), self._time_left(step)),
        )

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Log the loss of a split."""
        if not self._is_main:
            return
        log.info(
            "Step [%d/%d] | %s/loss: %.4f",
            *(evaluation.step, self._total, evaluation.split, evaluation.loss),
        )

    def _time_left(self, step: Step) -> str:
        """Remaining time at the average pace, including validation and checkpoints: 1:05:30."""
        pace = (time.monotonic() - self._began) / (step.number - self._began_at)
        minutes, seconds = divmod(round(pace * (step.total - step.number)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
