"""What a flow run shows in Prefect: names, artifacts, events and failures; and what Retry does.

Each test runs Prefect's engine as a worker does, and queries the server.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGTERM
from typing import Any
from uuid import uuid4

import pytest
from commands import PATIENCE, Environment, Running, api, eventually, tiny, write_texts
from engines import FlowRun, create
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from stopping import Halt, is_pending

from infini_model.training.run_status import saved_step

NO_RETRIES: dict[str, Any] = {"download": {"retries": 0}, "train": {"retries": 0}}


def attempt(run: FlowRun, env: Environment, tmp_path: Path) -> dict[str, Any]:
    """One attempt of a flow run to its end; returns the state that the server knows."""
    running = run.start(env, tmp_path / "engine.log")
    running.wait()
    assert "Traceback" not in running.output
    state: dict[str, Any] = run.read()["state"]
    return state


def keys(run: FlowRun) -> list[str]:
    return sorted(artifact["key"] for artifact in run.artifacts())


def ready_events(run: FlowRun) -> list[dict[str, Any]]:
    """The events that tell of a new dataset of this run, by the documents' folder."""
    wanted = {"event": {"name": ["infini.dataset.ready"]}}
    found = api(run.server, "events/filter", filter=wanted)["events"]
    return [event for event in found if event["payload"]["folder"] in str(run.artifacts())]


def wait_for_events(server: str) -> None:
    """Wait until the server has stored all events that it has got: it does so in order."""
    number = str(uuid4())
    occurred = datetime.now(UTC).isoformat()
    resource = {"prefect.resource.id": f"marker.{number}"}
    event = {"id": number, "event": "marker", "occurred": occurred, "resource": resource}
    with temporary_settings({PREFECT_API_URL: server}), get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event])
    wanted = {"id": {"id": [number]}}
    eventually(lambda: bool(api(server, "events/filter", filter=wanted)["events"]), "the marker")


@pytest.mark.story
def test_a_retry_completes_the_dataset_and_a_run_without_changes_reuses_it(
    server: str, connected: Environment, tmp_path: Path
) -> None:
    """A retry has no memory: it checks everything it reuses on the disk."""
    texts = tmp_path / "texts"
    tree = tiny(texts, tmp_path / "output", stages=NO_RETRIES)
    run = create(server, "flows/preprocess.py:preprocess", advanced=tree)

    state = attempt(run, connected, tmp_path)
    assert state["type"] == "FAILED"
    assert state["message"].startswith("data.source.paths: '")
    assert "\n" not in state["message"]
    assert [line for line in run.logs() if "matches no file" in line] == [state["message"]]
    (failure,) = [shown["data"] for shown in run.artifacts() if shown["key"] == "failure"]
    assert state["message"] in failure

    write_texts(texts, 40)
    run.retry()
    state = attempt(run, connected, tmp_path)
    completed = dict.fromkeys(("download", "plan", "shard"), "Completed")
    eventually(lambda: run.tasks() == completed, lambda: str(run.tasks()))
    (folder,) = (tmp_path / "output" / "datasets").glob("tiny-*")
    assert run.read()["name"] == f"preprocess {folder.name}"
    assert f"dataset:{folder.name}" in run.read()["tags"]
    shown = keys(run)
    assert shown == ["dataset", "dataset-folder", "partitions", "shard-progress"]
    eventually(lambda: bool(ready_events(run)), "the event of the new dataset")
    (event,) = ready_events(run)
    assert event["resource"]["prefect.resource.id"] == f"infini.dataset.{event['payload']['key']}"
    assert event["payload"]["folder"] == str(folder)
    assert event["payload"]["documents"] == 40
    assert event["payload"]["tokens"] > 0

    (shard,) = folder.glob("train/*.arrow")
    content = shard.read_bytes()
    shard.unlink()
    run.retry()
    attempt(run, connected, tmp_path)
    assert shard.read_bytes() == content

    run.retry()
    state = attempt(run, connected, tmp_path)
    eventually(lambda: run.tasks()["shard"] == "Reused", lambda: str(run.tasks()))
    assert state["message"] == f"nothing new: dataset {folder.name} is reused"
    assert state["message"] in run.logs()
    assert keys(run) == shown
    wait_for_events(server)
    assert len(ready_events(run)) == 1


