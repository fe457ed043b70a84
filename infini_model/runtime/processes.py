"""Child processes that end when they should: at their deadline, and with whoever started them.

`run` streams a command's output and leaves nothing of its process tree behind, whether the command
ends, its time runs out, or the caller is interrupted. `bound` makes a command die with its parent,
also when the parent is killed by SIGKILL and can no longer do anything about it (Linux:
PR_SET_PDEATHSIG; elsewhere the command runs as it is). To the kernel the parent is the thread that
started it, so that one has to stay until the command has ended; `run` waits in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# The last one comes when a terminal is closed.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1
# What is still in the pipe when the command has ended is read for this long, no longer: a
# grandchild may hold the other end open for ever.
DRAIN_SECONDS = 1.0


class ProcessTimeoutError(TimeoutError):
    """A command ran past its deadline and was ended with all its children."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if that has happened already.

    `parent` is the process id that started this one, by which an earlier death is noticed.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def bound(command: Sequence[str]) -> list[str]:
    """`command`, started so that it dies with this process."""
    return [sys.executable, "-m", "infini_model.runtime.processes", str(os.getpid()), *command]


def end_tree(
    process: subprocess.Popen[bytes],
    grace_seconds: float,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """SIGTERM to `process`, and after the grace SIGKILL to it and everything that came of it.

    `wait` is called with the seconds to pass until the next look; whoever reads the process's
    output reads on in it. Descendants are found by parentage, not by process group: torchrun gives
    each rank a session of its own.
    """
    import psutil

    descendants: set[psutil.Process] = set()

    def look() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants.update(psutil.Process(process.pid).children(recursive=True))

    look()
    try:
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + grace_seconds
            while process.poll() is None and time.monotonic() < deadline:
                look()
                wait(POLL_SECONDS)
    finally:
        for survivor in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        if process.poll() is None:
            process.kill()
        process.wait()


class _Lines:
    """Bytes from a pipe, handed on as whole lines of text."""

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)

    def read(self, seconds: float) -> bool:
        """Hand on what there is within `seconds`; False if the pipe is closed or stayed silent."""
        if not self._selector.select(seconds):
            return False
        chunk = os.read(self._descriptor, 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._on_line(line.decode("utf-8", "replace"))
        return bool(chunk)

    def close(self) -> None:
        if self._rest:
            self._on_line(self._rest.decode("utf-8", "replace"))
        self._selector.close()


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def _noted_stops() -> Iterator[list[int]]:
    """Note `STOPS` in a list while the block runs; the first acts when it has ended.

    A handler that raised would do so in the middle of any line, such as one that holds the lock of
    a `Popen`, which would then never tell that its process has ended. Other threads than the main
    one hear no signals; one that is ignored stays so.
    """
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: heard.append(number))
    try:
        yield heard
    finally:
        # Blocked, so that none comes between while the handlers are put back.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        for number, handler in before.items():
            signal.signal(number, handler)
        ended = bool(heard) and before[signal.Signals(heard[0])] is signal.SIG_DFL
        if heard and not ended:
            signal.raise_signal(heard[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if ended:
            raise SystemExit(128 + heard[0])


@contextlib.contextmanager
def _started(
    command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process of `command` and the descriptor of its output, which is closed in the end."""
    process = subprocess.Popen(
        bound(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=None if env is None else {**os.environ, **env},
        cwd=cwd,
    )
    if process.stdout is None:
        raise RuntimeError("the pipe to the command was not made")
    with process.stdout as pipe:
        yield process, pipe.fileno()


def run(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    timeout_seconds: float | None = None,
    grace_seconds: float = 30.0,
    watch: Callable[[int], Exception | None] = lambda _: None,
    stop: Callable[[], Exception | None] = lambda: None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> int:
    """Run `command`, hand each line of its output to `on_line`, and return its exit status.

    It has a session of its own and no standard input. Its process tree is ended (SIGTERM, then
    SIGKILL after `grace_seconds`) when `timeout_seconds` have passed, `on_line` raises, or one of
    `STOPS` comes, which then acts on the caller as it would have without this function; where it
    would have killed the caller, it is `SystemExit`. `watch` is asked about the process id ten
    times a second: what it returns is raised, and all is killed at once. `stop` is asked as often:
    what it returns is raised after the process tree has been ended with its grace. A negative
    status is the signal that ended the command.

    Raises `ProcessTimeoutError` past the deadline.
    """
    with _noted_stops() as heard, _started(command, env, cwd) as (process, pipe):
        lines = _Lines(pipe, on_line)
        deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds

        def read_on(seconds: float) -> None:
            # A closed pipe reports "ready" at once; wait on the process instead of spinning.
            if not lines.read(seconds):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)

        try:
            while process.poll() is None and not heard:
                read_on(POLL_SECONDS)
                if error := watch(process.pid):
                    grace_seconds = 0.0
                    raise error
                if reason := stop():
                    raise reason
                if time.monotonic() > deadline:
                    raise ProcessTimeoutError(f"ended after {timeout_seconds:g} s: {command[-1]}")
        finally:
            end_tree(process, grace_seconds, read_on)
            drained = time.monotonic() + DRAIN_SECONDS
            while lines.read(0.0) and time.monotonic() < drained:
                pass
            lines.close()
    return process.returncode


def main() -> None:
    """`python -m infini_model.runtime.processes PARENT COMMAND …`: become COMMAND, bound to it."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is a list, there is no shell


if __name__ == "__main__":
    main()
