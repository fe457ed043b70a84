"""Retrying, cancelling, pausing and resuming a training with the buttons of its flow run."""

import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import api, eventually, kill
from serving import ENGINE, TRAINER, Serving
from ui import Prefect

from flows.serving.reconcile import WORKER_MESSAGE
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.story

# Never reached: the trainings are ended.
STEPS = 1_000_000


def begin(prefect: Prefect, serving: Serving) -> tuple[str, Path]:
    """Start a training and wait for its first steps; returns its flow run and run folder."""
    prefect.open_form("pipeline")
    prefect.field("Steps").fill(str(STEPS))
    name = f"run-{secrets.token_hex(4)}"
    prefect.field("Name").fill(name)
    flow_run = prefect.submit()
    prefect.expect_log(re.compile(rf"Step \[\d+/{STEPS}\]"))
    return flow_run, serving.output / "runs" / name


def saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint: the last one that was trained, between two of the plan."""
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    step = int(checkpoint.name.removeprefix("step-"))
    assert read_metrics(run_dir)[-1]["step"] == step
    return step


def go_on(action: str, prefect: Prefect, serving: Serving, flow_run: str, run_dir: Path) -> None:
    """By this button the run resumes from its newest checkpoint, in its folder."""
    checkpoint = newest_checkpoint(run_dir)
    prefect.press(action, confirmed_by=action)
    serving.wait_for_log(flow_run, f"Resuming from: {checkpoint}")
    prefect.expect_state("Running")
    known = read_metrics(run_dir)[-1]["step"]
    eventually(lambda: read_metrics(run_dir)[-1]["step"] > known, "a step")
    assert not list(run_dir.parent.glob(f"{run_dir.name}?*"))


@pytest.fixture(autouse=True)
def _nothing_else_trains(serving: Serving) -> Iterator[None]:
    """A failed test must not leave a training that slows down the next one."""
    yield
    for process in serving.processes(ENGINE):
        kill(process, signal.SIGTERM)
    eventually(lambda: not serving.processes(ENGINE), "the end of the engines")


def test_a_failed_training_is_retried_from_its_step_in_its_mlflow_run(
    prefect: Prefect, serving: Serving
) -> None:
    flow_run, run_dir = begin(prefect, serving)
    eventually(lambda: newest_checkpoint(run_dir) is not None, "a checkpoint")
    # MLflow connects while the training runs.
    eventually(lambda: "run_id" in read_mlflow_record(run_dir), "MLflow's run")
    mlflow_run = read_mlflow_record(run_dir)["run_id"]
    serving.kill(TRAINER)
    prefect.expect_state("Failed")
    prefect.keep("run-failed")
    assert "\n" not in serving.state(flow_run)["message"]
    go_on("Retry", prefect, serving, flow_run, run_dir)
    prefect.keep("run-retried")
    assert read_mlflow_record(run_dir)["run_id"] == mlflow_run


def test_cancel_leaves_a_checkpoint(prefect: Prefect, serving: Serving) -> None:
    flow_run, run_dir = begin(prefect, serving)
    prefect.press("Cancel", confirmed_by="Cancel Flow Run")
    prefect.expect_state("Cancelled")
    eventually(lambda: not serving.processes(TRAINER), "the end of the training")
    message = f"Cancelled; step {saved_step(run_dir)} is saved"
    eventually(lambda: not serving.processes(ENGINE), "the end of the engine")
    # As the worker does if it notices the cancellation before the engine has ended.
    replaced = {"type": "CANCELLED", "name": "Cancelled", "message": WORKER_MESSAGE}
    api(serving.url, f"flow_runs/{flow_run}/set_state", state=replaced, force=True)
    eventually(lambda: serving.state(flow_run)["message"] == message, "the message")
    prefect.keep("run-cancelled")


def test_a_paused_training_ends_and_resume_continues_it(prefect: Prefect, serving: Serving) -> None:
    flow_run, run_dir = begin(prefect, serving)
    prefect.press("Pause", confirmed_by="Pause Flow Run")
    prefect.expect_state("Suspended")
    eventually(lambda: not serving.processes(ENGINE), "the end of the engine")
    step = saved_step(run_dir)
    assert f"step {step} is saved" in serving.state(flow_run)["message"]
    prefect.keep("run-suspended")
    go_on("Resume", prefect, serving, flow_run, run_dir)
    prefect.keep("run-resumed")
