"""Child processes end at their deadline or when they are told, with their whole process tree."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PATIENCE, eventually, is_gone

from infini_model.runtime.processes import run

# A child that starts a grandchild in its own session, as torchrun does, and prints its id.
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep({seconds})
"""
# A child that prints its id once it ignores SIGTERM.
DEAF = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True: signal.pause()
"""
# A child that answers every SIGTERM by this statement, and prints its id once it does.
TOLD = """
import os, signal, sys, time
def leave(*_):
    {}
signal.signal(signal.SIGTERM, leave)
# Not by print: a handler that prints must not come into another print.
os.write(1, b"%d\\n" % os.getpid())
while True: time.sleep(1)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_lines_arrive_whole_in_order_and_all_of_them() -> None:
    code = (
        "import sys; sys.stdout.write('a\\nb'); sys.stdout.flush(); print('c'); print('é')\n"
        "print('\\n'.join(map(str, range(100_000)))); 1/0"
    )
    lines: list[str] = []
    assert run(python(code), on_line=lines.append) == 1
    assert lines[:3] == ["a", "bc", "é"]
    assert lines[3:100_003] == [str(number) for number in range(100_000)]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_child_is_apart_from_its_working_directory_other_launchers_and_the_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "selectors", "infini_model"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    foreign = {"RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"}
    for name in (*foreign, "PREFER_RANK"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    code = "import os, random, infini_model.runtime; print('漢', *sorted(os.environ))"
    lines: list[str] = []
    # Also what it starts itself, as torchrun does its ranks.
    nested = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    assert run(python(nested), on_line=lines.append) == 0, lines
    character, *names = lines[0].split()
    assert character == "漢"
    assert "PREFER_RANK" in names
    assert foreign.isdisjoint(names)


def test_a_stop_ends_grandchildren_in_other_sessions_too() -> None:
    lines: list[str] = []
    with pytest.raises(InterruptedError):
        run(
            python(GRANDCHILD.format(seconds=600)),
            on_line=lines.append,
            stop=lambda: InterruptedError("enough") if lines else None,
        )
    eventually(lambda: is_gone(int(lines[0])), "the end of the grandchild")


# With `watch` the grace has no end: `run` would never return if it granted any.
@pytest.mark.parametrize(("asks", "grace_seconds"), [("stop", 0.5), ("watch", math.inf)])
def test_a_child_that_ignores_sigterm_is_killed(asks: str, grace_seconds: float) -> None:
    lines: list[str] = []

    def hung(*_pid: int) -> Exception | None:
        return LookupError("hung") if lines else None

    with pytest.raises(LookupError, match="hung"):
        run(python(DEAF), on_line=lines.append, **{asks: hung}, grace_seconds=grace_seconds)
    assert is_gone(int(lines[0]))


def test_output_during_shutdown_is_read_however_long() -> None:
    """More than a pipe buffers: unread, it would block the child until it is killed."""
    lines: list[str] = []
    reason = InterruptedError("enough")
    with pytest.raises(InterruptedError) as raised:
        run(
            python(TOLD.format("print('x' * 300_000); print('saved', flush=True); sys.exit()")),
            on_line=lines.append,
            stop=lambda: reason if lines else None,
            grace_seconds=PATIENCE,
        )
    assert raised.value is reason
    assert lines[1:] == ["x" * 300_000, "saved"]


def test_an_inherited_pipe_does_not_keep_a_dead_command_running() -> None:
    """The grandchild keeps the pipe open long after the command has exited."""
    lines: list[str] = []
    assert run(python(GRANDCHILD.format(seconds=0)), on_line=lines.append) == 0
    assert not is_gone(int(lines[0]))
    os.kill(int(lines[0]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_repeated_signal_loses_no_line(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """Also if it arrives while the caller polls the command."""
    gate = tmp_path / "gate"
    child = TOLD.format(
        "print('leaving', flush=True)\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        "    print('saved', flush=True); sys.exit()"
    )
    program = (
        "import sys; from infini_model.runtime.processes import run\n"
        f"run([sys.executable, '-c', {child!r}], grace_seconds={PATIENCE},\n"
        "    on_line=lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen(python(program), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline().strip().isdecimal()
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
            python("print('ready')"),
            on_line=lambda _: handlers.append(signal.getsignal(signal.SIGINT)),
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_IGN]
