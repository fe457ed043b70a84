"""Flow runs in Prefect: what they show, what Retry does, and whom a subflow follows.

Prefect's engine runs as a worker starts it, and the tests query the server.
"""

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from commands import (
    PATIENCE,
    Environment,
    Running,
    api,
    eventually,
    tiny,
    write_texts,
)
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from serving import Server
from stopping import Halt

from infini_model.training.run_status import saved_step

ROOT = Path(__file__).parents[2]
PREPROCESS, PIPELINE = "flows/preprocess.py:preprocess", "flows/pipeline.py:pipeline"
Start = Callable[..., Running]


@pytest.fixture
def prefect(server: str) -> Server:
    return Server(server)


@pytest.fixture
def start(background: Start, connected: Environment) -> Start:
    """Start the engine of a flow run, as the first attempt or another one."""

    def begin(flow_run: str, entrypoint: str, **env: str) -> Running:
        env |= {
            "PREFECT__FLOW_RUN_ID": flow_run,
            "PREFECT__FLOW_ENTRYPOINT": str(ROOT / entrypoint),
        }
        return background([sys.executable, "-m", "prefect.engine"], connected | env)

    return begin


def create(prefect: Server, entrypoint: str, **parameters: Any) -> str:
    """A flow run of the flow at FILE:NAME, without a deployment."""
    flow = api(prefect.url, "flows/", name=entrypoint.rpartition(":")[2])["id"]
    return str(api(prefect.url, "flow_runs/", flow_id=flow, parameters=parameters)["id"])


def wait_for_events(prefect: Server) -> None:
    """Wait until the server has stored all events that it has got: it does so in order."""
    number, occurred = str(uuid4()), datetime.now(UTC).isoformat()
    resource = {"prefect.resource.id": f"marker.{number}"}
    event = {"id": number, "event": "marker", "occurred": occurred, "resource": resource}
    with temporary_settings({PREFECT_API_URL: prefect.url}), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event])
    wanted = {"id": {"id": [number]}}
    eventually(lambda: bool(api(prefect.url, "events/filter", filter=wanted)["events"]), "it")


@pytest.mark.story
def test_a_retry_completes_the_dataset_or_reuses_it(
    prefect: Server, start: Start, tmp_path: Path
) -> None:
    tree = tiny(tmp_path / "texts", tmp_path / "output", stages={"fetch_retries": 0})
    run = create(prefect, PREPROCESS, advanced=tree)

    def attempt() -> dict[str, Any]:
        running = start(run, PREPROCESS)
        running.wait()
        assert "Traceback" not in running.output
        return prefect.state(run)

    def ready_events(folder: Path) -> list[dict[str, Any]]:
        wanted = {"event": {"name": ["infini.dataset.ready"]}}
        found = api(prefect.url, "events/filter", filter=wanted)["events"]
        return [event for event in found if event["payload"]["folder"] == str(folder)]

    state = attempt()
    assert state["type"] == "FAILED"
    assert state["message"].startswith("data.source.paths: '")
    assert "\n" not in state["message"]
    assert prefect.log_of(run).count(state["message"]) == 1
    assert state["message"] in prefect.artifacts(run)["failure"]

    write_texts(tmp_path / "texts", 40)
    prefect.retry(run)
    attempt()
    (folder,) = (tmp_path / "output" / "datasets").glob("tiny-*")
    found = prefect.read(run)
    assert found["name"] == f"preprocess {folder.name}"
    assert f"dataset:{folder.name}" in found["tags"]
    shown = sorted(prefect.artifacts(run))
    assert shown == ["dataset", "dataset-folder", "partitions", "shard-progress"]
    eventually(lambda: bool(ready_events(folder)), "the event of the new dataset")
    (event,) = ready_events(folder)
    assert event["resource"]["prefect.resource.id"] == f"infini.dataset.{event['payload']['key']}"
    assert event["payload"]["documents"] == 40

    (shard,) = folder.glob("train/*.arrow")
    content = shard.read_bytes()
    shard.unlink()
    prefect.retry(run)
    attempt()
    assert shard.read_bytes() == content

    prefect.retry(run)
    state = attempt()
    reused = "the end of the task"
    eventually(lambda: prefect.tasks(run)["shard"]["state_name"] == "Reused", reused)
    assert state["message"] == f"nothing new: dataset {folder.name} is reused"
    assert state["message"] in prefect.log_of(run)
    assert sorted(prefect.artifacts(run)) == shown
    wait_for_events(prefect)
    assert len(ready_events(folder)) == 1


