"""Child processes end at their deadline or with their parent, with their whole process tree."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PATIENCE, eventually, is_gone

from infini_model.runtime.processes import ProcessTimeoutError, run

# A child that starts a grandchild in its own session, as torchrun does, and prints its id.
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep({seconds})
"""


def test_lines_arrive_whole_and_in_order() -> None:
    code = "import sys; sys.stdout.write('a\\nb'); sys.stdout.flush(); print('c'); print('é'); 1/0"
    lines: list[str] = []
    assert run([sys.executable, "-c", code], on_line=lines.append) == 1
    assert lines[:3] == ["a", "bc", "é"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_million_lines_are_all_read() -> None:
    lines: list[str] = []
    code = "print('\\n'.join(map(str, range(100_000))))"
    assert run([sys.executable, "-c", code], on_line=lines.append) == 0
    assert lines == [str(number) for number in range(100_000)]


def test_a_command_ends_at_its_deadline() -> None:
    with pytest.raises(ProcessTimeoutError, match=r"^timed out after 0\.1 s: "):
        run(
            [sys.executable, "-c", "import signal; signal.pause()"],
            on_line=lambda _: None,
            timeout_seconds=0.1,
        )


def test_a_stop_ends_grandchildren_in_other_sessions_too() -> None:
    lines: list[str] = []
    with pytest.raises(InterruptedError):
        run(
            [sys.executable, "-c", GRANDCHILD.format(seconds=600)],
            on_line=lines.append,
            stop=lambda: InterruptedError("enough") if lines else None,
        )
    eventually(lambda: is_gone(int(lines[0])), "the end of the grandchild")


# A child that prints its id once it ignores SIGTERM.
DEAF = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(os.getpid(), flush=True)\n"
    "while True: signal.pause()"
)


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    lines: list[str] = []
    with pytest.raises(InterruptedError):
        run(
            [sys.executable, "-c", DEAF],
            on_line=lines.append,
            stop=lambda: InterruptedError("enough") if lines else None,
            grace_seconds=0.5,
        )
    assert is_gone(int(lines[0]))


def test_output_during_shutdown_is_read_however_long() -> None:
    """More than a pipe buffers: unread, it would block the child until it is killed."""
    code = (
        "import signal, sys, time\n"
        "def leave(*_):\n"
        "    print('x' * 300_000); print('saved', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('ready', flush=True); time.sleep(600)"
    )
    lines: list[str] = []
    with pytest.raises(InterruptedError):
        run(
            [sys.executable, "-c", code],
            on_line=lines.append,
            stop=lambda: InterruptedError("enough") if lines else None,
            grace_seconds=PATIENCE,
        )
    assert lines == ["ready", "x" * 300_000, "saved"]


def test_an_error_during_shutdown_does_not_leave_it_running() -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('ending', flush=True))\n"
        "print(os.getpid(), flush=True)\n"
        "while True: time.sleep(1)"
    )
    lines: list[str] = []

    def refuse(line: str) -> None:
        lines.append(line)
        if line == "ending":
            raise RuntimeError("no more lines")

    def stop() -> Exception | None:
        return InterruptedError("enough") if lines else None

    with pytest.raises(RuntimeError, match="no more lines"):
        run([sys.executable, "-c", code], on_line=refuse, stop=stop, grace_seconds=PATIENCE)
    eventually(lambda: is_gone(int(lines[0])), "the end of the child")


def test_the_reason_to_stop_is_raised_after_a_graceful_shutdown() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True)))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)"
    )
    lines: list[str] = []
    reason = InterruptedError("enough")
    with pytest.raises(InterruptedError) as raised:
        run(
            [sys.executable, "-c", code],
            on_line=lines.append,
            stop=lambda: reason if lines else None,
            grace_seconds=PATIENCE,
        )
    assert raised.value is reason
    assert lines == ["ready", "saved"]


def caller(child: str) -> subprocess.Popen[str]:
    """A process that runs a child and prints its lines."""
    program = (
        "import sys; from infini_model.runtime.processes import run\n"
        f"run([sys.executable, '-c', {child!r}], grace_seconds={PATIENCE},\n"
        "    on_line=lambda line: print(line, flush=True))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_repeated_signal_ends_both_and_loses_no_line(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Also if it arrives while the caller polls the command."""
    gate = tmp_path / "gate"
    process = caller(
        "import os, signal, sys, time\n"
        "def leave(*_):\n"
        "    print('leaving', flush=True)\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        "    print('saved', flush=True); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('ready', flush=True); time.sleep(600)"
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n"
        process.send_signal(number)
        assert output.readline() == "leaving\n"
        for _ in range(20):
            process.send_signal(number)
            time.sleep(0.01)  # Each meets the caller at another line.
        gate.touch()
        assert output.read() == "saved\n"
    assert process.wait() == status


def test_an_ignored_signal_stays_ignored() -> None:
    """As the shell sets it for background jobs."""
    handlers: list[object] = []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(
            [sys.executable, "-c", "print('ready')"],
            on_line=lambda _: handlers.append(signal.getsignal(signal.SIGINT)),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_IGN]


def test_an_error_from_watch_kills_at_once() -> None:
    """The grace has no end: it would never return if it granted any."""
    lines: list[str] = []

    def watch(_pid: int) -> Exception | None:
        return LookupError("hung") if lines else None

    with pytest.raises(LookupError, match="hung"):
        run(
            [sys.executable, "-c", DEAF],
            on_line=lines.append,
            watch=watch,
            grace_seconds=math.inf,
        )
    assert is_gone(int(lines[0]))


def test_an_inherited_pipe_does_not_keep_a_dead_command_running() -> None:
    """The grandchild keeps the pipe open long after the command has exited."""
    lines: list[str] = []
    assert run([sys.executable, "-c", GRANDCHILD.format(seconds=0)], on_line=lines.append) == 0
    assert not is_gone(int(lines[0]))
    os.kill(int(lines[0]), signal.SIGKILL)


def test_a_negative_status_is_the_signal() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run([sys.executable, "-c", code], on_line=lambda _: None) == -signal.SIGKILL


def test_sigkill_to_the_caller_ends_the_command(tmp_path: Path) -> None:
    number = tmp_path / "pid"
    sleeper = (
        f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    process = caller(sleeper)
    eventually(lambda: number.exists() and number.read_text() != "", "the command's id")
    process.kill()
    process.communicate()
    eventually(lambda: is_gone(int(number.read_text())), "the end of the command")
