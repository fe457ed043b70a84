"""Validation during training: the loss on the held-out splits, and what follows from it.

A training ends once the loss no longer improves (`training.early_stopping`).

The probe of the memory reads a few windows of the validation sample with it and without it, so that
the difference is of the same windows. It changes neither weights nor random numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from infini_model.config.training import EarlyStoppingConfig
from infini_model.data.loading.windows import validation_batches
from infini_model.model.inspection import PLACES, effect
from infini_model.runtime.metrics_file import Line, read_validation_losses
from infini_model.training.callbacks import Callback, Evaluation
from infini_model.training.parallel import full_tensor
from infini_model.training.setup import TrainingSetup

# Windows of the probe, some of those that the validation scores; each costs as much as two.
PROBE_WINDOWS = 8
# Steps after the warm-up from which on a warning is due: before, memories are hardly trained.
SETTLED_STEPS = 100

log = logging.getLogger(__name__)


def validate_split(
    setup: TrainingSetup, split: str, is_stopped: Callable[[], bool]
) -> Tensor | None:
    """Loss sums, targets and their bytes of a sample of the split, the same on all ranks.

    They are by source and segment of the window, [sources, 3, S] float64 on the CPU. `is_stopped`
    is called after each batch on all ranks; if true, validation stops and returns None.
    """
    totals: Tensor | None = None
    windows, world, most = setup.windows(split), setup.world, setup.config.evaluation.max_windows
    batch_size = setup.config.training.batch_size
    for batch in validation_batches(windows, batch_size, world.rank, world.size, most):
        scored = windows.sum_by_source(setup.train_module.score(batch), batch)
        totals = scored if totals is None else totals + scored
        if is_stopped():
            return None
    return None if totals is None else world.sum(totals).cpu()


def probe_memory(setup: TrainingSetup, split: str) -> dict[str, float]:
    """Score a fixed part of the sample of `validate_split` with memory and without.

    Returns metrics, the same on all ranks; none if no window has a target. The gain is how much
    lower the loss is with memory; the differences are paired by window, and the standard error of a
    single one is infinite.
    """
    config, world, most = setup.config, setup.world, PROBE_WINDOWS
    if config.evaluation.max_windows is not None:
        most = min(most, config.evaluation.max_windows)
    sums: Tensor | None = None
    batch_size = config.training.batch_size
    for batch in validation_batches(setup.windows(split), batch_size, world.rank, world.size, most):
        loss, without, targets = setup.train_module.score_with_and_without_memory(batch)
        gain = without - loss
        # What mean and standard error are computed from.
        terms = [loss, gain, targets, gain * gain, gain * targets, targets * targets]
        paired = torch.stack([each.sum() for each in (*terms, (targets > 0).double())])
        sums = paired if sums is None else sums + paired
    if sums is None:
        return {}
    total, gained, counted, of_gains, of_both, of_targets, count = world.sum(sums).tolist()
    if not counted:
        return {}
    mean, error = gained / counted, math.inf
    if count > 1:
        residuals = max(0.0, of_gains - 2.0 * mean * of_both + mean * mean * of_targets)
        error = (residuals * count / (count - 1)) ** 0.5 / counted
    loss = total / counted
    return {
        "memory/probe_loss": loss,
        "memory/probe_loss_without_memory": loss + mean,
        "memory/probe_gain": mean,
        "memory/probe_gain_error": error,
    }


class MemoryReports(Callback):
    """Records the memory of the model, and warns once if it hurts."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup, self._config = setup, setup.config
        self._has_warned = False
        # A window of one segment reads nothing.
        is_long = self._config.packing.context_length > self._config.model.segment_length
        self._is_read = is_long and self._config.model.memory != "none"

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """What the probe finds, and by layer `memory/layer_N/read_weight_mean` and so on."""
        setup = self._setup
        if evaluation.split != "validation" or not self._is_read:
            return {}
        found = dict[str, float]()
        for layer, heads in enumerate(setup.model.read_strengths(full_tensor)):
            prefix = f"memory/layer_{layer}/read_weight"
            found[f"{prefix}_mean"] = heads.mean().item()
            found[f"{prefix}_min"] = heads.min().item()
            found[f"{prefix}_max"] = heads.max().item()
        found |= probe_memory(setup, evaluation.split)
        found = {name: value for name, value in found.items() if math.isfinite(value)}
        if setup.world.is_main and not self._has_warned:
            self._warn(evaluation.step, found)
        return found

    def _warn(self, step: int, found: Line) -> None:
        """Warn if the metrics of an evaluation are a reason to."""
        settled = self._config.training.warmup_steps + SETTLED_STEPS
        if step < settled or "memory/probe_gain_error" not in found:
            return
        gain, margin = found["memory/probe_gain"], 2.0 * found["memory/probe_gain_error"]
        if (shown := effect(gain, gain - margin, gain + margin)) < 0.0:
            log.warning(
                "At step %d: The memory hurts: with the same weights the loss is %.*f lower "
                "without it. Train longer, or without it: model.memory=none.",
                *(step, PLACES, -shown),
            )
            self._has_warned = True


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
