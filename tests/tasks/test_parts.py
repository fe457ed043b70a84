"""A stage that is a flow run of a deployment: how it is found, and whom it follows."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from commands import Environment, Running, api, eventually
from engines import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from infini_model.runtime.errors import ConfigError
from tasks.elsewhere import find_deployment

KEY = "stages.train.deployment"


def make_deployment(server: str, flow: str, name: str) -> str:
    """A deployment, without a work pool."""
    flow_id = api(server, "flows/", name=flow)["id"]
    return str(api(server, "deployments/", name=name, flow_id=flow_id)["id"])


@pytest.mark.parametrize("asked", ["gpu-1", "train/gpu-1"])
def test_a_deployment_is_found_by_its_name_with_and_without_the_flow(
    server: str, asked: str
) -> None:
    expected = make_deployment(server, "train", "gpu-1")
    make_deployment(server, "preprocess", "gpu-1")
    with temporary_settings({PREFECT_API_URL: server}):
        assert str(find_deployment(KEY, asked, "train")) == expected


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ("cpu-2", "cpu-2 is a deployment of the flow preprocess, not train"),
        ("preprocess/cpu-2", "preprocess/cpu-2 is a deployment of the flow preprocess, not train"),
        ("train/cpu-2", "there is no deployment train/cpu-2 on {server}"),
        ("other/cpu-2", "there is no deployment other/cpu-2 on {server}"),
        ("none-2", "there is no deployment train/none-2 on {server}"),
    ],
)
def test_a_deployment_that_does_not_fit_is_refused_in_one_line(
    server: str, asked: str, refusal: str
) -> None:
    make_deployment(server, "preprocess", "cpu-2")
    with temporary_settings({PREFECT_API_URL: server}), pytest.raises(ConfigError) as caught:
        find_deployment(KEY, asked, "train")
    assert str(caught.value) == f"{KEY}: {refusal.format(server=server)}"


# It prints each state of a flow run that it reads.
PART = """
import time
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient
from tasks.control import stopped_with_flow_run

read = SyncPrefectClient.read_flow_run

def read_and_tell(client, number):
    found = read(client, number)
    print(found.id, "is", found.state.type.value, flush=True)
    return found

SyncPrefectClient.read_flow_run = read_and_tell

@flow
def part():
    with stopped_with_flow_run(lambda: "step 7 is saved") as stop:
        while not (change := stop()):
            time.sleep(0.1)
        raise change
"""


def make_whole(server: str) -> tuple[FlowRun, str]:
    """A flow run without an engine, and the task run in it that stands for its part."""
    flow_id = api(server, "flows/", name="whole")["id"]
    whole = FlowRun(server, "", api(server, "flow_runs/", flow_id=flow_id)["id"])
    task: dict[str, Any] = {"flow_run_id": whole.number, "task_key": "part", "dynamic_key": "0"}
    return whole, str(api(server, "task_runs/", **task)["id"])


@pytest.mark.story
@pytest.mark.parametrize("asked", [("CANCELLING", "Cancelling"), ("PAUSED", "Suspended")])
def test_a_part_survives_a_crash_of_the_whole_and_ends_when_someone_ends_the_whole(
    server: str, connected: Environment, tmp_path: Path, asked: tuple[str, str]
) -> None:
    (tmp_path / "part.py").write_text(PART)
    whole, task_run = make_whole(server)
    whole.set_state("RUNNING", "Running")
    deployment = make_deployment(server, "part", str(uuid4()))
    created = api(server, f"deployments/{deployment}/create_flow_run", parent_task_run_id=task_run)
    part = FlowRun(server, f"{tmp_path}/part.py:part", created["id"])
    running: Running = part.start(connected, tmp_path / "log")
    try:
        is_running = "the part to run"
        eventually(lambda: part.read()["state_type"] == "RUNNING", is_running)
        whole.set_state("CRASHED", "Crashed")
        crash = f"{whole.number} is CRASHED"
        # Having read it once, the part would end instead of reading it again.
        eventually(
            lambda: running.process.poll() is not None or running.output.count(crash) >= 2,
            lambda: running.output,
        )
        assert running.process.poll() is None, running.output
        assert part.read()["state_type"] == "RUNNING"
        whole.set_state(*asked)
        assert running.wait() == 0, running.output
    finally:
        running.end()
    state = part.read()["state"]
    assert (state["type"], state["message"]) == ("CANCELLED", "Cancelled; step 7 is saved")
    assert whole.read()["state_type"] == asked[0]
