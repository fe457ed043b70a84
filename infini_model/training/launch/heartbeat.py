"""Heartbeats of the ranks, and the launcher's hang detection.

At every step each rank rewrites `logs/heartbeats/rank-N`, a line of fixed width, with the time
allowed until the next one. The launcher polls these files and measures silence by its own clock
only, so neither clock skew nor suspending the whole machine causes a false alarm.

If one rank hangs, the others wait for it. On GPUs their hosts launch one more step before they do:
the rank that is behind the others is named. On the CPU all wait within the same step, and none is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from infini_model.runtime.storage import make_folder, named_os_errors
from infini_model.training.callbacks import Callback
from infini_model.training.launch.failures import TrainingFailure

# Limit for loading, validating, saving and sending records.
PAUSE_LIMIT_SECONDS = 1800.0
# A step may take this multiple of the median step, and at least this long.
MEDIAN_STEPS = 20
MIN_LIMIT_SECONDS = 60.0
# Polling interval of the launcher; time for the ranks to dump their stacks.
POLL_SECONDS = 0.5
STACKS_SECONDS = 1.0


class Beat(NamedTuple):
    """A heartbeat: its `number`, the `allowed` seconds until the next one, and the process id."""

    number: int
    allowed: float
    pid: int


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / "heartbeats" / f"rank-{rank}"


def _read(run_dir: Path, ranks: Iterable[int]) -> Iterator[tuple[int, Beat]]:
    """The last heartbeat of each rank that has begun and not ended."""
    for rank in ranks:
        with contextlib.suppress(FileNotFoundError, ValueError):
            number, allowed, pid = _path(run_dir, rank).read_text(encoding="ascii").split()
            yield rank, Beat(int(number), float(allowed), int(pid))


class Heartbeat(Callback):
    """Writes the heartbeats of this process; `timeout` overrides the limit for a step.

    Raises `UserError` if the run folder cannot be written.
    """

    def __init__(self, run_dir: Path, rank: int, timeout: float | None) -> None:
        self._path = _path(run_dir, rank)
        make_folder(self._path.parent)
        # A hang's stacks go to the file in which the launcher writes this rank's output.
        self._log = (run_dir / "logs" / f"rank-{rank}.log").open("a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, self._log, all_threads=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        self._timeout = timeout
        self._count = 0
        self._gaps: deque[float] = deque(maxlen=31)
        self.expect_long_work()

    def expect_long_work(self) -> None:
        """Write a heartbeat that allows for long work."""
        self._stepped: float | None = None
        self._beat(PAUSE_LIMIT_SECONDS)

    def after_gradients(self) -> None:
        """Write a heartbeat that allows for one more step."""
        now = time.monotonic()
        if self._stepped is not None:
            self._gaps.append(now - self._stepped)
        self._stepped = now
        if not self._gaps:
            self._beat(PAUSE_LIMIT_SECONDS)
        elif self._timeout:
            self._beat(self._timeout)
        else:
            self._beat(max(MIN_LIMIT_SECONDS, MEDIAN_STEPS * statistics.median(self._gaps)))

    def _beat(self, allowed: float) -> None:
        self._count += 1
        line = f"{self._count:12} {allowed:12.3f} {os.getpid():12}\n"
        with named_os_errors(self._path):
            os.pwrite(self._file, line.encode("ascii"), 0)

    def close(self) -> None:
        """Remove the heartbeat file: this rank has ended normally."""
        self._path.unlink(missing_ok=True)


class HangDetector:
    """Detects hangs: called repeatedly with the agent's process id, returns a failure on a hang.

    `ranks` are those of this machine, with the physical numbers of their GPUs; a single rank is its
    own agent. `timeout` is `launch.hang_timeout_seconds`, which also limits how long a process may
    be stopped.
    """

    def __init__(
        self, run_dir: Path, ranks: Mapping[int, int | None], timeout: float | None
    ) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._stopped_limit = timeout or MIN_LIMIT_SECONDS
        self._beats: dict[int, Beat] = {}
        self._silence = dict.fromkeys(ranks, 0.0)
        self._stopped: dict[int, float] = {}
        self._polled = time.monotonic()
        for rank in ranks:
            path = _path(run_dir, rank)
            make_folder(path.parent)
            path.unlink(missing_ok=True)

    def __call__(self, agent: int) -> TrainingFailure | None:
        """Poll if it is time; on a hang, have the ranks dump their stacks first."""
        now = time.monotonic()
        if now - self._polled < POLL_SECONDS:
            return None
        # A longer interval means that this process itself was delayed.
        elapsed = min(now - self._polled, 2 * POLL_SECONDS)
        self._polled = now
        last, self._beats = self._beats, dict(_read(self._run_dir, self._ranks))
        for rank, beat in self._beats.items():
            old = last.get(rank)
            is_same = old is not None and (beat.number, beat.pid) == (old.number, old.pid)
            self._silence[rank] = self._silence[rank] + elapsed if is_same else 0.0
        hang = self._find_stopped(agent, elapsed) or self._find_silent()
        if hang is not None:
            self._ask_for_stacks()
        return hang

    def _find_stopped(self, agent: int, elapsed: float) -> TrainingFailure | None:
        processes = {beat.pid: rank for rank, beat in self._beats.items()}
        for pid in {agent, *processes}:
            self._stopped[pid] = self._stopped.get(pid, 0.0) + elapsed if _is_stopped(pid) else 0.0
            if self._stopped[pid] > self._stopped_limit:
                what = "its process" if pid in processes else "torchrun's agent"
                return self._hang(
                    f"{what} {pid} has been stopped for {self._stopped_limit:g} s",
                    processes.get(pid),
                )
        return None

    def _find_silent(self) -> TrainingFailure | None:
        silent = [r for r, beat in self._beats.items() if self._silence[r] > beat.allowed]
        if not silent:
            return None
        allowed = self._beats[silent[0]].allowed
        least = min(beat.number for beat in self._beats.values())
        behind = [rank for rank, beat in self._beats.items() if beat.number == least]
        return self._hang(
            f"no step within {allowed:g} s; the stacks are in {self._run_dir / 'logs'}",
            # If several ranks are behind, they wait for each other and none can be blamed.
            behind[0] if len(behind) == 1 else None,
        )

    def _hang(self, message: str, rank: int | None) -> TrainingFailure:
        return TrainingFailure("hang", message, rank, None if rank is None else self._ranks[rank])

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
