"""The lease of a stored run as this machine last saw it, for commands that ask no store.

A run folder has four files of this kind, none of which is copied to the store: `.lease`, the
lease; `.token`, that of the last claim in this folder; `.epoch`, the last epoch in which this
folder was the run's working copy; `.lost`, why this machine must not go on with the run.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from infini_model.runtime.errors import LeaseLostError
from infini_model.runtime.holders import Holder
from infini_model.runtime.storage import atomic_file, write_json

COPY, TOKEN, EPOCH, LOST = ".lease", ".token", ".epoch", ".lost"


@dataclass(frozen=True)
class LeaseRecord:
    """The content of `lease.json`, different at every write.

    Attributes:
        epoch: How often the run has been taken. Only the last epoch's holder has written since.
        token: Identifies the claim that holds the lease.
        beat: Number of renewals.
        holder: The process; None once it has released the run.
        machine: Where the process ids of `holder` are valid.
        until: End of the lease in seconds since the epoch, by the holder's clock.
    """

    epoch: int
    token: str
    beat: int = 0
    holder: Holder | None = None
    machine: str = ""
    until: float = 0.0

    @property
    def is_held(self) -> bool:
        """Whether the holder may still be working: not expired, and not known to be dead."""
        if self.holder is None or time.time() >= self.until:
            return False
        return self.machine != this_machine() or self.holder.is_on_this_machine()

    def dumps(self) -> bytes:
        return json.dumps(asdict(self), indent=2).encode() + b"\n"


def loads(content: bytes) -> LeaseRecord:
    """Parse a record. Raises `ValueError` or `TypeError` if it is damaged."""
    tree = json.loads(content)
    holder = tree.pop("holder")
    return LeaseRecord(**tree, holder=None if holder is None else Holder(**holder))


@functools.cache
def this_machine() -> str:
    """What processes share that see each other's process ids.

    A host name alone is not enough: machines from one image may share it, and containers of one
    machine share its boot.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()} {socket.gethostname()}"
    except OSError:
        # No system with /proc: nobody is known to be dead before the lease expires.
        return f"{time.time()} {os.getpid()}"


def keep_copy(run_dir: Path, record: LeaseRecord) -> None:
    """Remember the lease as it was seen in the store."""
    with atomic_file(run_dir / COPY) as temporary:
        temporary.write_bytes(record.dumps())


def stored_holder(run_dir: Path) -> Holder | None:
    """The process elsewhere that held the run when its store was last asked, if it still may."""
    try:
        record = loads((run_dir / COPY).read_bytes())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record.holder if record.is_held and not is_from_here(run_dir, record) else None


def is_from_here(run_dir: Path, record: LeaseRecord) -> bool:
    """Whether a lease was taken in this folder: whoever has the folder's lock may take it again."""
    try:
        return (run_dir / TOKEN).read_text(encoding="ascii") == record.token
    except OSError:
        return False


def keep_token(run_dir: Path, record: LeaseRecord) -> None:
    """Record that a lease was taken in this folder."""
    with atomic_file(run_dir / TOKEN) as temporary:
        temporary.write_text(record.token, encoding="ascii")


def own_epoch(run_dir: Path) -> int | None:
    """The last epoch in which this folder was the run's working copy; None if it never was."""
    try:
        return int((run_dir / EPOCH).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def keep_epoch(run_dir: Path, epoch: int) -> None:
    """Record that this folder is the run's working copy from now on."""
    write_json(run_dir / EPOCH, epoch)


def lease_lost(run_dir: Path) -> LeaseLostError | None:
    """Why this machine must not go on with a run; None if it may."""
    try:
        return LeaseLostError((run_dir / LOST).read_text(encoding="utf-8"))
    except OSError:
        return None


def note_lost(run_dir: Path, reason: str) -> None:
    """Record, for the processes that work in this folder, that the run belongs to another."""
    with atomic_file(run_dir / LOST) as temporary:
        temporary.write_text(reason, encoding="utf-8")
