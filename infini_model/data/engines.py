"""Who makes the partitions: an engine runs `make_partition` for each spec, wherever it likes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Protocol

from infini_model.config import DataConfig
from infini_model.data.datasets import Datasets
from infini_model.data.make_partition import Advance
from infini_model.data.partitions import PartitionSpec
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.load import on_device, usable_device
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.machine import available_cores


class Engine(Protocol):
    """Makes partitions; nothing of them is returned, since the datasets have it."""

    def make(self, specs: Sequence[PartitionSpec], datasets: Datasets, advance: Advance) -> None:
        """Make the partitions of `specs` in `datasets`; `advance` receives bytes of text.

        Raises the first error, once no more work is under way; finished partitions are kept.
        """


def make_engine(config: DataConfig, tokenizer: Tokenizer) -> Engine:
    """The engine that `data.engine` names."""
    if config.engine == "local":
        return LocalEngine(config, tokenizer)
    from infini_model.data.on_ray import RayEngine

    return RayEngine(config, tokenizer)


class LocalEngine:
    """Threads that take partitions from one queue, the largest first, and encode on one device.

    Each reads, splits and writes on a core; a GPU encodes for many of them.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    def make(self, specs: Sequence[PartitionSpec], datasets: Datasets, advance: Advance) -> None:
        """Make the partitions with no more threads than there are partitions.

        After the first error, Ctrl-C included, the other threads stop at their next report.
        """
        # Not a future for each: of a million they would take more memory than all else.
        queue = iter(sorted(specs, key=lambda spec: -spec.bytes))
        unfinished, lock, stopped = len(specs), threading.Lock(), threading.Event()

        def share_cores() -> None:
            """Let the tokenizer use all cores for the last partition, and one thread before it."""
            if isinstance(self._tokenizer, BPETokenizer):
                is_last = unfinished <= 1 and self._config.workers != 1
                self._tokenizer.parallel = None if is_last else False

        def make_one(spec: PartitionSpec, tokenizer: Tokenizer) -> None:
            nonlocal unfinished
            left = spec.bytes

            def report(count: int) -> None:
                nonlocal left
                if stopped.is_set():
                    raise CancelledError
                done = min(count, left)
                left -= done
                with lock:
                    advance(done)

            datasets.make(spec, tokenizer, report)
            report(left)
            with lock:
                unfinished -= 1
                share_cores()

        def work(tokenizer: Tokenizer) -> None:
            while not stopped.is_set():
                with lock:
                    spec = next(queue, None)
                if spec is None:
                    return
                make_one(spec, tokenizer)

        device = usable_device(self._tokenizer, self._config.device)
        tokenizers = itertools.cycle(
            [on_device(self._tokenizer, one) for one in devices_of(device)]
        )
        # By default one more than cores, since some threads wait for the disk.
        threads = min(self._config.workers or available_cores() + 1, len(specs))
        share_cores()
        datasets.remove_leftovers()
        with ThreadPoolExecutor(threads, thread_name_prefix="data") as pool:
            try:
                tasks = [pool.submit(work, next(tokenizers)) for _ in range(threads)]
                for task in as_completed(tasks):
                    task.result()
            except BaseException:
                stopped.set()
                raise


def devices_of(device: str) -> list[str]:
    """List the devices that `data.device` means; a tokenizer encodes on each."""
    if device != "cuda":
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
