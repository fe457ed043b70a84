"""Trainings that are killed, stopped, starved or damaged resume to the undisturbed result.

`make faults` tries every signal on every process at every step; without it a selection is tried.
"""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import eventually
from disks import SmallDisk, frozen
from harness import (
    DAMAGES,
    HANG_SECONDS,
    SAVE_STEPS,
    STEPS,
    Kind,
    Strike,
    Trial,
    strike,
    survives,
)
from ports import free_port

from infini_model.runtime.storage import TEMPORARY
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.slow

Begin = Callable[..., Trial]
Undisturbed = Callable[[Kind], tuple[object, object]]


def test_a_disturbed_training_ends_and_resumes(
    begin: Begin, undisturbed: Undisturbed, fault: Strike
) -> None:
    stops = fault.number == signal.SIGSTOP and fault.target != "launcher"
    trial = begin(fault.kind, launch={"hang_timeout_seconds": HANG_SECONDS} if stops else {})
    strike(trial, fault)
    survives(trial, undisturbed(fault.kind))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    yield small
    small.close()


@pytest.mark.story
def test_a_full_disk_is_named_and_the_run_resumes_once_there_is_space(
    begin: Begin, undisturbed: Undisturbed, disk: SmallDisk, kind: Kind
) -> None:
    if not disk.mounted:
        pytest.skip("needs the right to mount a small disk")
    trial = begin(kind, disk.folder)
    launcher = trial.start()
    assert launcher.wait() != 0
    assert f"{trial.run_dir}/checkpoints/step-" in launcher.output
    assert "the disk is full" in launcher.output
    assert TEMPORARY not in launcher.output
    assert newest_checkpoint(trial.run_dir) is not None
    disk.grow()
    survives(trial, undisturbed(kind))


@pytest.mark.story
def test_a_read_only_folder_is_named_and_the_run_resumes_once_it_is_writable(
    begin: Begin, undisturbed: Undisturbed, kind: Kind
) -> None:
    trial = begin(kind)
    halt = trial.halt(SAVE_STEPS + 1)
    launcher = trial.start(halt)
    halt.wait(1 if kind == "one" else 2)
    checkpoints = trial.run_dir / "checkpoints"
    with frozen(checkpoints) as done:
        if not done:
            pytest.skip("needs the right to mount a folder read-only")
        halt.resume()
        assert launcher.wait() != 0
    assert re.search(rf"{checkpoints}/step-\d+: cannot be written", launcher.output)
    survives(trial, undisturbed(kind))


@pytest.mark.story
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    begin: Begin, undisturbed: Undisturbed, damage: str, file: str
) -> None:
    trial = begin("one")
    trial.finish()
    newest = newest_checkpoint(trial.run_dir)
    assert newest is not None
    assert newest.name == f"step-{STEPS}"
    DAMAGES[damage](newest / file)
    survives(trial, undisturbed("one"))
    assert f"{newest / file}: is " in trial.logs[-1].read_text()


@pytest.mark.story
def test_killing_the_tracking_server_does_not_affect_the_training(
    begin: Begin, undisturbed: Undisturbed, mlflow_server: Callable[[int], Callable[[], None]]
) -> None:
    port = free_port()
    end = mlflow_server(port)
    tracking = {"mlflow": True, "tracking_uri": f"http://127.0.0.1:{port}"}
    trial = begin("one", tracking=tracking)
    halt = trial.halt(4)
    launcher = trial.start(halt)
    halt.wait()
    end()
    halt.resume()
    assert launcher.wait() == 0, launcher.output
    mlflow_server(port)
    survives(trial, undisturbed("one"))

    def is_delivered() -> bool:
        """Launch it again: a training waits for a slow server for a limited time."""
        trial.finish()
        return read_mlflow_record(trial.run_dir).get("delivered_step") == STEPS

    eventually(is_delivered, "every step in MLflow")
    assert steps_in_mlflow(trial.run_dir) == [*range(1, STEPS + 1)]


def steps_in_mlflow(run_dir: Path) -> list[int]:
    """Every step with a loss in MLflow."""
    from mlflow import MlflowClient

    record = read_mlflow_record(run_dir)
    client = MlflowClient(record["tracking_uri"])
    return sorted(m.step for m in client.get_metric_history(record["run_id"], "train/loss"))
