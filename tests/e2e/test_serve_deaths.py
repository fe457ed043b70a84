"""Processes killed under `infini serve`: servers and worker restart, trainings go through."""

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import api, eventually
from ports import free_port
from serving import ENGINE, MLFLOW, PREFECT, TRAINER, WORKER, Serving, serve
from trials import Make, Start

from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.callbacks.mlflow_record import read_mlflow_record

pytestmark = pytest.mark.story
# Never reached, as the run is cancelled.
STEPS = 1_000_000
LONG = {
    "training": {"max_steps": STEPS},
    "logging": {"logging_steps": 200, "eval_steps": STEPS},
    "checkpoint": {"save_steps": STEPS},
}


def last_step(run_dir: Path) -> int:
    """The newest checkpoint's step."""
    steps = [int(path.name.removeprefix("step-")) for path in run_dir.glob("checkpoints/step-*")]
    return max(steps, default=0)


def mlflow_status(run_dir: Path) -> str:
    """The status of a run in MLflow."""
    from mlflow import MlflowClient

    record = read_mlflow_record(run_dir)
    return str(MlflowClient(record["tracking_uri"]).get_run(record["run_id"]).info.status)


def link_to_mlflow(serving: Serving, flow_run: str) -> str:
    """The artifact that links a flow run to its MLflow record."""
    wanted = {"artifacts": {"flow_run_id": {"any_": [flow_run]}, "key": {"any_": ["mlflow"]}}}
    return "".join(str(found["data"]) for found in api(serving.url, "artifacts/filter", **wanted))


def test_servers_worker_and_engine_are_killed_and_the_training_still_obeys(
    start: Start, pipeline: Make, with_tables: Callable[[Path], Path], tmp_path: Path
) -> None:
    output = with_tables(tmp_path / "output")
    run_dir = output / "runs" / "quickstart-1"
    serving = serve(start, output, (free_port(), free_port()))
    tree = pipeline(output, **LONG, tracking={"mlflow": True})
    flow_run = serving.create("pipeline", advanced=tree)
    serving.wait_for_log(flow_run, "Step [200/")
    trainer = serving.process(TRAINER)
    eventually(lambda: "/runs/" in link_to_mlflow(serving, flow_run), "a link to MLflow")

    # It must not be marked as crashed while it trains.
    serving.set_state(flow_run, "CRASHED", "Crashed")
    serving.wait_for_state(flow_run, "Running")

    killed = {name: serving.kill(name) for name in (PREFECT, MLFLOW, WORKER)}
    serving.running.wait_for("the Prefect server has exited (-9)")
    # The worker is the last one, as it waits for the API.
    for name, dead in killed.items():
        eventually(lambda: serving.processes(name) not in ([], [dead]), f"another {name}")  # noqa: B023
    # The worker that started the run is dead, so only the run itself can see the suspension.
    assert serving.state(flow_run)["name"] == "Running"
    known = read_metrics(run_dir)[-1]["step"]
    eventually(lambda: read_metrics(run_dir)[-1]["step"] > known, "more steps")
    assert trainer.is_running()
    serving.suspend(flow_run)
    eventually(lambda: not serving.processes(ENGINE), "the end of the engine")
    saved = last_step(run_dir)
    state = serving.state(flow_run)
    assert state["name"] == "Suspended"
    assert state["message"].startswith(f"Suspended; step {saved} is saved")
    assert state["state_details"]["pause_timeout"] is None
    assert 0 < saved < STEPS

    serving.resume(flow_run)
    serving.wait_for_log(flow_run, f"Resuming from: {run_dir}/checkpoints/step-{saved}")
    eventually(lambda: mlflow_status(run_dir) == "RUNNING", "MLflow's record")
    serving.kill(ENGINE)
    # The worker may report it, twice, after `infini serve` has, and must not do so after the retry.
    log, last = output / "prefect" / "worker.log", "flow_runs.worker - Increase the memory"
    eventually(lambda: last in log.read_text(), "what the worker says after both reports")
    serving.wait_for_state(flow_run, "Crashed")
    eventually(lambda: not serving.processes(TRAINER), "the end of the training")
    eventually(lambda: mlflow_status(run_dir) == "FAILED", "MLflow's record")

    serving.retry(flow_run)
    log = run_dir / "logs" / "rank-0.log"
    eventually(lambda: log.read_text().count("Resuming from: ") == 2, "the second resumption")
    eventually(lambda: "Step [" in log.read_text().rpartition("Resuming from: ")[2], "a step")
    serving.cancel(flow_run)
    serving.wait_for_state(flow_run, "Cancelled")
    eventually(lambda: not serving.processes(ENGINE), "the end of the engine")
    assert last_step(run_dir) > saved
    assert [path.name for path in (output / "runs").glob("*-*")] == ["quickstart-1"]
    serving.stop()
