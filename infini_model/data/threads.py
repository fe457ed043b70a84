"""Work shared by threads: Arrow, hashing and the tokenizers release Python's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeAlias, TypeVar

from infini_model.runtime.machine import available_cores

T = TypeVar("T")
# Called with the number of bytes done since the last call.
Advance: TypeAlias = Callable[[int], None]
Worker: TypeAlias = Callable[[T, Advance], None]


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


def thread_count(requested: int) -> int:
    """`requested`, or if that is 0 the number of cores that this process may use."""
    return requested or available_cores()
