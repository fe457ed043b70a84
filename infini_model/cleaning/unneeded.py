"""What a cleaning is asked for, and what it finds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from infini_model.runtime.storage import TEMPORARY, is_locked

# Whatever was used this recently may be about to be used again: by a training that starts on a
# dataset which has just been made, for one.
RECENT_SECONDS = 3600.0
# What an interrupted build or download has finished is kept for this long, to go on from there.
UNFINISHED_SECONDS = 7 * 86_400.0


class Kind(StrEnum):
    """What something is, by the noun that a table has for it."""

    DATASET = "dataset"
    PARTITION = "partition"
    RAW = "download"
    PICTURE = "picture"
    TOKENIZER = "tokenizer"
    CHECKPOINT = "checkpoint"
    RECORD = "record"
    LEFTOVER = "leftover"
    LOCK = "lock"


class Unneeded(NamedTuple):
    """A file or a folder that nothing refers to."""

    kind: Kind
    path: Path


@dataclass(frozen=True)
class Scope:
    """Where to look, and what to keep.

    Attributes:
        output_dir: Folder of the downloads and the runs.
        datasets_dir: Folder of the datasets.
        keep: Datasets of each name to keep, those used last, besides those that are referred to.
        only: Remove only datasets of this name, no checkpoints and no pictures; None is everything.
        now: Seconds since the epoch, by which ages are judged.
    """

    output_dir: Path
    datasets_dir: Path
    keep: int = 2
    only: str | None = None
    now: float = field(default_factory=time.time)

    def is_older(self, path: Path, seconds: float) -> bool:
        """Whether a file or folder was written longer ago; False if it is gone."""
        try:
            return self.now - path.lstat().st_mtime > seconds
        except OSError:
            return False


@dataclass
class Findings:
    """What can be removed, and one line for each thing that had to be left alone."""

    items: list[Unneeded] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, kind: Kind, *paths: Path) -> None:
        """Add files or folders of a kind."""
        self.items += [Unneeded(kind, path) for path in paths]

    def __iadd__(self, other: Findings) -> Findings:
        self.items += other.items
        self.notes += other.notes
        return self


def leftovers(place: Path, scope: Scope) -> list[Path]:
    """The temporary names in a folder that belong to nobody: their writer's lock is free.

    Where there is no such lock, those of the last hour are left alone.
    """
    found = []
    for path in sorted(place.glob(f"{TEMPORARY}*")):
        target = path.name.removeprefix(TEMPORARY).rpartition("-")[0]
        lock = place / ".locks" / target
        is_dead = lock.is_file() or scope.is_older(path, RECENT_SECONDS)
        if is_dead and not is_locked(lock):
            found.append(path)
    return found


def visible(folder: Path) -> list[Path]:
    """What a folder holds, sorted, without names that begin with a dot; empty if there is none."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names)]
