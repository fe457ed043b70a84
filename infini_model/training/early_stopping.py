"""Ending a training once the validation loss no longer improves (`training.early_stopping`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from infini_model.config.training import EarlyStoppingConfig
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.training.callbacks import Callback, Evaluation
from infini_model.training.setup import TrainingSetup

log = logging.getLogger(__name__)


def validations_since_best(losses: Mapping[int, float], min_delta: float) -> int:
    """Count the validations since the last one that was more than `min_delta` below the best.

    `losses` are those of validations by their step.
    """
    best, since = math.inf, 0
    for _, loss in sorted(losses.items()):
        best, since = (loss, 0) if loss < best - min_delta else (best, since + 1)
    return since


class EarlyStopping(Callback):
    """The validation losses of the run, those before it was resumed included."""

    def __init__(self, settings: EarlyStoppingConfig, setup: TrainingSetup) -> None:
        self._settings, self._setup = settings, setup
        self._losses: dict[int, float] = {}

    def on_start(self, step: int) -> None:  # noqa: ARG002
        """Learn from rank 0 what was recorded, so that all ranks decide alike."""
        run_dir = self._setup.run_dir
        read = self._setup.world.broadcast(lambda: [*read_validation_losses(run_dir).items()])
        self._losses = dict(read)

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if evaluation.split == "validation":
            self._losses[evaluation.step] = evaluation.loss

    def ends(self, step: int) -> bool:
        """Return True if the training is to end after `step`."""
        min_delta = self._settings.min_delta
        since = validations_since_best(self._losses, min_delta)
        is_over = since >= self._settings.patience
        if is_over and self._setup.world.is_main:
            log.info(
                "Early stopping at step %d: in the last %d validations the loss did not improve by "
                "more than %g",
                *(step, since, min_delta),
            )
        return is_over
