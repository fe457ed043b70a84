"""The devices that tokenise: one worker per core or GPU."""

from __future__ import annotations

import logging

from infini_model.config import DataConfig
from infini_model.data.threads import thread_count
from infini_model.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def worker_devices(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The device of each worker, GPUs first.

    `data.device: cuda` is every GPU, `mixed` every GPU and the cores that do not feed one. If
    there is no GPU, or the tokenizer cannot run on one, the CPU does all the work and one warning
    says so.
    """
    # By default one more than cores, since some threads wait for the disk.
    cpu = ["cpu"] * (config.workers or thread_count(0) + 1)
    if config.device in ("auto", "cpu"):
        return cpu
    gpus = _gpus(config.device)
    reason = why_unsupported(tokenizer) if gpus else "this machine has no GPU"
    if reason:
        log.warning(
            "data.device=%s has no effect: %s; tokenising on the CPU with %d threads instead",
            config.device,
            reason,
            len(cpu),
        )
        return cpu
    return [*gpus, *cpu[len(gpus) :]] if config.device == "mixed" else gpus


def _gpus(device: str) -> list[str]:
    if device.startswith("cuda:"):
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def why_unsupported(tokenizer: Tokenizer) -> str | None:
    """Why the tokenizer cannot run on a GPU, or None if it can."""
    from infini_model.data.tokenizers.gpu.supported import (
        UnsupportedTokenizerError,
        check_supported,
    )

    try:
        check_supported(tokenizer)
    except UnsupportedTokenizerError as error:
        return str(error)
    return None