@pytest.mark.story
def test_non_finite_numbers_are_retried_twice_explained_in_one_line_and_stored_as_no_pickle(
    prefect: Server, start: Start, text_files: Path, tmp_path: Path
) -> None:
    retries = {"retries": 5, "retry_delay_seconds": 0.0}
    training = {"learning_rate": 1e30}
    tree = tiny(text_files, tmp_path / "output", training=training, stages=retries)
    run = create(prefect, PIPELINE, advanced=tree)
    running = start(run, PIPELINE)
    running.wait()
    assert "Traceback" not in running.output
    found, log = prefect.read(run), prefect.log_of(run)
    message = found["state"]["message"]
    assert (found["state"]["type"], found["name"]) == ("FAILED", "pipeline quickstart-1")
    assert message.startswith("training failed: non-finite on rank 0: ")
    assert "gradient norm nan" in message
    assert "a lower training.learning_rate, more training.warmup_steps" in message
    assert log.count(message) == 1
    # The ranks' lines have their levels.
    errors = prefect.log_of(run, logging.ERROR)
    assert any(line.startswith("CPU:ERROR | ") for line in errors)
    assert not any(line.startswith("CPU:INFO | ") for line in errors)
    assert len([line for line in log if "Resuming after: non-finite" in line]) == 2
    shown = prefect.artifacts(run)
    assert message in shown["failure"]
    assert "CPU:ERROR" in shown["failure"]
    assert "/output/runs/quickstart-1" in shown["run-folder"]

    def told() -> tuple[str, int]:
        train = prefect.tasks(run)["train"]
        return train["state"]["message"], train["run_count"]

    eventually(lambda: told() == (message, 3), lambda: str(told()))
    stored = (tmp_path / "prefect-home" / "storage").iterdir()
    kinds = {json.loads(file.read_text())["__exc_type__"].rpartition(".")[2] for file in stored}
    assert kinds == {"TrainingFailure"}


@pytest.mark.story
def test_a_retried_sweep_keeps_what_is_finished_resumes_what_was_suspended_and_names_what_fails(
    prefect: Server, start: Start, tmp_path: Path
) -> None:
    compare, output = "flows/compare.py:compare", tmp_path / "output"
    texts = write_texts(tmp_path / "texts", 40)
    tree = tiny(
        texts,
        output,
        launch={"hang_timeout_seconds": PATIENCE},
        checkpoint={"save_steps": 100_000},
        stages={"retries": 0},
    )
    names = [f"quickstart-learning_rate-{rate}" for rate in ("0.001", "0.0001", "1e30")]
    runs = [output / "runs" / name for name in names]
    halt = Halt(tmp_path / "halt", 5)
    sweep = ["training.learning_rate=1.0e-3,1.0e-4,1.0e+30"]
    run = create(prefect, compare, sweep=sweep, advanced=tree)
    running = start(run, compare, **halt.environment)
    halt.wait()
    halt.resume()
    prefect.wait_for_log(run, f"Run 2 of 3: {names[1]}")
    halt.wait()
    prefect.suspend(run)
    halt.resume_told()
    running.wait()
    state, step = prefect.state(run), saved_step(runs[1]) or 0
    assert 5 <= step < 20
    assert state["type"] == "PAUSED"
    assert state["message"].startswith(f"Suspended; step {step} is saved")

    def parts() -> set[tuple[str, str]]:
        return {(each["name"], each["state_type"]) for each in prefect.parts(run)}

    before = {(f"swept-run {names[0]}", "COMPLETED"), (f"swept-run {names[1]}", "CANCELLED")}
    assert parts() == before
    finished = (runs[0] / "evaluation.json").stat().st_mtime_ns
    # What is added meanwhile is not in the dataset that all runs of the sweep share.
    write_texts(texts, 50, seed=1)
    prefect.retry(run)
    retried = start(run, compare)
    retried.wait()
    logged = "\n".join(line for part in prefect.parts(run) for line in prefect.log_of(part["id"]))
    assert f"Resuming from: {runs[1]}/checkpoints/step-{step}" in logged
    assert (runs[0] / "evaluation.json").stat().st_mtime_ns == finished
    # The part that was cancelled stays so beside the one that finished its run.
    after = {(f"swept-run {names[1]}", "COMPLETED"), (f"swept-run {names[2]}", "FAILED")}
    assert parts() == before | after
    state = prefect.state(run)
    assert state["type"] == "FAILED"
    assert state["message"].startswith(f"1 of 3 runs failed: {names[2]}; ")
    assert f"{names[2]}: training failed: non-finite on rank 0" in retried.output
    rows = json.loads(prefect.artifacts(run)["comparison"])
    assert [row["Run"] for row in rows] == names[:2]
    for path, row in zip(runs, rows, strict=False):
        metrics = json.loads((path / "evaluation.json").read_text())["metrics"]
        loss = f"{metrics['evaluation/validation_loss']:.4f}"
        assert row["Validation loss"].startswith(loss)
        assert loss in retried.output


