"""The shards of a split as objects of a store, of which ranges are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from infini_model.data.manifest import Shard
from infini_model.data.shards.shard_files import (
    UNREADABLE,
    Header,
    Layout,
    check_counts,
    not_a_shard,
    without_prompts,
)
from infini_model.runtime.errors import DataError
from infini_model.runtime.object_stores.object_store import ObjectStore, Version

# More than the headers of a shard, which take less than 1 KiB.
BEGINNING_BYTES = 4 << 10


class _Met(NamedTuple):
    """What is known of an object since it was first read."""

    version: Version
    layout: Layout


class ShardObjects:
    """The shards that a manifest lists, at `<partitions>/<shard.path>`.

    The first read of a shard costs a request more, for its header. From then on what is read is of
    the same version. Several threads may read.

    Every method raises `DataError` in one line that names the object if it is missing, has changed
    since it was first read, or is not the shard in the manifest; `UnreachableError` if the store
    does not answer.
    """

    def __init__(self, partitions: str, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self._store = ObjectStore(partitions)
        self._keys = [shard.path for shard in shards]
        self._bytes = np.array([shard.bytes for shard in shards], np.int64)
        self._documents = np.array([shard.documents for shard in shards], np.int64)
        self._tokens = np.array([shard.tokens for shard in shards], np.int64)
        self._dtype = dtype
        self._met: dict[int, _Met] = {}
        self._header = Header(int(self._bytes.max(initial=0)))
        self._header_lock = threading.Lock()

    def values(self, shard: int, first: int, last: int) -> np.ndarray:
        """Tokens `first` to `last` (exclusive) of a shard."""
        met = self._meet(shard)
        return self._read(shard, met.layout.values, first, last, self._dtype)

    def offsets(self, shard: int, first: int, last: int) -> np.ndarray:
        """Where documents `first` to `last` (exclusive) of a shard start, int32.

        Document number [documents] is the end of the shard.
        """
        met = self._meet(shard)
        found = self._read(shard, met.layout.offsets, first, last, np.dtype(np.int32))
        # What is read in parts has no checksum.
        begins = first > 0 or found[0] == 0
        ends = last <= self._documents[shard] or found[-1] == self._tokens[shard]
        if not begins or not ends or (found[1:] < found[:-1]).any():
            raise DataError(f"{self._address(shard)}: is damaged: its documents are not in order")
        return found

    def prompts_of(self, shard: int) -> np.ndarray:
        """The number of tokens of the prompt of each document of a shard: int32 [documents]."""
        place = self._meet(shard).layout.prompts
        if place is None:
            raise without_prompts(self._address(shard))
        return self._read(shard, place, 0, int(self._documents[shard]), np.dtype(np.int32))

    def _address(self, shard: int) -> str:
        return self._store.address_of(self._keys[shard])

    def _read(self, shard: int, start: int, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        if first == last:
            return np.zeros(0, dtype)
        begin, end = start + first * dtype.itemsize, start + last * dtype.itemsize
        version = self._met[shard].version
        return np.frombuffer(self._store.read_range(self._keys[shard], begin, end, version), dtype)

    def _meet(self, shard: int) -> _Met:
        """What is known of a shard; read its header if that is nothing."""
        met = self._met.get(shard)
        if met is None:
            # Of threads that get here together, the first decides for all which version it is.
            met = self._met.setdefault(shard, self._read_header(shard))
        return met

    def _read_header(self, shard: int) -> _Met:
        address, size = self._address(shard), int(self._bytes[shard])
        beginning, found = self._store.read_beginning(self._keys[shard], min(size, BEGINNING_BYTES))
        check_counts(address, "bytes", found.bytes, size)
        try:
            with self._header_lock:
                layout = self._header.layout(beginning)
        except UNREADABLE as error:
            raise not_a_shard(address, error) from error
        check_counts(address, "documents", layout.documents, int(self._documents[shard]))
        check_counts(address, "tokens", layout.tokens, int(self._tokens[shard]))
        if layout.dtype != self._dtype:
            raise DataError(
                f"{address}: holds {layout.dtype} tokens, the manifest says {self._dtype}"
            )
        return _Met(found.version, layout)
