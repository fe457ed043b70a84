"""Child processes with a deadline that never outlive their parent.

`run` streams a command's output and leaves none of its process tree behind, whether the command
exits, times out, or the caller is interrupted. `bound` makes a command die with its parent, even if
the parent is killed by SIGKILL (PR_SET_PDEATHSIG on Linux; no effect elsewhere). To the kernel the
parent is the thread that started the command, so that thread must outlive it; `run` blocks in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

# SIGHUP is sent when a terminal is closed.
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.1
# How much to read after the command has exited. No pipe holds more, so whatever follows is from a
# grandchild, which may keep the other end open and write to it indefinitely.
PIPE_BYTES = 1 << 20
# What another launcher has told this process: who obeyed it would wait for ranks that never come.
OF_LAUNCHERS = re.compile(
    r"((GROUP|LOCAL|ROLE)_)?(RANK|WORLD_SIZE)$|(MASTER|PET|TORCHELASTIC)_(?!ERROR_FILE$)"
)


def wait_until(
    condition: Callable[[], bool], *, every_seconds: float, timeout_seconds: float = math.inf
) -> bool:
    """Block until `condition` is true; return False if it still is not after the timeout.

    The condition is checked at least once, and then every `every_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_seconds)
    return True


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it is dead already.

    `parent` is the id of the process that started this one.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def bound(command: Sequence[str]) -> list[str]:
    """`command`, wrapped so that it dies with this process."""
    # As a file, which has to be found on no path.
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def end_tree(
    process: subprocess.Popen[bytes],
    grace_seconds: float,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Send SIGTERM to `process` and, after the grace period, SIGKILL to its whole process tree.

    `wait` is called with the seconds until the next poll; a caller that reads the process's output
    can keep reading in it. Descendants are found by parent id, not by process group, because
    torchrun starts each rank in its own session.
    """
    import psutil

    descendants: set[psutil.Process] = set()

    def find_descendants() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants.update(psutil.Process(process.pid).children(recursive=True))

    find_descendants()
    try:
        if process.poll() is None:
            process.terminate()
            deadline = time.monotonic() + grace_seconds
            while process.poll() is None and time.monotonic() < deadline:
                find_descendants()
                wait(POLL_SECONDS)
    finally:
        for survivor in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        if process.poll() is None:
            process.kill()
        process.wait()


class _Lines:
    """Splits the bytes from a pipe into lines of text and passes them to `on_line`."""

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(descriptor, selectors.EVENT_READ)

    def read(self, seconds: float) -> int:
        """Wait up to `seconds` for output; how many bytes, 0 also if the pipe is closed."""
        if not self._selector.select(seconds):
            return 0
        chunk = os.read(self._descriptor, 1 << 16)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._on_line(line.decode("utf-8", "replace"))
        return len(chunk)

    def close(self) -> None:
        if self._rest:
            self._on_line(self._rest.decode("utf-8", "replace"))
        self._selector.close()


def oom_kills() -> int:
    """Processes the kernel has killed for lack of memory since boot; 0 if it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def deferred_signals(*, deliver: bool = True) -> Iterator[list[int]]:
    """Collect `STOPS` signals in a list while the block runs; deliver the first one afterwards.

    Without `deliver` none is delivered: the caller acts on the list.

    A handler that raises could interrupt any line, such as one that holds the lock of a `Popen`,
    which would then never report that its process has exited. Only the main thread receives
    signals; ignored signals stay ignored.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        # Block signals while the handlers are restored.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        for number, handler in before.items():
            signal.signal(number, handler)
        is_due = deliver and bool(received)
        is_fatal = is_due and before[signal.Signals(received[0])] is signal.SIG_DFL
        if is_due and not is_fatal:
            signal.raise_signal(received[0])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if is_fatal:
            raise SystemExit(128 + received[0])


def run(
    command: Sequence[str],
    *,
    on_line: Callable[[str], None],
    grace_seconds: float = 30.0,
    watch: Callable[[int], Exception | None] = lambda _: None,
    stop: Callable[[], Exception | None] = lambda: None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run `command`, pass each line of its output to `on_line`, and return its exit status.

    The command gets its own session, no standard input, and `env` beside this process's
    environment. A negative status is the signal that killed it. Its process tree is shut down
    (SIGTERM, then SIGKILL after `grace_seconds`) when `on_line` raises, or a signal in `STOPS`
    arrives. That signal is then delivered to the caller, as `SystemExit` if it would have killed
    the caller.

    `watch` is called with the process id ten times a second, and `stop` as often. An error that
    they return is raised once the process tree has ended: for `watch` without grace.
    """
    with (
        deferred_signals() as received,
        subprocess.Popen(
            bound(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=None if env is None else {**os.environ, **env},
        ) as process,
    ):
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        lines = _Lines(process.stdout.fileno(), on_line)

        def keep_reading(seconds: float) -> None:
            # A closed pipe is always ready: wait for the process instead of spinning.
            if not lines.read(seconds):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)

        try:
            while process.poll() is None and not received:
                keep_reading(POLL_SECONDS)
                if error := watch(process.pid):
                    grace_seconds = 0.0
                    raise error
                if reason := stop():
                    raise reason
        finally:
            end_tree(process, grace_seconds, keep_reading)
            left = PIPE_BYTES
            while left > 0 and (count := lines.read(0.0)):
                left -= count
            lines.close()
    return process.returncode


def main() -> None:
    """`python processes.py PARENT COMMAND …`: exec a bound COMMAND.

    It imports nothing from the working directory, is no rank of another launcher, and prints UTF-8.
    """
    die_with_parent(int(sys.argv[1]))
    for name in filter(OF_LAUNCHERS.match, list(os.environ)):
        del os.environ[name]
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if (root := str(Path(__file__).resolve().parents[2])) not in sys.path:
        path.append(root)
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    os.environ["PYTHONIOENCODING"] = "utf-8:backslashreplace"
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command is a list, there is no shell


if __name__ == "__main__":
    main()
