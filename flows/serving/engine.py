"""The engine of one flow run, as the work pools of the project start it.

`python -m flows.serving.engine` starts Prefect's engine in its own session and waits for it. This
process between the worker of `infini serve` and the engine makes sure that

- a training survives a worker that dies, or that kills its children after its fixed 30 seconds;
- the engine does not hold the worker's pipes, which would keep a dead run Running;
- a resumed flow run waits until its previous engine has saved and ended;
- the engine saves a checkpoint and ends when `infini serve` is gone.

The engine inherits a locked file named after its flow run, in which its process id stands. The
kernel releases the lock when the engine ends for any reason. `flows.serving.reconcile` removes the
file once the flow run has its final state. A flow run of a command in a terminal locks a file
without a process id: `infini serve` records its end, but does not stop it.

Any other worker kills its child when it ends itself: a second process outlives that, and has the
engine save a checkpoint and report its end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from infini_model.runtime.processes import STOPS, wait_until
from infini_model.runtime.storage import is_locked, take_lock

# Environment variable of workers and commands: the folder of the lock files and logs.
ENGINES = "INFINI_ENGINES"
ENGINE_COMMAND = [sys.executable, "-P", "-m", "prefect.engine"]
POLL_SECONDS = 0.5
# From the end of `infini serve` to SIGKILL: a checkpoint takes up to a minute. An engine without
# children has nothing to save, and only waits for a server that is gone.
GRACE_SECONDS = 75.0
CHILDLESS_SECONDS = 5.0


def serve_lock(home: Path) -> Path:
    """The file that `infini serve` holds locked, in the folder of Prefect's records."""
    return home / "serve.lock"


def engines_dir(home: Path) -> Path:
    """The folder of the engines' lock files and logs, in that of Prefect's records."""
    return home / "engines"


def lock_of(folder: Path, flow_run_id: str) -> Path:
    """The file that the engine of a flow run holds locked."""
    return folder / f"{flow_run_id}.lock"


def log_of(lock: Path) -> Path:
    """The output of the engines of a flow run, beside their lock file."""
    return lock.with_suffix(".log")


def running_engines(folder: Path) -> dict[str, int]:
    """The running engines of `infini serve`: flow run id to process id."""
    found = {}
    for path in folder.glob("*.lock"):
        with contextlib.suppress(FileNotFoundError):  # the reconciler has just removed it
            if is_locked(path) and (pid := path.read_text(encoding="ascii")):
                found[path.stem] = int(pid)
    return found


def mark_as_engine(flow_run_id: str | None) -> None:
    """Mark this process as the engine of a flow run that no `main` has started.

    That is the one of a command in a terminal, and one that is a part of another.
    """
    folder = os.environ.get(ENGINES)
    is_started_here = flow_run_id == os.environ.get("PREFECT__FLOW_RUN_ID")
    if flow_run_id is not None and folder is not None and not is_started_here:
        # Left open on purpose: the kernel closes it when this process ends. This blocks only while
        # the reconciler briefly holds the lock.
        descriptor = take_lock(lock_of(Path(folder), flow_run_id))
        if descriptor is not None:
            os.ftruncate(descriptor, 0)  # it may name an engine from before


def _serve_is_gone() -> bool:
    return not is_locked(serve_lock(Path(os.environ[ENGINES]).parent))


def main() -> int:
    """Run the engine of the flow run in PREFECT__FLOW_RUN_ID; returns its exit status."""
    status = _run_for_serve() if ENGINES in os.environ else _run_for_worker()
    return status if status >= 0 else 128 - status


def _run_for_worker() -> int:
    own, stops = os.getpid(), list[int]()
    if child := os.fork():
        for number in STOPS:
            signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.signal(signal.SIGTERM, lambda number, _frame: stops.append(number))
    os.setsid()
    engine = subprocess.Popen(ENGINE_COMMAND, stdin=subprocess.DEVNULL)
    return _wait(engine, stops, lambda: os.getppid() != own)


def _run_for_serve() -> int:
    lock = lock_of(Path(os.environ[ENGINES]), os.environ["PREFECT__FLOW_RUN_ID"])
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stops.append(number))
    # Opened anew each time: the file of an engine that has ended is removed.
    while (descriptor := take_lock(lock, wait=False)) is None:
        if stops or _serve_is_gone():
            return 128 + signal.SIGTERM
        time.sleep(POLL_SECONDS)
    os.ftruncate(descriptor, 0)  # it names the engine before
    return _wait(_start(lock, descriptor), stops, _serve_is_gone)


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
    os.pwrite(descriptor, str(process.pid).encode("ascii"), 0)
    os.close(descriptor)
    return process


def _wait(process: subprocess.Popen[bytes], stops: list[int], is_gone: Callable[[], bool]) -> int:
    """Wait for the engine, forward SIGTERM, and end it when what started it is gone."""

    def wait_for_end(unless: Callable[[], bool], timeout_seconds: float = math.inf) -> None:
        wait_until(
            lambda: process.poll() is not None or unless(),
            every_seconds=POLL_SECONDS,
            timeout_seconds=timeout_seconds,
        )

    wait_for_end(unless=lambda: bool(stops) or is_gone())
    process.terminate()
    wait_for_end(unless=is_gone)
    wait_for_end(lambda: not psutil.Process(process.pid).children(), GRACE_SECONDS)
    wait_for_end(lambda: False, CHILDLESS_SECONDS)
    process.kill()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
