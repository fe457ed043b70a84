"""A run that is killed and interrupted: the same command gives the same result."""

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import (
    Environment,
    alive,
    eventually,
    kill,
    leftovers,
    processes_about,
    write_settings,
)
from curves import repeatable
from stopping import Halt
from trials import STEPS, Make, Start

from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import newest_checkpoint

pytestmark = pytest.mark.story


def expect_no_process(everyone: list[psutil.Process], output: Path) -> None:
    """The processes of a command end, and others that use its output folder."""
    eventually(lambda: not alive(everyone), "the end of all processes")
    eventually(lambda: not processes_about(output), lambda: str(processes_about(output)))


def test_a_run_that_is_killed_and_interrupted_gives_the_same_result(
    undisturbed: Path,
    start: Start,
    connected: Environment,
    alone: Environment,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """First a rank, then the command, which has a temporary server; then its terminal is closed."""
    output = with_tables(tmp_path / "output")
    tree = pipeline(output, stages={"retry_delay_seconds": 0.0})
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", tree))
    run_dir = output / "runs" / "run-1"

    # That of step 20 is on disk once that of step 40 is begun.
    halt = Halt(tmp_path / "halt", 50, 70, 90)
    running = start(*command, env=alone | halt.environment)
    (trainer,) = halt.wait()
    trainer.kill()
    running.wait_for("retry 1 of 2 immediately")
    running.wait_for("Resuming after: crash")
    halt.wait()
    everyone = running.tree()
    kill(everyone[0], signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    expect_no_process(everyone, output)
    begun = read_metrics(run_dir)[0]

    running = start(*command, env=connected | halt.environment)
    halt.wait()
    running.wait_for("Resuming from:")
    everyone = running.tree()
    running.process.send_signal(signal.SIGHUP)
    halt.resume_told()
    assert running.wait() == 130
    last_line = running.output.splitlines()[-1]
    assert last_line == "interrupted; the same command resumes where this one stopped"
    assert "Traceback" not in running.output
    expect_no_process(everyone, output)
    saved, last = newest_checkpoint(run_dir), int(read_metrics(run_dir)[-1]["step"])
    assert 90 <= last < STEPS
    assert saved == run_dir / "checkpoints" / f"step-{last}"

    running = start(*command, env=connected)
    assert running.wait() == 0, running.output
    assert f"Resuming from: {saved}" in running.output
    assert [path.name for path in (output / "runs").glob("run-*")] == ["run-1"]
    assert repeatable(run_dir) == repeatable(undisturbed)
    assert read_metrics(run_dir)[0] == begun
    assert scores(run_dir) == scores(undisturbed)
    assert not leftovers(output)


def scores(run_dir: Path) -> list[str]:
    """The tables of losses in a report."""
    lines = (run_dir / "report.md").read_text().splitlines()
    return [line for line in lines if line.startswith(("| validation", "| test"))]
