"""The workers that tokenise: one thread per core or GPU, all taking partitions from one queue.

So CPU threads and GPUs share the work according to their speed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from infini_model.config import DataConfig
from infini_model.data.shards.partitions import PartitionRecord, PartitionTask, make_partition
from infini_model.data.sources.spill import Spill
from infini_model.data.threads import Advance, Worker, for_each, thread_count
from infini_model.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def make_partitions(
    tasks: Sequence[PartitionTask],
    spill: Spill,
    tokenizer: Tokenizer,
    devices: Sequence[str],
    advance: Advance,
) -> dict[str, PartitionRecord]:
    """Make the partitions of a spill, in no particular order; returns them by key.

    Starts one thread per device, but no more than there are partitions. The first error stops the
    work and is raised.
    """
    records: dict[str, PartitionRecord] = {}

    def make(tokenizer: Tokenizer, task: PartitionTask, advance: Advance) -> None:
        records[task.key] = make_partition(task, spill, tokenizer, advance)

    workers: list[Worker[PartitionTask]] = [
        partial(make, _on_device(tokenizer, device)) for device in devices[: len(tasks)]
    ]
    for_each(tasks, workers, advance)
    return records


def _on_device(tokenizer: Tokenizer, device: str) -> Tokenizer:
    """The tokenizer of a worker: on its device, or on the CPU with a warning."""
    if device == "cpu":
        return tokenizer
    from infini_model.data.tokenizers.gpu.device_tokenizer import put_on_device
    from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError

    try:
        return put_on_device(tokenizer, device)
    except UnsupportedTokenizerError as error:
        log.warning(
            "data.device: %s is not used: %s; its worker tokenises on the CPU", device, error
        )
        return tokenizer


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
    reason = _why_unsupported(tokenizer) if gpus else "this machine has no GPU"
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


def _why_unsupported(tokenizer: Tokenizer) -> str | None:
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
