"""Who uses which partitions of a cache of shards, so that nobody removes what is still to be read.

A training maps a shard when it first needs it, so it holds the partitions of its dataset for as
long as it runs. A holder shares the lock of a file that lists them, `<cache>/.locks/<key>`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from infini_model.runtime import storage


def cache_lock(cache: Path) -> Path:
    """Held exclusively by whoever copies shards to a cache, or removes some."""
    return cache / ".lock"


@contextlib.contextmanager
def hold(cache: Path, partitions: Sequence[str]) -> Iterator[None]:
    """Hold partitions while the block runs. To be entered under the lock of the cache.

    Raises `UserError` if the disk is full or the cache cannot be written.
    """
    for path in _holds(cache):
        if not storage.is_locked(path, shared=True):
            path.unlink(missing_ok=True)
    keys = sorted(set(partitions))
    path = cache / ".locks" / storage.content_key(keys)
    if not path.exists():
        with storage.atomic_file(path) as temporary:
            temporary.write_text("\n".join(keys), encoding="utf-8")
    with storage.lock(path, shared=True):
        yield


def held_partitions(cache: Path) -> set[str]:
    """The partitions that somebody holds; this stays true under the lock of the cache, or shrinks.

    Creates nothing.
    """
    held: set[str] = set()
    for path in _holds(cache):
        if storage.is_locked(path, shared=True):
            # Released, it may have been removed by now.
            with contextlib.suppress(FileNotFoundError):
                held.update(path.read_text(encoding="utf-8").split())
    return held


def _holds(cache: Path) -> list[Path]:
    return list((cache / ".locks").glob("*"))
