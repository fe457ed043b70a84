"""Where the documents of a split start, in a file beside its shards.

It is mapped like a shard. So the offsets of shards that are not in the folder are fetched once, for
all processes and for the next start, and take four bytes a document on the disk and none in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from infini_model.runtime import storage

NAME = "offsets.bin"


class KeptOffsets:
    """The file of the offsets of a split with so many `documents`, int64 [shards], in `folder`."""

    def __init__(self, folder: Path, documents: np.ndarray) -> None:
        self._path = folder / NAME
        self._starts = np.concatenate([[0], np.cumsum(documents + 1)]).astype(np.int64)
        self._mapped: np.ndarray | None = None

    def of(self, shard: int) -> np.ndarray | None:
        """int32 [documents + 1], where the documents of a shard start; None if not kept so far."""
        if self._mapped is None:
            self._mapped = self._map()
        if self._mapped is None:
            return None
        return self._mapped[self._starts[shard] : self._starts[shard + 1]]

    def _map(self) -> np.ndarray | None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return None
        # Of another size, it is not the file of this split.
        if not size or size != self._starts[-1] * np.dtype(np.int32).itemsize:
            return None
        return np.memmap(self._path, np.int32, "r")

    def keep(self, offsets: Iterable[np.ndarray]) -> None:
        """Write the offsets of all shards, arrays one after the other, unless they are kept.

        Processes that want the same wait for the first. Raises `UserError` if the disk is full or
        the folder cannot be written.
        """
        if self.of(0) is not None:
            return
        with storage.lock(self._path.with_name(f".{NAME}.lock")):
            if self.of(0) is not None:
                return
            storage.remove_leftovers(self._path.parent, NAME)
            with storage.atomic_file(self._path) as temporary, temporary.open("wb") as file:
                for part in offsets:
                    file.write(part.astype(np.int32, copy=False).data)
