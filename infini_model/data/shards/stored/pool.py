"""Threads that wait for a store, and work handed to them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Requests at the same time, of each process. A store answers after some 20 to 100 ms, so these
# threads read 300 to 1600 windows a second: ten times what a GPU trains on. They mostly wait, and
# eight processes together stay far below what a store allows.
THREADS = 32


def make_pool() -> ThreadPoolExecutor:
    """A pool of `THREADS` threads, each of which starts when it is needed."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="ranges")


class AtOnce(Executor):
    """Does in the caller's thread what it is given: a failure is raised by the result."""

    def submit(  # type: ignore[override]
        self, function: Callable[..., R], /, *arguments: object
    ) -> Future[R]:
        """The finished call."""
        done: Future[R] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 -- as another executor does
            done.set_exception(error)
        return done


def in_order(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """The results for all items in their order, at most twice `THREADS` at once."""
    waiting: deque[Future[R]] = deque()
    pool = make_pool()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) == 2 * THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
