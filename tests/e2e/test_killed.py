"""Runs that are killed or interrupted anywhere: the same command gives the same result."""

import os
import pty
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import (
    Environment,
    Running,
    alive,
    dataset_of,
    eventually,
    infini,
    kill,
    leftovers,
    processes_about,
    write_settings,
    write_texts,
)
from curves import repeatable
from trials import STEPS, Make, Start, Undisturbed, shards

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.story


def stage_of(running: Running, name: str) -> list[psutil.Process]:
    """The processes of a stage, if running."""
    found = []
    for process in alive(running.tree()):
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "infini_model.runtime.processes" not in words and name in words:
            found.append(process)
    return found


def trainer_of(running: Running) -> psutil.Process:
    """The training process."""
    (process,) = stage_of(running, "infini_model.training")
    return process


def sigkill(running: Running, output: Path) -> None:
    """Kill the command itself; all its descendants must end on their own."""
    everyone = running.tree()
    kill(everyone[0], signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    eventually(lambda: not alive(everyone), "the end of all processes", seconds=10)
    assert not processes_about(output)


def test_sigkill_in_every_stage_and_the_same_command_gives_the_same_result(
    undisturbed: Undisturbed,
    start: Start,
    connected: Environment,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """The command killed during training has a temporary server, which must end with it."""
    output = with_tables(tmp_path / "output")
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", pipeline(output)))
    for stage in ("download", "shard"):
        running = start(*command, env=connected)
        eventually(lambda: stage_of(running, stage) != [], stage, seconds=60)  # noqa: B023
        sigkill(running, output)

    running = start(*command)
    running.wait_for("Step [50/")
    sigkill(running, output)
    run_dir = output / "runs" / "run-1"
    begun = read_metrics(run_dir)
    assert begun[-1]["step"] < STEPS
    assert not (run_dir / "report.md").exists()

    running = start(*command, env=connected)
    running.wait_for("Task run 'evaluate")
    assert "Resuming from:" in running.output
    sigkill(running, output)

    running = start(*command, env=connected)
    assert running.wait() == 0, running.output
    assert f"Resuming from: {run_dir}/checkpoints/step-{STEPS}" in running.output
    assert [path.name for path in (output / "runs").glob("run-*")] == ["run-1"]
    assert shards(output) == shards(undisturbed.output)
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    assert read_metrics(run_dir)[0] == begun[0]
    assert scores(run_dir) == scores(undisturbed.run_dir)
    assert not leftovers(output)


def scores(run_dir: Path) -> list[str]:
    """The tables of losses in a report."""
    lines = (run_dir / "report.md").read_text().splitlines()
    return [line for line in lines if line.startswith(("| validation", "| test"))]


def test_a_killed_rank_is_retried_and_ctrl_c_is_resumed_in_one_mlflow_run(
    undisturbed: Undisturbed,
    start: Start,
    connected: Environment,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    from mlflow import MlflowClient

    output = with_tables(tmp_path / "output")
    tree = pipeline(
        output, tracking={"mlflow": True}, stages={"train": {"retry_delay_seconds": 0.0}}
    )
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", tree))
    run_dir = output / "runs" / "run-1"

    running = start(*command)
    running.wait_for("Step [30/")
    trainer_of(running).kill()
    running.wait_for("retry 1 of 2 starts")
    running.wait_for("Resuming after: crash at step ")
    running.wait_for("Resuming from:")
    running.wait_for("Step [60/")
    everyone = running.tree()
    running.process.send_signal(signal.SIGINT)
    assert running.wait(seconds=60) == 130
    last_line = running.output.splitlines()[-1]
    assert last_line == "interrupted; the same command resumes where this one stopped"
    assert "Traceback" not in running.output
    assert not alive(everyone)
    assert not processes_about(output)
    saved, last = newest_checkpoint(run_dir), int(read_metrics(run_dir)[-1]["step"])
    assert last < STEPS
    assert saved is not None
    assert saved.name == f"step-{last}"

    running = start(*command, env=connected)
    assert running.wait() == 0, running.output
    assert f"Resuming from: {saved}" in running.output
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)

    client = MlflowClient(f"sqlite:///{output / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("infini-llama")
    (record,) = client.search_runs([experiment.experiment_id])
    assert record.info.status == "FINISHED"
    history = client.get_metric_history(record.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [*range(1, STEPS + 1)]


def test_closing_the_terminal_leaves_a_checkpoint(
    connected: Environment, pipeline: Make, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    settings = write_settings(tmp_path / "settings.yaml", pipeline(output))
    dataset_of(settings)
    command = infini("train", "--config", settings)
    child, terminal = pty.fork()
    if child == 0:
        # When the tests run in the background, the signal may be ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execve(command[0], command, connected)
    run_dir = output / "runs" / "run-1"
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        printed = b""
        while b"Step [20/" not in printed:
            printed += screen.read(4096)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    last = read_metrics(run_dir)[-1]["step"]
    assert last < STEPS
    saved = newest_checkpoint(run_dir)
    assert saved is not None
    assert saved.name == f"step-{last}"
    assert not processes_about(output)


@pytest.fixture
def two(tmp_path: Path, start: Start, connected: Environment) -> Callable[[], list[Running]]:
    """Two concurrent commands for the same dataset, large enough for them to overlap."""
    texts = write_texts(tmp_path / "texts", 200, words=24_000)
    tree = {
        "run": {"output_dir": str(tmp_path / "output")},
        "data": {
            "name": "tiny",
            "source": {"paths": [str(texts / "*.txt")]},
            "tokenizer": {"spec": "train", "vocab_size": 300},
            "partition_megabytes": 4,
            "workers": 1,
        },
    }
    settings = write_settings(tmp_path / "settings.yaml", tree)
    return lambda: [start("preprocess", "--config", settings, env=connected) for _ in range(2)]


def test_two_commands_for_the_same_dataset_build_it_once(
    two: Callable[[], list[Running]], tmp_path: Path
) -> None:
    pair = two()
    for running in pair:
        assert running.wait() == 0, running.output
    printed = "".join(running.output for running in pair)
    assert printed.count(" to make, ") == 1
    assert len(list(tmp_path.glob("output/datasets/tiny-*"))) == 1
    assert not leftovers(tmp_path / "output")


def test_a_killed_lock_holder_blocks_no_other_command(
    two: Callable[[], list[Running]], tmp_path: Path
) -> None:
    pair = two()
    working: list[Running] = []

    def one_works() -> bool:
        working[:] = [running for running in pair if "'shard " in running.output]
        return bool(working)

    eventually(one_works, "a worker", seconds=90)
    holder = working[0]
    (other,) = [running for running in pair if running is not holder]
    kill(psutil.Process(holder.process.pid), signal.SIGKILL)
    assert "is ready" not in holder.output
    assert other.wait() == 0, other.output
    assert "is ready" in other.output
    (manifest,) = tmp_path.glob("output/datasets/tiny-*/manifest.json")
    assert manifest.is_file()
    assert not leftovers(tmp_path / "output")
