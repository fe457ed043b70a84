"""Who tokenises: a thread for each core or GPU, and all take partitions from one queue.

CPU threads and GPUs so share the work by how fast they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from infini_model.config import DataConfig
from infini_model.data.shards.partitions import PartitionRecord, PartitionTask, make_partition
from infini_model.data.sources.spill import Spill
from infini_model.data.threads import Tell, Worker, for_each, thread_count
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def make_partitions(
    tasks: Sequence[PartitionTask],
    spill: Spill,
    tokenizer: Tokenizer,
    devices: Sequence[str],
    tell: Tell,
) -> dict[str, PartitionRecord]:
    """Make all the partitions of a spill, in no particular order; returns them by key.

    A thread for each of `devices`, but no more than partitions. The first error ends the work and
    is raised.
    """
    records: dict[str, PartitionRecord] = {}

    def make(tokenizer: Tokenizer, task: PartitionTask, tell: Tell) -> None:
        records[task.key] = make_partition(task, spill, tokenizer, tell)

    workers: list[Worker[PartitionTask]] = [
        partial(make, _placed(tokenizer, device)) for device in devices[: len(tasks)]
    ]
    for_each(tasks, workers, tell)
    return records


def _placed(tokenizer: Tokenizer, device: str) -> Tokenizer:
    if device == "cpu" or not isinstance(tokenizer, BPETokenizer):
        return tokenizer
    from infini_model.data.tokenizers.gpu.device_tokenizer import put_on_device

    return put_on_device(tokenizer, device)


def worker_devices(config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """The device of each worker, GPUs first.

    `data.device: cuda` is all GPUs, `mixed` these and the cores that do not feed them. Where the
    tokenizer is none for GPUs the CPU takes their place, and a log line says why.
    """
    # Of its own accord one more than cores: some of them wait for the disk.
    cpu = ["cpu"] * (config.workers or thread_count(0) + 1)
    if config.device in ("auto", "cpu") or not _runs_on_gpus(tokenizer):
        return cpu
    if config.device.startswith("cuda:"):
        return [config.device]
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not gpus:
        log.info("data.device mixed: there is no GPU, the CPU does it all")
    if config.device == "mixed":
        return [*gpus, *cpu[len(gpus) :]]
    return gpus


def _runs_on_gpus(tokenizer: Tokenizer) -> bool:
    from infini_model.data.tokenizers.gpu.device_tokenizer import (
        UnsupportedTokenizerError,
        check_supported,
    )

    try:
        check_supported(tokenizer)
    except UnsupportedTokenizerError as error:
        log.warning("%s: is tokenised on the CPU: %s", tokenizer.spec, error)
        return False
    return True
