"""Locks that say who holds them.

The kernel drops a lock when its holder ends, however it ends. So the kernel is asked whether a lock
is held, and the text inside the file only for the process that took it last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infini_model.runtime.storage import lock, named_os_errors

# `holder_of` holds a shared lock for a moment; whoever meets it tries again.
TRIES = 3
PAUSE_SECONDS = 0.02
# Between two readings of the same start time; the clock of a machine is adjusted now and then.
CLOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Owner:
    """Who claims a run: the id of a flow run, and the address of its page if it has one."""

    id: str
    url: str | None = None


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        pid: Its process id on `host`; None where it left no record, as older versions did not.
        started: When it started, in seconds since the epoch: process ids are used again.
        host: Name of the machine.
        run: The run folder that it works in, absolute.
        flow_run: Id of its flow run, None without one.
        url: Page of the flow run, None where there is none.
    """

    pid: int | None = None
    started: float = 0.0
    host: str = ""
    run: str = ""
    flow_run: str | None = None
    url: str | None = None

    @classmethod
    def current(cls, run_dir: Path, owner: Owner | None) -> Holder:
        """This process, at work in `run_dir` for `owner`."""
        import psutil

        started = psutil.Process().create_time()
        run = str(run_dir.resolve())
        flow_run, url = (None, None) if owner is None else (owner.id, owner.url)
        return cls(os.getpid(), started, socket.gethostname(), run, flow_run, url)

    @property
    def process(self) -> str:
        """The process alone, for a message."""
        if self.pid is None:
            return "another process"
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where}"

    def __str__(self) -> str:
        """The process and its flow run, for a message."""
        flow_run = f" (flow run {self.url or self.flow_run})" if self.flow_run else ""
        return f"{self.process}{flow_run}"

    def is_on_this_machine(self) -> bool:
        """Whether the process lives here, and is still the one that took the lock."""
        import psutil

        if self.pid is None or self.host != socket.gethostname():
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return abs(psutil.Process(self.pid).create_time() - self.started) < CLOCK_SECONDS
        return False


@contextlib.contextmanager
def hold(path: Path, holder: Holder) -> Iterator[bool]:
    """Take the lock `path` and record `holder` in it; yields False if it is taken.

    Raises `UserError` if the file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(lock(path, wait=False))
        for _ in range(TRIES - 1):
            if held:
                break
            time.sleep(PAUSE_SECONDS)
            held = stack.enter_context(lock(path, wait=False))
        if not held:
            yield False
            return
        # In place: the lock belongs to this file, another one of the same name would be free.
        with named_os_errors(path):
            path.write_text(json.dumps(asdict(holder)), encoding="utf-8")
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)


def holder_of(path: Path) -> Holder | None:
    """Who holds the lock `path` now; None if nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(path)
    finally:
        os.close(descriptor)
    return None


def _read(path: Path) -> Holder:
    """The record in a lock that is held; it may be about to be written."""
    for _ in range(TRIES):
        try:
            return Holder(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            time.sleep(PAUSE_SECONDS)
    return Holder()
