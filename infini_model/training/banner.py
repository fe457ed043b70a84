"""The banner that a training logs before its first step."""

from __future__ import annotations

import logging

import torch

from infini_model.training.parts import Parts

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
    for split in ("validation", "test"):
        if len(parts.windows[split]) == 0:
            log.warning(
                "%s: split %s is too small for one window; no loss",
                parts.manifest.folder_name,
                split,
            )


def _lines(parts: Parts) -> list[str]:
    config, division, start = parts.config, parts.division, parts.start
    total, trained = config.training.total_steps, len(parts.windows["train"])
    parameters = sum(p.numel() for p in parts.model.parameters())
    resumed = start.checkpoint is not None
    return [
        f"Run: {parts.run_dir}",
        f"Dataset: {parts.manifest.folder_name}",
        f"Device: {parts.world.device.type}, {parts.replica.precision.name}",
        f"Local attention: {parts.replica.attention_backend}",
        f"Number of processes: {parts.world.size}, {config.launch.strategy}",
        f"Batch size per process: {division.micro_batch}",
        f"Gradient accumulation: {division.accumulation}",
        f"Total batch size: {division.global_batch} windows, {parts.step_tokens:,} tokens per step",
        f"Model parameters: {parameters:,}",
        f"Vocabulary size: {config.model.vocab_size}",
        f"Resuming from: {start.checkpoint}" if resumed else f"Seed: {config.run.seed}",
        f"Steps: {start.step} of {total} done",
        f"Epochs: {total * division.global_batch / trained:.2f} of {trained:,} windows",
    ]
