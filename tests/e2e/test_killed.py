"""A run from documents to a report; killed or interrupted, the same command gives the same one."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import (
    Environment,
    alive,
    eventually,
    infini,
    kill,
    leftovers,
    processes_about,
    run,
    write_settings,
)
from curves import curve, repeatable
from stopping import Halt, is_pending
from trials import STEPS, Make, Start, Undisturbed

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.story


def expect_no_process(everyone: list[psutil.Process], output: Path) -> None:
    """The processes of a command end, and others that use its output folder."""
    eventually(lambda: not alive(everyone), "the end of all processes")
    eventually(lambda: not processes_about(output), lambda: f"the end of {processes_about(output)}")


def test_a_run_from_scratch_ends_with_a_report_and_leaves_no_process(
    undisturbed: Undisturbed,
) -> None:
    report = undisturbed.run_dir / "report.md"
    assert undisturbed.printed.startswith("Starting a Prefect server for this command")
    assert f"Report: {report}" in undisturbed.printed
    assert report.is_file()
    assert (undisturbed.output / "runs" / "latest").resolve() == undisturbed.run_dir
    assert [*curve(undisturbed.run_dir, "train/loss")] == [*range(1, STEPS + 1)]
    validation = [*curve(undisturbed.run_dir, "validation/loss").values()]
    assert validation[-1] < validation[0] - 1.0
    eventually(lambda: not processes_about(undisturbed.output), "the end of all processes")


def test_a_run_that_is_killed_and_interrupted_gives_the_same_result(
    undisturbed: Undisturbed,
    start: Start,
    connected: Environment,
    alone: Environment,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """First a rank, then the command, which has a temporary server; then its terminal is closed."""
    output = with_tables(tmp_path / "output")
    tree = pipeline(output, stages={"train": {"retry_delay_seconds": 0.0}})
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", tree))
    run_dir = output / "runs" / "run-1"

    # That of step 20 is on disk once that of step 40 is begun.
    halt = Halt(tmp_path / "halt", 50, 70, 90)
    running = start(*command, env=alone | halt.environment)
    (trainer,) = halt.wait()
    trainer.kill()
    running.wait_for("retry 1 of 2 starts")
    running.wait_for("Resuming after: crash at step ")
    halt.wait()
    everyone = running.tree()
    kill(everyone[0], signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    expect_no_process(everyone, output)
    begun = read_metrics(run_dir)[0]

    running = start(*command, env=connected | halt.environment)
    (trainer,) = halt.wait()
    assert "Resuming from:" in running.output
    everyone = running.tree()
    running.process.send_signal(signal.SIGHUP)
    eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
    halt.resume()
    assert running.wait() == 130
    last_line = running.output.splitlines()[-1]
    assert last_line == "interrupted; the same command resumes where this one stopped"
    assert "Traceback" not in running.output
    expect_no_process(everyone, output)
    saved, last = newest_checkpoint(run_dir), int(read_metrics(run_dir)[-1]["step"])
    assert 90 <= last < STEPS
    assert saved is not None
    assert saved.name == f"step-{last}"

    running = start(*command, env=connected)
    assert running.wait() == 0, running.output
    assert f"Resuming from: {saved}" in running.output
    assert [path.name for path in (output / "runs").glob("run-*")] == ["run-1"]
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    assert read_metrics(run_dir)[0] == begun
    assert scores(run_dir) == scores(undisturbed.run_dir)
    assert not leftovers(output)


def scores(run_dir: Path) -> list[str]:
    """The tables of losses in a report."""
    lines = (run_dir / "report.md").read_text().splitlines()
    return [line for line in lines if line.startswith(("| validation", "| test"))]


def test_a_killed_sweep_goes_on_with_the_run_that_was_interrupted_and_names_one_that_failed(
    start: Start, pipeline: Make, connected: Environment, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    tree = pipeline(output, training={"max_steps": 60}, stages={"train": {"retries": 0}})
    settings = write_settings(tmp_path / "settings.yaml", tree)
    rates = "training.learning_rate=1.0e-3,1.0e-4,1.0e+30"
    command = ("compare", "--sweep", rates, "--config", settings)
    halt = Halt(tmp_path / "halt", 50)
    sweeping = start(*command, env=connected | halt.environment)
    halt.wait()
    halt.resume()
    sweeping.wait_for("Run 2 of 3: run-learning_rate-0.0001")
    halt.wait()
    runs = [output / "runs" / f"run-learning_rate-{rate}" for rate in ("0.001", "0.0001")]
    everyone = sweeping.tree()
    kill(everyone[0], signal.SIGKILL)
    eventually(lambda: not alive(everyone), "the end of all processes")
    finished = (runs[0] / "evaluation.json").stat().st_mtime_ns
    assert not (runs[1] / "evaluation.json").exists()

    done = run(infini(*command), connected)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert f"Run {runs[0]} is already finished" in done.stderr
    assert "Resuming from: " in done.stderr
    assert (runs[0] / "evaluation.json").stat().st_mtime_ns == finished
    assert len(list((output / "datasets").glob("tiny-*"))) == 1
    (folder,) = (output / "comparisons").iterdir()
    assert (folder / "comparison.html").is_file()
    text = (folder / "comparison.md").read_text()
    for path in runs:
        metrics = json.loads((path / "evaluation.json").read_text())["metrics"]
        assert f"{metrics['evaluation/validation_loss']:.4f}" in text
    failed, last_line = "run-learning_rate-1e30", done.stderr.splitlines()[-1]
    assert f"- {failed}: training failed: non-finite on rank 0" in text
    assert last_line.startswith("error: 1 of 3 runs failed: ")
    assert failed in last_line
    assert not leftovers(output)
