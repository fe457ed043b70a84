"""Removing files and folders, and counting what that frees: what `du` shows less afterwards.

Datasets share their shards with the partitions through hard links, so a file's space is freed by
whoever removes its last link.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infini_model.cleaning.unneeded import Kind, Unneeded

BLOCK_BYTES = 512


@dataclass(frozen=True)
class Amount:
    """A number of things and the bytes that removing them frees."""

    count: int = 0
    bytes: int = 0


class Removed(NamedTuple):
    """The bytes that were freed, and one line for each thing that could not be removed."""

    bytes: int
    failures: list[str]


def measure(items: Iterable[Unneeded]) -> dict[Kind, Amount]:
    """How many things there are of each kind, and what removing all of them frees.

    A file that several of them share counts where it comes first.
    """
    counts: Counter[Kind] = Counter()
    sizes: Counter[Kind] = Counter()
    links: Counter[tuple[int, int]] = Counter()
    owners: dict[tuple[int, int], Kind] = {}
    for kind, path in items:
        counts[kind] += 1
        for _, entry in _tree(str(path)):
            size = entry.st_blocks * BLOCK_BYTES
            if stat.S_ISDIR(entry.st_mode) or entry.st_nlink == 1:
                sizes[kind] += size
                continue
            inode = (entry.st_dev, entry.st_ino)
            owners.setdefault(inode, kind)
            links[inode] += 1
            if links[inode] == entry.st_nlink:
                sizes[owners[inode]] += size
    return {kind: Amount(counts[kind], sizes[kind]) for kind in Kind if kind in counts}


def remove(path: Path) -> Removed:
    """Remove a file or a folder with all that it holds. What somebody else removes is not counted.

    What cannot be removed is named and stays; the rest is removed all the same.
    """
    freed = 0
    failures: list[str] = []
    for name, entry in _tree(str(path)):
        is_folder = stat.S_ISDIR(entry.st_mode)
        try:
            (os.rmdir if is_folder else os.unlink)(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            # A folder that is not empty holds what has been named already.
            if not failures or not is_folder:
                failures.append(cannot_be_removed(name, error))
            continue
        if is_folder or entry.st_nlink == 1:
            freed += entry.st_blocks * BLOCK_BYTES
    return Removed(freed, failures)


def cannot_be_removed(path: Path | str, error: OSError) -> str:
    """One line that names what cannot be removed, and why."""
    return f"{path}: cannot be removed: {error.strerror}"


def _tree(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """A path and all below it, each folder after what it holds, without what vanishes meanwhile."""
    try:
        entry = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(entry.st_mode):
        try:
            with os.scandir(path) as found:
                below = [each.path for each in found]
        except OSError:
            below = []  # Then the folder itself cannot be removed either, and says why.
        for name in below:
            yield from _tree(name)
    yield path, entry
