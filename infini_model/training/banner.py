"""The banner that a training logs before its first step."""

from __future__ import annotations

import logging

import torch

from infini_model.data.loading.packing import PairPacking
from infini_model.training.parts import Parts
from infini_model.training.sizing.estimate import Device, MemoryEstimate, estimate_memory

RULE = "=" * 46

log = logging.getLogger(__name__)


def log_banner(parts: Parts) -> None:
    """Log each rank with its GPU and, on rank 0, what is trained and the totals."""
    world = parts.world
    where = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    gpu = "" if world.gpu is None else f"GPU {world.gpu}, "
    log.info("Rank %d of %d: %s%s", world.rank, world.size, gpu, where)
    if not world.is_main:
        return
    for line in (RULE, *_lines(parts), RULE):
        log.info("%s", line)
    for split, windows in parts.windows.items():
        packing = windows.packing
        if isinstance(packing, PairPacking) and packing.shortfall:
            log.warning("%s: split %s: %s", parts.manifest.folder_name, split, packing.shortfall)
    for split in ("validation", "test"):
        if len(parts.windows[split]) == 0:
            log.warning(
                "%s: split %s is too small for one window; no loss",
                parts.manifest.folder_name,
                split,
            )


def _beginning(parts: Parts) -> str:
    """Where the weights come from."""
    if parts.start.checkpoint is not None:
        return f"Resuming from: {parts.start.checkpoint}"
    if (weights := parts.initial_weights) is not None:
        place = weights.folder if weights.commit is None else f"{weights.name} in {weights.folder}"
        return f"Initial weights: {place}"
    return f"Seed: {parts.config.run.seed}"


def _parameters(parts: Parts) -> str:
    """How many there are and, with LoRA, how many of them are trained."""
    parameters = [*parts.model.parameters()]
    total = sum(p.numel() for p in parameters)
    if parts.config.training.lora is None:
        return f"{total:,}"
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return f"{total:,}, of which {trained:,} are trained ({trained / total:.2%})"


def _memory(parts: Parts) -> MemoryEstimate:
    """What a process needs for its tensors."""
    device: Device = "cuda" if parts.world.device.type == "cuda" else "cpu"
    config = parts.division.applied_to(parts.config)
    return estimate_memory(config, parts.world.size, device)


def _schedule(parts: Parts) -> list[str]:
    """Where windows grow, if they do."""
    schedule, phases = parts.config.packing.context_schedule, parts.loader.phases
    if schedule is None:
        return []
    begins = [phase.first // parts.division.global_batch for phase in phases]
    pairs = zip(schedule.values(), begins, strict=True)
    steps = ", ".join(f"{segments} from step {first}" for segments, first in pairs)
    return [f"Segments of a window: {steps}"]


def _lines(parts: Parts) -> list[str]:
    config, division, start = parts.config, parts.division, parts.start
    total, trained = config.training.total_steps, len(parts.windows["train"])
    return [
        f"Run: {parts.run_dir}",
        f"Dataset: {parts.manifest.folder_name}",
        f"Objective: {config.training.objective}",
        f"Device: {parts.world.device.type}, {parts.replica.precision.name}",
        f"Local attention: {parts.replica.attention_backend}",
        f"torch.compile: {parts.replica.compiled}",
        f"Number of processes: {parts.world.size}, {config.launch.strategy}",
        f"Batch size per process: {division.micro_batch}",
        f"Gradient accumulation: {division.accumulation}",
        f"Total batch size: {division.global_batch} windows, {parts.step_tokens:,} tokens per step",
        *_schedule(parts),
        f"Model parameters: {_parameters(parts)}",
        f"Memory per process, estimated: {_memory(parts)}",
        f"Vocabulary size: {config.model.vocab_size}",
        _beginning(parts),
        f"Steps: {start.step} of {total} done",
        f"Epochs: {total * division.global_batch / trained:.2f} of {trained:,} windows",
    ]
