"""Batches of windows in an order known beforehand, read before they are wanted.

What is on this machine is read when its batch is wanted: the operating system keeps ahead of that.
What is in a store takes a request each, so many are under way at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Self

import numpy as np

from infini_model.data.loading.windows import Batch, Windows
from infini_model.data.shards.stored.pool import THREADS, make_pool

# Each thread has its next requests waiting, so none is idle while a batch is put together or one of
# them is repeated; and a training of 40 windows a second does not notice a store gone for 5 s.
WINDOWS_AHEAD = 8 * THREADS
# Of tokens that wait in memory, unless the next batch alone has more.
BYTES_AHEAD = 32 << 20


class Request(NamedTuple):
    """A batch to be: the arguments of `gather` of these windows."""

    windows: Windows
    numbers: np.ndarray
    keys: np.ndarray | None = None


class ReadAhead:
    """An iterator over the batches that `requests` ask for, in their order.

    If their stream is in a store, the next request at least is under way while a batch is used, and
    as many more as `WINDOWS_AHEAD` and `BYTES_AHEAD` allow, of `windows`, the longest of this
    stream. `close()` ends the threads.

    `next()` raises what `Windows.gather` does; after that the rest is of no use.
    """

    def __init__(self, windows: Windows, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self._pool = make_pool()
        self._begun: deque[tuple[int, Callable[[], Batch]]] = deque()
        packing, shards = windows.packing, windows.stream.shards
        window_bytes = packing.rows_per_window * packing.row_length * shards.dtype.itemsize
        self._least = 1 + shards.distant
        self._most = min(WINDOWS_AHEAD, BYTES_AHEAD // window_bytes) if shards.distant else 0
        self._waiting = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._begun) < self._least or self._waiting < self._most:
            request = next(self._requests, None)
            if request is None:
                break
            batch = request.windows.begin(request.numbers, request.keys, self._pool)
            self._begun.append((len(request.numbers), batch))
            self._waiting += len(request.numbers)
        if not self._begun:
            raise StopIteration
        count, finish = self._begun.popleft()
        self._waiting -= count
        return finish()

    def close(self) -> None:
        """End the threads; what they are reading is waited for and discarded."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
