"""Retrying, cancelling, pausing and resuming a training with the buttons of its flow run."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import eventually
from playwright.sync_api import expect
from serving import ENGINE, TRAINER, Serving
from ui import Prefect

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.story

STEPS = 3000


def begin(prefect: Prefect, serving: Serving, name: str, steps: int = STEPS) -> tuple[str, Path]:
    """Start a training and wait for its first steps; returns its flow run and run folder."""
    prefect.open_form("pipeline")
    prefect.field("Steps").fill(str(steps))
    prefect.field("Name").fill(name)
    flow_run = prefect.submit()
    logs = prefect.newest_logs()
    expect(logs.get_by_text(re.compile(rf"Step \[\d+/{steps}\]")).first).to_be_visible()
    return flow_run, serving.output / "runs" / name


def saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint: the last one that was trained, between two of the plan."""
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    step = int(checkpoint.name.removeprefix("step-"))
    assert read_metrics(run_dir)[-1]["step"] == step
    return step


def expect_resumed(prefect: Prefect, serving: Serving, flow_run: str, run_dir: Path) -> None:
    """The run resumes from its newest checkpoint, in its folder."""
    checkpoint = newest_checkpoint(run_dir)
    serving.wait_for_log(flow_run, f"Resuming from: {checkpoint}", seconds=120)
    prefect.expect_state("Running")
    known = read_metrics(run_dir)[-1]["step"]
    eventually(lambda: read_metrics(run_dir)[-1]["step"] > known, "a step", seconds=60)
    assert not list(run_dir.parent.glob(f"{run_dir.name}?*"))


@pytest.fixture(autouse=True)
def _nothing_else_trains(serving: Serving) -> Iterator[None]:
    """A failed test must not leave a training that slows down the next one."""
    yield
    for process in serving.processes(ENGINE):
        process.terminate()
    eventually(lambda: not serving.processes(ENGINE), "the end of the engines", seconds=90)


def test_a_failed_training_is_retried_from_its_step_in_its_mlflow_run(
    prefect: Prefect, serving: Serving
) -> None:
    flow_run, run_dir = begin(prefect, serving, "failed")
    eventually(lambda: newest_checkpoint(run_dir) is not None, "a checkpoint", seconds=240)
    # MLflow connects while the training runs.
    eventually(lambda: "run_id" in read_mlflow_record(run_dir), "MLflow's run", seconds=60)
    mlflow_run = read_mlflow_record(run_dir)["run_id"]
    serving.kill(TRAINER)
    prefect.expect_state("Failed")
    prefect.keep("run-failed")
    assert "\n" not in serving.state(flow_run)["message"]
    prefect.press("Retry", confirmed_by="Retry")
    expect_resumed(prefect, serving, flow_run, run_dir)
    prefect.keep("run-retried")
    assert read_mlflow_record(run_dir)["run_id"] == mlflow_run


def test_cancel_leaves_a_checkpoint(prefect: Prefect, serving: Serving) -> None:
    flow_run, run_dir = begin(prefect, serving, "cancelled")
    prefect.press("Cancel", confirmed_by="Cancel Flow Run")
    prefect.expect_state("Cancelled")
    eventually(lambda: not serving.processes(TRAINER), "the end of the training", seconds=60)
    message = f"Cancelled; step {saved_step(run_dir)} is saved"
    # The worker replaces it by its own at first, three seconds after the end of the engine.
    time.sleep(5)
    eventually(lambda: serving.state(flow_run)["message"] == message, "the message", seconds=30)
    prefect.keep("run-cancelled")


def test_a_paused_training_ends_and_resume_continues_it(prefect: Prefect, serving: Serving) -> None:
    flow_run, run_dir = begin(prefect, serving, "paused")
    prefect.press("Pause", confirmed_by="Pause Flow Run")
    prefect.expect_state("Suspended")
    eventually(lambda: not serving.processes(ENGINE), "the end of the engine", seconds=60)
    step = saved_step(run_dir)
    assert f"step {step} is saved" in serving.state(flow_run)["message"]
    prefect.keep("run-suspended")
    prefect.press("Resume", confirmed_by="Resume")
    expect_resumed(prefect, serving, flow_run, run_dir)
    prefect.keep("run-resumed")
