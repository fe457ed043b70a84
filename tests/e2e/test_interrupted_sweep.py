"""`infini compare --sweep`: all runs, whatever happens to one of them or to the command."""

import json
import signal
from pathlib import Path

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
from curves import repeatable
from stopping import Halt
from trials import Make, Start

pytestmark = pytest.mark.story


def folders(runs_dir: Path) -> list[Path]:
    """The run folders; `latest` is a link to one of them."""
    return sorted(path for path in runs_dir.iterdir() if path.is_dir() and not path.is_symlink())


def test_a_sweep_that_is_killed_goes_on_with_the_run_that_was_interrupted(
    start: Start, pipeline: Make, alone: Environment, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    settings = write_settings(tmp_path / "settings.yaml", pipeline(output))
    command = ("compare", "--sweep", "model.memory=linear,none", "--config", settings)
    halt = Halt(tmp_path / "halt", 50)
    sweeping = start(*command, env=alone | halt.environment)
    halt.wait()
    halt.resume()
    sweeping.wait_for("Run 2 of 2: run-memory-none")
    halt.wait()
    runs = [output / "runs" / f"run-memory-{memory}" for memory in ("linear", "none")]
    everyone = sweeping.tree()
    kill(everyone[0], signal.SIGKILL)
    eventually(lambda: not alive(everyone), "the end of all processes")
    finished = (runs[0] / "evaluation.json").stat().st_mtime_ns
    assert not (runs[1] / "evaluation.json").exists()

    done = run(infini(*command), alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Run {runs[0]} is already finished" in done.stderr
    assert "Resuming from: " in done.stderr
    assert (runs[0] / "evaluation.json").stat().st_mtime_ns == finished
    assert folders(output / "runs") == runs
    assert len(list((output / "datasets").glob("tiny-*"))) == 1
    (folder,) = (output / "comparisons").iterdir()
    assert f"{folder / 'comparison.md'}" in done.stdout
    assert f"{folder / 'comparison.html'}" in done.stdout
    text = (folder / "comparison.md").read_text()
    losses = [json.loads((path / "evaluation.json").read_text())["metrics"] for path in runs]
    for metrics in losses:
        assert f"{metrics['evaluation/validation_loss']:.4f}" in text
    assert not leftovers(output)
    eventually(lambda: not processes_about(output), "the end of all processes")

    # The interrupted run is the same as if it had been run by itself.
    alone_dir = tmp_path / "alone"
    whole = write_settings(tmp_path / "alone.yaml", pipeline(alone_dir, model={"memory": "none"}))
    undisturbed = run(infini("run", "--config", whole), alone)
    assert undisturbed.returncode == 0, undisturbed.stderr
    (other,) = folders(alone_dir / "runs")
    assert repeatable(runs[1]) == repeatable(other)


def test_a_run_that_fails_is_named_and_the_others_are_compared(
    pipeline: Make, alone: Environment, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    tree = pipeline(output, training={"max_steps": 10}, stages={"train": {"retries": 0}})
    settings = write_settings(tmp_path / "settings.yaml", tree)
    rates = "training.learning_rate=1.0e+30,1.0e-3"
    done = run(infini("compare", "--sweep", rates, "--config", settings), alone)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (folder,) = (output / "comparisons").iterdir()
    text = (folder / "comparison.md").read_text()
    failed = "run-learning_rate-1e30"
    assert f"- {failed}: training failed: non-finite on rank 0" in text
    assert failed in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: 1 of 2 runs failed: ")
    assert "run-learning_rate-0.001" in text
