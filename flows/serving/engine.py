"""The engine of one flow run, as the work pool of `infini serve` starts it.

`python -m flows.serving.engine` starts Prefect's engine in its own session and waits for it. This
process between the worker and the engine makes sure that

- a training survives a worker that dies, or that kills its children after its fixed 30 seconds;
- the engine does not hold the worker's pipes, which would keep a dead run Running;
- a resumed flow run waits until its previous engine has saved and ended;
- the engine saves a checkpoint and ends when `infini serve` is gone.

The engine inherits a locked file named after its flow run. The kernel releases the lock when the
engine ends for any reason, so that `is_alive` needs no process ids. `flows.serving.reconcile`
removes the file once the flow run has its final state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from infini_model.runtime.processes import wait_until
from infini_model.runtime.storage import is_locked, take_lock

# The folder of the lock files and logs, and the process of `infini serve` as "pid created".
ENGINES = "INFINI_ENGINES"
SERVE = "INFINI_SERVE_PROCESS"
# The first word of a lock file, before the process id: how the engine was started.
ENGINE, COMMAND = "engine", "command"
ENGINE_COMMAND = [sys.executable, "-m", "prefect.engine"]
POLL_SECONDS = 0.5
# From the end of `infini serve` to SIGKILL: a checkpoint takes up to a minute. An engine without
# children has nothing to save, and only waits for a server that is gone.
GRACE_SECONDS = 75.0
CHILDLESS_SECONDS = 5.0


def lock_of(folder: Path, flow_run_id: str) -> Path:
    """The file that the engine of a flow run holds locked."""
    return folder / f"{flow_run_id}.lock"


def log_of(lock: Path) -> Path:
    """The output of the engines of a flow run, beside their lock file."""
    return lock.with_suffix(".log")


def is_alive(folder: Path, flow_run_id: str) -> bool:
    """Whether the engine of a flow run is running on this machine."""
    return is_locked(lock_of(folder, flow_run_id))


def running_engines(folder: Path) -> dict[str, int]:
    """The running engines of `infini serve`: flow run id to process id."""
    found = {}
    for path in folder.glob("*.lock"):
        if is_locked(path):
            kind, _, pid = path.read_text(encoding="ascii").partition(" ")
            if kind == ENGINE and pid:
                found[path.stem] = int(pid)
    return found


def mark_as_engine(flow_run_id: str | None) -> None:
    """Mark this process as the engine of a flow run that no `main` has started.

    That is the one of a command in a terminal, and one that is a part of another.
    """
    folder = os.environ.get(ENGINES)
    is_started_here = flow_run_id == os.environ.get("PREFECT__FLOW_RUN_ID")
    if flow_run_id is None or folder is None or is_started_here:
        return
    # Left open on purpose: the kernel closes it when this process ends. This blocks only while
    # `is_alive` or the reconciler briefly holds the lock.
    descriptor = take_lock(lock_of(Path(folder), flow_run_id))
    if descriptor is not None:
        _write_starter(descriptor, COMMAND, os.getpid())


def _write_starter(descriptor: int, kind: str, pid: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{kind} {pid}".encode("ascii"), 0)


def serve_process() -> str:
    """This process as the value of `SERVE`."""
    process = psutil.Process()
    return f"{process.pid} {process.create_time()}"


def _serve_is_gone() -> bool:
    pid, created = os.environ[SERVE].split()
    try:
        process = psutil.Process(int(pid))
        # A process that was not waited for is still listed.
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return is_zombie or process.create_time() != float(created)
    except psutil.NoSuchProcess:
        return True


def _start(lock: Path, descriptor: int) -> subprocess.Popen[bytes]:
    with log_of(lock).open("ab") as log:
        process = subprocess.Popen(
            ENGINE_COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(descriptor,),
        )
    _write_starter(descriptor, ENGINE, process.pid)
    os.close(descriptor)
    return process


def main() -> int:
    """Run the engine of the flow run in PREFECT__FLOW_RUN_ID; returns its exit status."""
    if SERVE not in os.environ:
        # A worker outside `infini serve` manages its engines itself.
        os.execv(sys.executable, ENGINE_COMMAND)  # noqa: S606 - there is no shell
    flow_run_id = os.environ["PREFECT__FLOW_RUN_ID"]
    lock = lock_of(Path(os.environ[ENGINES]), flow_run_id)
    stops: list[int] = []
    taken: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        stops.append(number)

    signal.signal(signal.SIGTERM, note)

    def is_taken() -> bool:
        # Opened anew each time: the file of an engine that has ended is removed.
        if (descriptor := take_lock(lock, wait=False)) is not None:
            os.ftruncate(descriptor, 0)  # it names the engine before
            taken.append(descriptor)
        return bool(taken)

    wait_until(lambda: is_taken() or bool(stops) or _serve_is_gone(), every_seconds=POLL_SECONDS)
    if not taken:
        return 128 + signal.SIGTERM
    return _wait(_start(lock, taken[0]), stops)


def _wait(process: subprocess.Popen[bytes], stops: list[int]) -> int:
    """Wait for the engine, forward SIGTERM, and end it when `infini serve` is gone."""
    forwarded, deadline = False, float("inf")
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_SECONDS)
            return status if status >= 0 else 128 - status
        gone, now = _serve_is_gone(), time.monotonic()
        if (stops or gone) and not forwarded:
            process.terminate()
            forwarded = True
        if gone:
            patience = GRACE_SECONDS if _has_children(process.pid) else CHILDLESS_SECONDS
            deadline = min(deadline, now + patience)
        if now > deadline:
            process.kill()


def _has_children(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