@pytest.mark.story
def test_a_failed_training_reports_the_cause_and_stores_no_pickle(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    training = {"learning_rate": 1e30}
    tree = tiny(text_files, tmp_path / "output", training=training, stages=NO_RETRIES)
    run = create(server, "flows/pipeline.py:pipeline", advanced=tree)
    state = attempt(run, connected, tmp_path)
    assert state["type"] == "FAILED"
    assert state["message"].startswith("training failed: non-finite on rank 0: ")
    assert state["message"].endswith("; the same command resumes")
    assert [line for line in run.logs() if line.startswith("training failed")] == [state["message"]]
    shown = {artifact["key"]: artifact for artifact in run.artifacts()}
    assert state["message"] in shown["failure"]["data"]
    assert "GPU0:ERROR" in shown["failure"]["data"]
    assert run.read()["name"] == "pipeline quickstart-1"
    assert "/output/runs/quickstart-1" in shown["run-folder"]["data"]
    wanted = {"flow_runs": {"id": {"any_": [run.number]}}}

    def messages() -> dict[str, str | None]:
        tasks = api(server, "task_runs/filter", **wanted)
        return {task["name"]: task["state"]["message"] for task in tasks}

    told = {"train quickstart-1": state["message"]}.items()
    eventually(lambda: told <= messages().items(), lambda: str(messages()))
    stored = list((tmp_path / "prefect-home" / "storage").iterdir())
    assert stored
    for file in stored:
        assert "NonFinite" in json.loads(file.read_text())["__exc_type__"]


@pytest.mark.story
def test_a_training_shows_its_newest_steps_and_leaves_all_its_lines_when_it_is_cancelled(
    server: str, connected: Environment, text_files: Path, tmp_path: Path
) -> None:
    tree = tiny(
        text_files,
        tmp_path / "output",
        training={"max_steps": 1_000_000},
        logging={"eval_steps": 20, "logging_steps": 20},
        checkpoint={"save_steps": 1_000_000},
    )
    run = create(server, "flows/pipeline.py:pipeline", advanced=tree)
    running: Running = run.start(connected, tmp_path / "engine.log")

    def table() -> list[dict[str, str]]:
        (data,) = [a["data"] for a in run.artifacts() if a["key"] == "training"] or ["[]"]
        return list(json.loads(data))

    try:
        validated = "a row of the table with a validation loss"
        eventually(lambda: any(row["validation loss"] for row in table()), validated)
        newest = table()[0]
        assert newest.keys() == {"step", "loss", "validation loss", "tokens/s", "ETA"}
        assert newest["step"].endswith(" of 1000000")
        run.set_state("CANCELLING", "Cancelling")
        running.wait()
    finally:
        running.end()
    state = run.read()["state"]
    checkpoints = (tmp_path / "output" / "runs" / "quickstart-1" / "checkpoints").glob("step-*")
    last = max(int(folder.name.removeprefix("step-")) for folder in checkpoints)
    assert (state["type"], state["message"]) == ("CANCELLED", f"Cancelled; step {last} is saved")
    assert any("Checkpoint saved: " in line and f"step-{last}" in line for line in run.logs())


@pytest.mark.story
@pytest.mark.parametrize(
    ("asked", "ended"),
    [("CANCELLING", ("CANCELLED", "Cancelled; ")), ("PAUSED", ("PAUSED", "Suspended; "))],
)
def test_a_sweep_that_is_ended_saves_the_run_that_is_its_part_and_a_retry_resumes_it(
    server: str,
    connected: Environment,
    text_files: Path,
    tmp_path: Path,
    asked: str,
    ended: tuple[str, str],
) -> None:
    tree = tiny(
        text_files,
        tmp_path / "output",
        launch={"hang_timeout_seconds": PATIENCE},
        checkpoint={"save_steps": 100_000},
    )
    halt = Halt(tmp_path / "halt", 5)
    sweep = ["model.memory=linear,none"]
    run = create(server, "flows/compare.py:compare", sweep=sweep, advanced=tree)
    running = run.start(connected | halt.environment, tmp_path / "engine.log")
    run_dir = tmp_path / "output" / "runs" / "quickstart-memory-linear"
    try:
        (rank,) = halt.wait()
        run.set_state(asked, {"CANCELLING": "Cancelling", "PAUSED": "Suspended"}[asked])
        eventually(lambda: is_pending(rank, SIGTERM), "the signal")
        halt.resume()
        running.wait()
    finally:
        running.end()
    state = run.read()["state"]
    step = saved_step(run_dir)
    assert step is not None
    assert 5 <= step < 20
    assert state["type"] == ended[0]
    assert state["message"].startswith(f"{ended[1]}step {step} is saved")
    (part,) = parts(run)
    assert part["state_type"] == "CANCELLED"

    run.retry()
    run.start(connected, tmp_path / "retry.log").wait()
    assert run.read()["state"]["type"] == "COMPLETED"
    states = {each["name"]: [] for each in parts(run)}
    for each in parts(run):
        states[each["name"]].append(each["state_type"])
    assert {name: sorted(found) for name, found in states.items()} == {
        "swept-run quickstart-memory-linear": ["CANCELLED", "COMPLETED"],
        "swept-run quickstart-memory-none": ["COMPLETED"],
    }
    assert {"comparison", "comparison-folder", "loss"} <= {*keys(run)}


def parts(run: FlowRun) -> list[dict[str, Any]]:
    """The flow runs that are parts of a flow run."""
    wanted = {"parent_flow_run_id": {"any_": [run.number]}}
    return list(api(run.server, "flow_runs/filter", flow_runs=wanted))


STORY = """
from prefect import flow
from tasks.failures import concluded
from tasks.flow_run import FLOW

@flow(**FLOW | {"flow_run_name": "story"})
@concluded
def story():
    raise KeyError("an unexpected error")
"""


def test_an_unexpected_error_is_logged_with_its_traceback(
    server: str, connected: Environment, tmp_path: Path
) -> None:
    (tmp_path / "story.py").write_text(STORY)
    run = create(server, f"{tmp_path}/story.py:story")
    run.start(connected, tmp_path / "log").wait()
    (traceback,) = [line for line in run.logs() if "Traceback" in line]
    assert "KeyError: 'an unexpected error'" in traceback
    (failure,) = run.artifacts()
    assert "KeyError: 'an unexpected error'" in failure["data"]
    (file,) = (tmp_path / "prefect-home" / "storage").iterdir()
    assert json.loads(file.read_text())["__exc_type__"] == "builtins.KeyError"
