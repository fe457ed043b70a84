"""What the datasets of a folder are made from, and which of them are in use now.

Whoever is about to use a dataset notes it here first, under the lock that `infini_model.cleaning`
holds while it decides what nothing refers to. So a build is either seen in time, or it starts after
the removal and finds what is left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from infini_model.data.sources.files import Listing
from infini_model.runtime import storage
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.records import Record, read_record, write_record


class Build(Record):
    """What a dataset is made from: the name of its listing's file, and its partitions."""

    listing: str
    partitions: list[str]


def build_lock(folder: Path) -> Path:
    """The lock that a process holds while it builds the dataset of this folder."""
    return folder.parent / ".locks" / folder.name


def build_file(folder: Path) -> Path:
    """Where the `Build` of a dataset folder is noted."""
    return folder.parent / ".builds" / f"{folder.name}.json"


def removals(datasets_dir: Path) -> AbstractContextManager[bool]:
    """The lock of whoever removes something; held for moments only. Names have no leading dot."""
    return storage.lock(datasets_dir / ".locks" / ".removals")


def note_build(folder: Path, build: Build) -> None:
    """Note what a dataset is made from, before any of it is looked for. Raises `UserError`."""
    with removals(folder.parent):
        storage.remove_leftovers(build_file(folder).parent)
        write_record(build_file(folder), build)


def note_use(folder: Path) -> None:
    """Note that an existing dataset is about to be used, if its folder can be written.

    Where nobody has locked anything yet, such as beside a copy of a dataset, no lock is left.
    """
    with contextlib.suppress(OSError, UserError), contextlib.ExitStack() as held:
        if (folder.parent / ".locks").exists():
            held.enter_context(removals(folder.parent))
        os.utime(folder / storage.MANIFEST)


def read_builds(datasets_dir: Path) -> Iterator[tuple[Path, Build]]:
    """The dataset folders that builds were noted for, which need not exist, and their builds."""
    for path in sorted((datasets_dir / ".builds").glob("*.json")):
        with contextlib.suppress(DataError):
            yield datasets_dir / path.stem, read_record(path, Build)


def listing_file(listing: Listing, name: str) -> str:
    """The name of the file that keeps a listing, for datasets of this name."""
    contents = sorted(
        f"{part.file.fingerprint} {part.file.address} {part.start} {part.stop} {part.rows}"
        for part in listing.ranges
    )
    return f"{name}-{storage.content_key(contents)[:16]}.json"
