"""Who makes the partitions: an engine runs `make_partition` for each spec, wherever it likes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from infini_model.config import DataConfig
from infini_model.data.datasets import Datasets
from infini_model.data.make_partition import Advance
from infini_model.data.partitions import PartitionSpec
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.load import on_device, usable_device
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.machine import available_cores

T = TypeVar("T")
Worker: TypeAlias = Callable[[T, Advance], None]


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
        """Make the partitions with no more threads than there are partitions."""
        unfinished = len(specs)
        lock = threading.Lock()

        def share_cores() -> None:
            """Let the tokenizer use all cores for the last partition, and one thread before it."""
            if isinstance(self._tokenizer, BPETokenizer):
                is_last = unfinished <= 1 and self._config.workers != 1
                self._tokenizer.parallel = None if is_last else False

        def one(tokenizer: Tokenizer, spec: PartitionSpec, advance: Advance) -> None:
            nonlocal unfinished
            left = spec.bytes

            def limited(count: int) -> None:
                nonlocal left
                done = min(count, left)
                left -= done
                advance(done)

            datasets.make(spec, tokenizer, limited)
            advance(left)
            with lock:
                unfinished -= 1
                share_cores()

        device = usable_device(self._tokenizer, self._config.device)
        tokenizers = itertools.cycle(
            [on_device(self._tokenizer, one) for one in devices_of(device)]
        )
        # By default one more than cores, since some threads wait for the disk.
        threads = min(self._config.workers or available_cores() + 1, len(specs))
        share_cores()
        workers: list[Worker[PartitionSpec]] = [
            partial(one, next(tokenizers)) for _ in range(threads)
        ]
        for_each(sorted(specs, key=lambda spec: -spec.bytes), workers, advance)


def devices_of(device: str) -> list[str]:
    """List the devices that `data.device` means; a tokenizer encodes on each."""
    if device != "cuda":
        return [device]
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


class _CancelledError(Exception):
    """Another worker has failed, so this one's result is not needed."""


def for_each(items: Iterable[T], workers: Sequence[Worker[T]], advance: Advance) -> None:
    """Process each item with the next free worker, one thread per worker; return when all are done.

    A worker is called with an item and a function that reports bytes; its calls reach `advance`
    one at a time. The first error, Ctrl-C included, is raised; the other workers stop at their
    next report.
    """
    queue, lock, stopped = iter(items), threading.Lock(), threading.Event()
    end = object()

    def report(count: int) -> None:
        if stopped.is_set():
            raise _CancelledError
        with lock:
            advance(count)

    def run(worker: Worker[T]) -> None:
        while not stopped.is_set():
            with lock:
                item = next(queue, end)
            if item is end:
                return
            worker(item, report)  # type: ignore[arg-type]

    with ThreadPoolExecutor(max_workers=len(workers), thread_name_prefix="data") as pool:
        try:
            for future in as_completed([pool.submit(run, worker) for worker in workers]):
                future.result()
        except BaseException:
            stopped.set()
            raise