STORY = """
from logging import getLogger
from pathlib import Path
from prefect import flow
from infini_model.config import StagesConfig
from tasks.failures import report_failure
from tasks.flow_run import FLOW, Waiting, name_flow_run
from tasks.stage import run_with_retries

def wait(note):
    waiting = Waiting(Path(note))
    waiting.update()
    Path(note).write_text("Waiting for the CPU, held by run-1")
    waiting.update()
    Path(note).unlink()
    waiting.update()

@flow(**FLOW)
@report_failure
def story(note):
    name_flow_run("run-2", "run:run-2")
    getLogger("infini_model.training.memory_estimate").warning("training.warmup_steps=4 is less")
    run_with_retries(wait, StagesConfig(), "wait", note, note)
    raise KeyError("an unexpected error")
"""


def test_waits_attempts_warnings_and_unexpected_errors_are_shown_under_the_name_of_the_folder(
    prefect: Server, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "story.py").write_text(STORY)
    run = create(prefect, "story.py:story", note=str(tmp_path / "note"))
    start(run, f"{tmp_path}/story.py:story").wait()
    assert prefect.read(run)["name"] == "story run-2"
    states = api(prefect.url, f"flow_run_states/?flow_run_id={run}", "GET")
    told = {each["name"]: each["message"] for each in states if each["type"] == "RUNNING"}
    assert told == {"Running": None, "Waiting": "Waiting for the CPU, held by run-1"}
    assert "training.warmup_steps=4 is less" in prefect.log_of(run, logging.WARNING)
    (traceback,) = [line for line in prefect.log_of(run) if "Traceback" in line]
    assert "KeyError: 'an unexpected error'" in traceback
    assert "KeyError: 'an unexpected error'" in prefect.artifacts(run)["failure"]
    (file,) = (tmp_path / "prefect-home" / "storage").iterdir()
    assert json.loads(file.read_text())["__exc_type__"] == "builtins.KeyError"

    api(prefect.url, f"flow_runs/{run}", "PATCH", name="try 7")
    prefect.retry(run)
    start(run, f"{tmp_path}/story.py:story").wait()
    assert prefect.read(run)["name"] == "story run-2"
    again = f"wait {tmp_path}/note attempt 2"
    eventually(lambda: prefect.tasks(run)["wait"]["name"] == again, lambda: str(prefect.tasks(run)))


PART = """
import time
import httpx
from prefect import flow, task
from prefect.client.orchestration import SyncPrefectClient
from tasks.control import stopped_with_flow_run

look_up = SyncPrefectClient.read_task_run

def down_once(client, number):
    SyncPrefectClient.read_task_run = look_up
    raise httpx.ConnectError("the API is down")

SyncPrefectClient.read_task_run = down_once

@flow
def part():
    stage()

@task
def stage():
    with stopped_with_flow_run(lambda: "step 7 is saved") as stop:
        while not (change := stop()):
            time.sleep(0.1)
        raise change
"""


@pytest.mark.story
def test_a_part_and_its_whole_survive_a_wrong_crash_but_neither_suspension_nor_deletion(
    prefect: Server, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "part.py").write_text(PART)
    # The task run in a whole that stands for its part.
    whole = create(prefect, "whole")
    task = {"flow_run_id": whole, "task_key": "part", "dynamic_key": "0"}
    task_run = api(prefect.url, "task_runs/", **task)["id"]
    prefect.set_state(whole, "RUNNING", "Running")
    flow = api(prefect.url, "flows/", name="part")["id"]
    asked = {"flow_id": flow, "parent_task_run_id": task_run}
    part = str(api(prefect.url, "flow_runs/", **asked)["id"])
    running = start(part, f"{tmp_path}/part.py:part")
    prefect.wait_for_state(part, "Running")
    prefect.set_state(whole, "CRASHED", "Crashed")
    prefect.wait_for_state(whole, "Running")
    prefect.suspend(whole)
    assert running.wait() == 0, running.output
    state, saved = prefect.state(whole), "Suspended; step 7 is saved"
    assert (state["type"], state["message"].startswith(saved)) == ("PAUSED", True)
    state = prefect.state(part)
    assert (state["type"], saved in state["message"]) == ("CANCELLED", True)

    alone = create(prefect, "part.py:part")
    running = start(alone, f"{tmp_path}/part.py:part")
    prefect.wait_for_state(alone, "Running")
    api(prefect.url, f"flow_runs/{alone}", "DELETE")
    assert running.wait() == 0, running.output
    assert "The flow run was deleted; step 7 is saved; infini resume continues" in running.output
    assert "could not be updated" not in running.output
