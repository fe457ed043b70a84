"""Work shared out to threads: Arrow, hashing and the tokenizers do theirs without Python's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeAlias, TypeVar

from infini_model.runtime.cores import available_cores

T = TypeVar("T")
# Told how many more bytes are done.
Tell: TypeAlias = Callable[[int], None]
Worker: TypeAlias = Callable[[T, Tell], None]


class _AbandonedError(Exception):
    """Another worker has failed, so that nobody wants this one's result."""


def for_each(items: Iterable[T], workers: Sequence[Worker[T]], tell: Tell) -> None:
    """Give each item to a worker that is free, a thread to each of them; return when all is done.

    A worker is called with the item and a function to tell bytes with, which goes on to `tell`,
    one thread at a time. The first error, Ctrl-C included, is raised; the other workers end where
    they next tell something.
    """
    supply, lock, ended = iter(items), threading.Lock(), threading.Event()
    nothing = object()

    def told(count: int) -> None:
        if ended.is_set():
            raise _AbandonedError
        with lock:
            tell(count)

    def serve(worker: Worker[T]) -> None:
        while not ended.is_set():
            with lock:
                item = next(supply, nothing)
            if item is nothing:
                return
            worker(item, told)  # type: ignore[arg-type]

    with ThreadPoolExecutor(max_workers=len(workers), thread_name_prefix="data") as pool:
        try:
            for future in as_completed([pool.submit(serve, worker) for worker in workers]):
                future.result()
        except BaseException:
            ended.set()
            raise


def thread_count(asked: int) -> int:
    """`asked`, or where that is 0 as many as there are cores for this process."""
    return asked or available_cores()
