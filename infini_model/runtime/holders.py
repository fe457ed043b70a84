"""File locks that record their holder.

The kernel releases a lock when its holder exits, however it exits. The kernel therefore decides
whether a lock is held; the text in the file only identifies the process that acquired it last.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from infini_model.runtime.storage import PAUSE_SECONDS, is_locked, lock, named_os_errors

# Tolerance between two readings of one start time: the system clock may be adjusted in between.
CLOCK_SECONDS = 5.0
# How often a held lock file is read before its holder counts as unknown.
READS = 10


def flow_run_page(flow_run: str) -> str | None:
    """The page of a flow run on the Prefect server in the environment; None if none is there.

    It is made when it is shown, as the address of a server may change.
    """
    page = os.environ.get("PREFECT_UI_URL")
    api = os.environ.get("PREFECT_API_URL", "").rstrip("/")
    # Elsewhere, as in Prefect Cloud, the pages have another address than the API.
    if not page and api.endswith("/api"):
        page = api.removesuffix("/api")
    return f"{page}/runs/flow-run/{flow_run}" if page else None


@dataclass(frozen=True)
class Owner:
    """Who claims a run: a flow run, by its `id`, or a process without one.

    If it `adopts`, it resumes interrupted runs of the same settings and data of other owners too.
    """

    id: str | None = None
    adopts: bool = True


# A process without a flow run, such as a command.
ANYBODY = Owner()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Its `pid` is None if it left no record. Process ids are reused, so `started` is when it began,
    in seconds since the epoch. `run` is the absolute path of the run folder in which it works.
    """

    pid: int | None = None
    started: float = 0.0
    host: str = ""
    run: str = ""
    flow_run: str | None = None

    @classmethod
    def current(cls, run_dir: Path, owner: Owner = ANYBODY) -> Holder:
        """This process, working in `run_dir` for `owner`."""
        import psutil

        started = psutil.Process().create_time()
        run = str(run_dir.resolve())
        return cls(os.getpid(), started, socket.gethostname(), run, owner.id)

    @property
    def process(self) -> str:
        """The process without its flow run, for messages."""
        if self.pid is None:
            return "another process"
        where = "" if self.host == socket.gethostname() else f" on {self.host}"
        return f"process {self.pid}{where}"

    def __str__(self) -> str:
        """The process and its flow run, for messages."""
        if self.flow_run is None:
            return self.process
        return f"{self.process} (flow run {flow_run_page(self.flow_run) or self.flow_run})"

    def is_on_this_machine(self) -> bool:
        """Whether the process that acquired the lock is still alive on this machine."""
        import psutil

        if self.pid is None or self.host != socket.gethostname():
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return abs(psutil.Process(self.pid).create_time() - self.started) < CLOCK_SECONDS
        return False


@contextlib.contextmanager
def hold(path: Path, holder: Holder) -> Iterator[bool]:
    """Acquire the lock file `path` and record `holder` in it; yields False if it is held.

    Raises `UserError` if the file cannot be written.
    """
    with lock(path, wait=False) as held:
        if not held:
            yield False
            return
        # Write in place: the lock belongs to this inode; a renamed-in file would be unlocked.
        with named_os_errors(path):
            path.write_text(json.dumps(asdict(holder)), encoding="utf-8")
        try:
            yield True
        finally:
            with contextlib.suppress(OSError):
                os.truncate(path, 0)


def holder_of(path: Path) -> Holder | None:
    """Current holder of the lock file `path`; None if it is not held."""
    for _ in range(READS):
        if not is_locked(path):
            return None
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Holder(**json.loads(path.read_text(encoding="utf-8")))
        # It has just acquired the lock, or is about to release it.
        time.sleep(PAUSE_SECONDS)
    return Holder()
