"""Signals to a training in this process, at a step that a test chooses."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from infini_model.training.callbacks.callback import Callback, Evaluation, Step


class StopAfter(Callback):
    """Sends this process a signal after the validation at step 0, or after a later step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        if evaluation.step == self.step == 0:
            os.kill(os.getpid(), self.number)

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        if step.number == self.step:
            os.kill(os.getpid(), self.number)
