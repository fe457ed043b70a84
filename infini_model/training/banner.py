"""The banner that a training logs before its first step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from infini_model.data.loading.windows import Windows
from infini_model.training.callbacks.defaults import Training
from infini_model.training.parallel.distributed import World
from infini_model.training.setup import Division

RULE = "=" * 46

log = logging.getLogger(__name__)


def log_rank(world: World) -> None:
    """Log which process this is, and the physical number of its GPU."""
    where = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    gpu = "" if world.gpu is None else f"GPU {world.gpu}, "
    log.info("Rank %d of %d: %s%s", world.rank, world.size, gpu, where)


def log_banner(
    t: Training, division: Division, checkpoint: Path | None, windows: Mapping[str, Windows]
) -> None:
    """Log where the training runs, what it trains, and the totals."""
    training, trained = t.config.training, len(windows["train"])
    batch, dataset = division.global_batch, t.manifest.folder_name
    tokens = batch * t.config.packing.context_length
    parameters = sum(p.numel() for p in t.model.parameters())
    for line in (
        RULE,
        f"Run: {t.run_dir}",
        f"Dataset: {dataset}",
        f"Device: {t.world.device.type}, {t.replica.precision.name}",
        f"Local attention: {t.replica.attention_backend}",
        f"Number of processes: {t.world.size}, {t.config.launch.strategy}",
        f"Batch size per process: {division.micro_batch}",
        f"Gradient accumulation: {division.accumulation}",
        f"Total batch size: {batch} windows, {tokens:,} tokens per step",
        f"Model parameters: {parameters:,}",
        f"Vocabulary size: {t.config.model.vocab_size}",
        f"Resuming from: {checkpoint}" if checkpoint else f"Seed: {t.config.run.seed}",
        f"Steps: {t.step} of {training.total_steps} done",
        f"Epochs: {training.total_steps * batch / trained:.2f} of {trained:,} windows",
        RULE,
    ):
        log.info("%s", line)
    for split in ("validation", "test"):
        if len(windows[split]) == 0:
            log.warning("%s: split %s is too small for one window; no loss", dataset, split)
