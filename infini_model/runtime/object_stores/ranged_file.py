"""A remote file as a file that can be read at random positions, by requests for ranges."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeAlias

# Returns the bytes from `start` to `stop` (exclusive), all of them.
Fetch: TypeAlias = Callable[[int, int], bytes]


class RangedFile(io.RawIOBase):
    """A file of `size` bytes of which `fetch` reads ranges; raises what `fetch` raises.

    A request reads what is asked for and `ahead` bytes more: the first number after a jump, twice
    as much each time as long as reads follow one another, up to the second.
    """

    def __init__(self, fetch: Fetch, size: int, ahead: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self._fetch_range, self._size = fetch, size
        self._least, self._most = ahead
        self._ahead = self._least
        self._position = 0
        self._block, self._start = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, fewer only at the end; all that are left if it is negative."""
        start = self._position
        stop = self._size if size is None or size < 0 else min(start + size, self._size)
        if start >= stop:
            return b""
        self._position = stop
        if start < self._start or stop > self._start + len(self._block):
            self._fetch(start, stop)
        return self._block[start - self._start : stop - self._start]

    def _fetch(self, start: int, stop: int) -> None:
        """Make the block begin at `start` and reach to `stop` or beyond; keep what it has of it."""
        end = self._start + len(self._block)
        follows = self._start <= start <= end
        self._ahead = min(2 * self._ahead, self._most) if follows else self._least
        kept = self._block[start - self._start :] if follows else b""
        goal = min(stop + self._ahead, self._size)
        fetched = self._fetch_range(start + len(kept), goal)
        self._block, self._start = kept + fetched if kept else fetched, start
