"""Signs of life of the ranks, and the watch that the launcher keeps over them.

Each rank rewrites `logs/heartbeats/rank-N`, a line of fixed width, at every step and says with it
how long the next one may take. The launcher compares what it reads with what it read before, by its
own clock alone, so that neither clocks nor a pause of the whole machine can mislead it.
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
from infini_model.training.launch.failures import Hung

# Loading, validating, saving and sending records take as long as they take.
LONG_SECONDS = 1800.0
# A step may take this many times the usual one, and always this long.
USUAL_STEPS = 20
LEAST_SECONDS = 60.0
# From one look of the launcher to the next; and for the ranks to write down their stacks.
LOOK_SECONDS = 0.5
STACKS_SECONDS = 1.0


class Beat(NamedTuple):
    """What a rank says: `number` of its signs, `allowed` seconds until the next, its process."""

    number: int
    allowed: float
    pid: int


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "heartbeats" / f"rank-{rank}"


def _read(path: Path) -> Beat | None:
    """The last sign of a rank; None where it has given none yet, or gives no more."""
    try:
        number, allowed, pid = path.read_text(encoding="ascii").split()
    except (FileNotFoundError, ValueError):
        return None
    return Beat(int(number), float(allowed), int(pid))


class Heart:
    """Writes the signs of life of this process; `timeout` overrides what a step may take."""

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
        self.rest()

    def rest(self) -> None:
        """Tell that something begins that may take long."""
        self._stepped: float | None = None
        self._write(LONG_SECONDS)

    def beat(self) -> None:
        """Tell that this rank's part of a step is done."""
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

    def stop(self) -> None:
        """Tell that no more signs will come, and that this is well."""
        self._path.unlink(missing_ok=True)


# That of this process, if the launcher watches it.
_heart: Heart | None = None


def start(run_dir: Path, rank: int, timeout: float | None) -> None:
    """Begin to give signs of life. Raises `UserError` if the run folder cannot be written."""
    global _heart
    _heart = Heart(run_dir, rank, timeout)


def beat() -> None:
    """Tell that this rank's part of a step is done."""
    if _heart is not None:
        _heart.beat()


def rest() -> None:
    """Tell that something begins that may take long: loading, validating, saving."""
    if _heart is not None:
        _heart.rest()


def stop() -> None:
    """Tell that no more signs will come, and that this is well."""
    if _heart is not None:
        _heart.stop()


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
