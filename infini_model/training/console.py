"""What a training logs: a banner at its start, a line every few steps and for each evaluation."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from infini_model.data.loading.packing import PairPacking
from infini_model.training.callbacks import Callback, Evaluation, Step
from infini_model.training.memory_estimate import Device, MemoryEstimate, estimate_memory
from infini_model.training.setup import TrainingSetup

RULE = "=" * 46

log = logging.getLogger(__name__)


class Console(Callback):
    """Logs the banner, and `Step [10/100] | Loss: … | ETA: 5:30`; evaluations on rank 0."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup, self._is_main = setup, setup.world.is_main
        self._windows = len(setup.windows["train"])

    def on_start(self, step: int) -> None:
        """Log the banner, and start the clock of the ETA."""
        log_banner(self._setup)
        self._began, self._began_at = time.monotonic(), step

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Log the step, if it is one to log."""
        if not step.logged:
            return
        read = step.first_window + self._setup.plan.global_batch
        log.info(
            "Step [%d/%d] | Loss: %.4f | LR: %.2e | Grad Norm: %.4f | Epoch: %.2f | ETA: %s",
            *(step.number, step.total, step.loss, step.learning_rate, step.grad_norm),
            *(read / self._windows, self._time_left(step)),
        )

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Log the loss of a split."""
        if self._is_main:
            total = self._setup.config.training.total_steps
            log.info(
                "Step [%d/%d] | %s/loss: %.4f",
                *(evaluation.step, total, evaluation.split, evaluation.loss),
            )

    def _time_left(self, step: Step) -> str:
        """Remaining time at the average pace, including validation and checkpoints: 1:05:30."""
        pace = (time.monotonic() - self._began) / (step.number - self._began_at)
        minutes, seconds = divmod(round(pace * (step.total - step.number)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def log_banner(setup: TrainingSetup) -> None:
    """Log each rank with its GPU and, on rank 0, what is trained and the totals."""
    world = setup.world
    where = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    gpu = "" if world.gpu is None else f"GPU {world.gpu}, "
    log.info("Rank %d of %d: %s%s", world.rank, world.size, gpu, where)
    if not world.is_main:
        return
    for line in (RULE, *_lines(setup), RULE):
        log.info("%s", line)
    for split, windows in setup.windows.items():
        packing = windows.packing
        if isinstance(packing, PairPacking) and packing.shortfall:
            log.warning("%s: split %s: %s", setup.manifest.folder_name, split, packing.shortfall)
    for split in ("validation", "test"):
        if len(setup.windows[split]) == 0:
            log.warning(
                "%s: split %s is too small for one window; no loss",
                setup.manifest.folder_name,
                split,
            )


def _beginning(setup: TrainingSetup) -> str:
    """Where the weights come from."""
    if setup.start.checkpoint is not None:
        return f"Resuming from: {setup.start.checkpoint}"
    if (weights := setup.initial_weights) is not None:
        place = weights.folder if weights.commit is None else f"{weights.name} in {weights.folder}"
        return f"Initial weights: {place}"
    return f"Seed: {setup.config.run.seed}"


def _parameters(setup: TrainingSetup) -> str:
    """How many there are and, with LoRA, how many of them are trained."""
    parameters = [*setup.model.parameters()]
    total = sum(p.numel() for p in parameters)
    if setup.config.training.lora is None:
        return f"{total:,}"
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{total:,}, of which {trained:,} are trained ({trained / total:.2%})"


def _memory(setup: TrainingSetup) -> MemoryEstimate:
    """What a process needs for its tensors."""
    device: Device = "cuda" if setup.world.device.type == "cuda" else "cpu"
    config = setup.config
    return estimate_memory(config, setup.world.size, device)


def _schedule(setup: TrainingSetup) -> list[str]:
    """Where windows grow, if they do."""
    schedule, phases = setup.config.packing.context_schedule, setup.loader.phases
    if schedule is None:
        return []
    begins = [phase.first // setup.plan.global_batch for phase in phases]
    pairs = zip(schedule.values(), begins, strict=True)
    steps = ", ".join(f"{segments} from step {first}" for segments, first in pairs)
    return [f"Segments of a window: {steps}"]


def _lines(setup: TrainingSetup) -> list[str]:
    config, plan, start = setup.config, setup.plan, setup.start
    total, trained = config.training.total_steps, len(setup.windows["train"])
    return [
        f"Run: {setup.run_dir}",
        f"Dataset: {setup.manifest.folder_name}",
        f"Objective: {config.training.objective}",
        f"Device: {setup.world.device.type}, {setup.train_module.precision.name}",
        f"Local attention: {setup.train_module.attention_backend}",
        f"torch.compile: {setup.train_module.compiled}",
        f"Number of processes: {setup.world.size}, {config.launch.strategy}",
        f"Batch size per process: {plan.micro_batch}",
        f"Gradient accumulation: {plan.accumulation}",
        f"Total batch size: {plan.global_batch} windows, {setup.step_tokens:,} tokens per step",
        *_schedule(setup),
        f"Model parameters: {_parameters(setup)}",
        f"Memory per process, estimated: {_memory(setup)}",
        f"Vocabulary size: {config.model.vocab_size}",
        _beginning(setup),
        f"Steps: {start.step} of {total} done",
        f"Epochs: {total * plan.global_batch / trained:.2f} of {trained:,} windows",
    ]
