"""Heartbeats of the ranks, and the watch that the launcher keeps over them.

Each rank rewrites `logs/heartbeats/rank-N`, a line of fixed width, at every step, with how long the
next one may take. The launcher compares what it reads with what it read before, by its own clock
alone, so that neither clocks nor a pause of the whole machine can mislead it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infini_model.runtime.storage import make_folder, named_os_errors
from infini_model.training.callbacks.callback import Callback, Step
from infini_model.training.launch.failures import Hung

# Loading, validating, saving and sending records take as long as they take.
LONG_SECONDS = 1800.0
# A step may take this many times the usual one, and always this long.
USUAL_STEPS = 20
LEAST_SECONDS = 60.0
# Between two looks of the launcher; and for the ranks to write down their stacks.
LOOK_SECONDS = 0.5
STACKS_SECONDS = 1.0


class Beat(NamedTuple):
    """A heartbeat: its `number`, the `allowed` seconds until the next, the process."""

    number: int
    allowed: float
    pid: int


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "heartbeats" / f"rank-{rank}"


def _read(path: Path) -> Beat | None:
    """The last heartbeat of a rank; None before the first and after the end."""
    try:
        number, allowed, pid = path.read_text(encoding="ascii").split()
    except (FileNotFoundError, ValueError):
        return None
    return Beat(int(number), float(allowed), int(pid))


class Heartbeat(Callback):
    """Writes the heartbeats of this process; `timeout` overrides what a step may take.

    Raises `UserError` if the run folder cannot be written.
    """

    def __init__(self, run_dir: Path, rank: int, timeout: float | None) -> None:
        self._path = _path(run_dir, rank)
        make_folder(self._path.parent)
        # For the stacks of a hang, beside what the launcher writes there.
        self._log = (run_dir / "logs" / f"rank-{rank}.log").open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._timeout = timeout
        self._count = 0
        self._gaps: deque[float] = deque(maxlen=31)
        self.before_pause()

    def before_pause(self) -> None:
        """Allow for something that may take long."""
        self._stepped: float | None = None
        self._write(LONG_SECONDS)

    def after_backward(self, step: Step) -> None:  # noqa: ARG002 - the time is what counts
        """Allow for another step."""
        now = time.monotonic()
        if self._stepped is not None:
            self._gaps.append(now - self._stepped)
        self._stepped = now
        self._write(self._usual() if self._gaps else LONG_SECONDS)

    def _usual(self) -> float:
        return self._timeout or max(LEAST_SECONDS, USUAL_STEPS * statistics.median(self._gaps))

    def _write(self, allowed: float) -> None:
        self._count += 1
        line = f"{self._count:12} {allowed:12.3f} {os.getpid():12}\n"
        with named_os_errors(self._path):
            os.pwrite(self._file, line.encode("ascii"), 0)

    def close(self) -> None:
        """No more heartbeats will come, and nothing is wrong."""
        self._path.unlink(missing_ok=True)


class Watch:
    """Called again and again with the process id of the agent, returns `Hung` when it is time.

    `ranks` are those of this machine; the only one is its own agent. `timeout` is
    `launch.hang_timeout_seconds`, which also says how long a process may be stopped.
    """

    def __init__(self, run_dir: Path, ranks: Sequence[int], timeout: float | None) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._stopped_limit = timeout or LEAST_SECONDS
        self._beats: dict[int, Beat] = {}
        self._silence = dict.fromkeys(ranks, 0.0)
        self._stopped: dict[int, float] = {}
        self._looked = time.monotonic()
        for rank in ranks:
            _path(run_dir, rank).unlink(missing_ok=True)

    def __call__(self, agent: int) -> Hung | None:
        """Look, if it is time; where something hangs, the ranks write their stacks first."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return None
        # Longer than that it was this process that did not get to look.
        elapsed = min(now - self._looked, 2 * LOOK_SECONDS)
        self._looked = now
        self._listen(elapsed)
        hung = self._someone_stopped(agent, elapsed) or self._someone_silent()
        if hung is not None:
            self._ask_for_stacks()
        return hung

    def _listen(self, elapsed: float) -> None:
        for rank in self._ranks:
            beat = _read(_path(self._run_dir, rank))
            if beat is None:
                self._beats.pop(rank, None)
                continue
            changed = beat != self._beats.get(rank)
            self._silence[rank] = 0.0 if changed else self._silence[rank] + elapsed
            self._beats[rank] = beat

    def _someone_stopped(self, agent: int, elapsed: float) -> Hung | None:
        processes = {beat.pid: rank for rank, beat in self._beats.items()}
        for pid in {agent, *processes}:
            stopped = _is_stopped(pid)
            self._stopped[pid] = self._stopped.get(pid, 0.0) + elapsed if stopped else 0.0
            if self._stopped[pid] > self._stopped_limit:
                what = "its process" if pid in processes else "torchrun's agent"
                message = f"{what} {pid} has been stopped for {self._stopped_limit:g} s"
                return Hung(message, processes.get(pid))
        return None

    def _someone_silent(self) -> Hung | None:
        silent = [r for r, beat in self._beats.items() if self._silence[r] > beat.allowed]
        if not silent:
            return None
        allowed = self._beats[silent[0]].allowed
        numbers = {rank: self._beats[rank].number for rank in self._beats}
        behind = [rank for rank, n in numbers.items() if n == min(numbers.values())]
        message = f"no step within {allowed:g} s; the stacks are in {self._run_dir / 'logs'}"
        # Where all wait for each other nobody knows whose fault it is.
        return Hung(message, behind[0] if len(behind) == 1 else None)

    def _ask_for_stacks(self) -> None:
        for beat in self._beats.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGUSR1)
        time.sleep(STACKS_SECONDS)


def _is_stopped(pid: int) -> bool:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
