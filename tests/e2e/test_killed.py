"""Runs that are killed or interrupted anywhere: the same command gives the same result."""

import contextlib
import os
import pty
import signal
from collections.abc import Callable, Sequence
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
)
from curves import repeatable
from stopping import Halt, is_pending
from trials import STEPS, Make, Start, Undisturbed, shards

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.story
# Python reads it at its start.
SITE = """
import sys
if {stage!r} in sys.orig_argv and "infini_model.runtime.processes" not in sys.orig_argv:
    import os, signal
    def halt(event, _arguments):
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGSTOP)
    sys.addaudithook(halt)
"""


def halting(stage: str, folder: Path) -> Environment:
    """What makes a stage stop itself (SIGSTOP) when it is about to put a file in place."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(stage=stage))
    return {"PYTHONPATH": str(folder)}


def wait_until_halted(running: Running, stage: str) -> None:
    """Wait until a stage that was made to stop itself has done so."""

    def is_halted() -> bool:
        for process in running.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_stopped = process.status() == psutil.STATUS_STOPPED
                if is_stopped and stage in process.cmdline():
                    return True
        return False

    eventually(is_halted, lambda: f"the stage {stage}, halted, in\n{running.output}")


def expect_no_process(everyone: Sequence[psutil.Process], output: Path) -> None:
    """The processes of a command end, and others that use its output folder."""
    eventually(lambda: not alive(everyone), "the end of all processes")
    eventually(lambda: not processes_about(output), lambda: f"the end of {processes_about(output)}")


def sigkill(running: Running, output: Path) -> None:
    """Kill the command itself; all its descendants must end on their own."""
    everyone = running.tree()
    kill(everyone[0], signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    expect_no_process(everyone, output)


def test_sigkill_in_every_stage_and_the_same_command_gives_the_same_result(
    undisturbed: Undisturbed,
    start: Start,
    connected: Environment,
    alone: Environment,
    pipeline: Make,
    with_tables: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    """The command killed during training has a temporary server, which must end with it."""
    output = with_tables(tmp_path / "output")
    command = ("run", "--config", write_settings(tmp_path / "settings.yaml", pipeline(output)))
    for stage in ("download", "shard"):
        running = start(*command, env=connected | halting(stage, tmp_path / stage))
        wait_until_halted(running, stage)
        sigkill(running, output)
        assert "Traceback" not in running.output

    halt = Halt(tmp_path / "halt", 50)
    running = start(*command, env=alone | halt.environment)
    halt.wait()
    running.wait_for("Step [50/")
    sigkill(running, output)
    run_dir = output / "runs" / "run-1"
    begun = read_metrics(run_dir)
    assert not (run_dir / "report.md").exists()

    running = start(*command, env=connected | halting("evaluate", tmp_path / "evaluate"))
    wait_until_halted(running, "evaluate")
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
    alone: Environment,
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

    # That of step 20 is on disk once that of step 40 is begun.
    halt = Halt(tmp_path / "halt", 50, 80)
    running = start(*command, env=alone | halt.environment)
    (trainer,) = halt.wait()
    trainer.kill()
    running.wait_for("retry 1 of 2 starts")
    running.wait_for("Resuming after: crash at step ")
    running.wait_for("Resuming from:")
    (trainer,) = halt.wait()
    everyone = running.tree()
    running.process.send_signal(signal.SIGINT)
    eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
    halt.resume()
    assert running.wait() == 130
    last_line = running.output.splitlines()[-1]
    assert last_line == "interrupted; the same command resumes where this one stopped"
    assert "Traceback" not in running.output
    expect_no_process(everyone, output)
    saved, last = newest_checkpoint(run_dir), int(read_metrics(run_dir)[-1]["step"])
    assert 80 <= last < STEPS
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
    command, halt = infini("train", "--config", settings), Halt(tmp_path / "halt", 20)
    child, terminal = pty.fork()
    if child == 0:
        # When the tests run in the background, the signal may be ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execve(command[0], command, connected | halt.environment)
    run_dir = output / "runs" / "run-1"
    with os.fdopen(terminal, "rb", buffering=0) as screen:
        printed = b""
        while b"Step [20/" not in printed:
            printed += screen.read(4096)
        (trainer,) = halt.wait()
    eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
    halt.resume()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    last = read_metrics(run_dir)[-1]["step"]
    assert 20 <= last < STEPS
    saved = newest_checkpoint(run_dir)
    assert saved is not None
    assert saved.name == f"step-{last}"
    expect_no_process([], output)


def test_a_killed_lock_holder_blocks_no_other_command(
    start: Start, connected: Environment, pipeline: Make, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    settings = write_settings(tmp_path / "settings.yaml", pipeline(output))
    command = ("preprocess", "--config", settings)
    holder = start(*command, env=connected | halting("shard", tmp_path / "halt"))
    wait_until_halted(holder, "shard")
    other = start(*command, env=connected)

    def is_waiting() -> bool:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        waiting = {int(line[5]) for line in locks if line[1:3] == ["->", "FLOCK"]}
        return any(each.pid in waiting for each in other.tree())

    eventually(is_waiting, lambda: f"a process that waits for the lock, in\n{other.output}")
    kill(psutil.Process(holder.process.pid), signal.SIGKILL)
    assert other.wait() == 0, other.output
    assert "is ready" not in holder.output
    assert "is ready" in other.output
    (manifest,) = output.glob("datasets/tiny-*/manifest.json")
    assert manifest.is_file()
    assert not leftovers(output)
