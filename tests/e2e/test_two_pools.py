"""Flow runs in work pools with a worker each: preprocess in one, train in the other."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import WHOLE, Environment, Running, api, eventually
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from serving import ENGINE, Serving, prefect_server
from stopping import Halt
from trials import Make

from flows.serving.deploy import PROJECT, deploy
from infini_model.runtime.runs import read_run
from infini_model.training.run_status import saved_step

pytestmark = pytest.mark.story
TEMPLATE = PROJECT / "deployments" / "work-pools" / "process.json"
POOLS = {"gpu": ("train", "pipeline"), "cpu": ("preprocess",)}
TRAIN = "infini: train on every new dataset"


def move_to_pools(url: str) -> None:
    """Do as `prefect deploy --name NAME --pool POOL -jv working_dir=…` for each deployment.

    Then as `prefect automation resume`.
    """
    deploy(url)
    template = json.loads(TEMPLATE.read_text())
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        for pool, names in POOLS.items():
            made = WorkPoolCreate(name=pool, type="process", base_job_template=template)
            client.create_work_pool(made)
            for name in names:
                moved = DeploymentUpdate(
                    work_pool_name=pool,
                    work_queue_name="default",
                    job_variables={"working_dir": str(PROJECT)},
                )
                found = client.read_deployment_by_name(f"{name}/{name}")
                client.update_deployment(found.id, moved)
        (automation,) = client.read_automations_by_name(TRAIN)
        client.resume_automation(automation.id)


@pytest.fixture
def halt(tmp_path: Path) -> Halt:
    """Stops a training once: it would end before it is disturbed."""
    # A checkpoint is saved already: a worker kills what it cancels after 30 seconds.
    return Halt(tmp_path / "halt", 50)


@pytest.fixture
def pools(
    tmp_path: Path,
    with_tables: Callable[[Path], Path],
    alone: Environment,
    halt: Halt,
    background: Callable[..., Running],
) -> Iterator[Serving]:
    """A Prefect server with a worker for each pool; `running` is that of gpu."""
    output = with_tables(tmp_path / "output")
    paths = os.pathsep.join([halt.environment["PYTHONPATH"], str(PROJECT)])
    home = {"PREFECT_HOME": str(output / "prefect"), "PYTHONPATH": paths}
    home["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with prefect_server(output) as url:
        move_to_pools(url)
        env = {**alone, **home, "PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool"]
        workers = {pool: background([*worker, pool], env) for pool in POOLS}
        yield Serving(url, workers["gpu"], output)


def test_a_new_dataset_of_one_pool_is_trained_on_in_the_other(
    pools: Serving, pipeline: Make
) -> None:
    tree = pipeline(pools.output, training={"max_steps": 10, "warmup_steps": 2})
    train = pools.deployment("train")["id"]
    asked = {"preset": "debug", "advanced": tree}
    api(pools.url, f"deployments/{train}", "PATCH", parameters=asked)
    preprocess = pools.create("preprocess", **asked)
    pools.wait_for_state(preprocess, "Completed")
    found: list[dict[str, Any]] = []

    def is_started() -> bool:
        of_train = {"id": {"any_": [train]}}
        found[:] = api(pools.url, "flow_runs/filter", deployments=of_train)
        return bool(found)

    eventually(is_started, "a training on the new dataset", WHOLE)
    (training,) = (each["id"] for each in found)
    pools.wait_for_state(training, "Completed")

    (dataset,) = (pools.output / "datasets").glob("tiny-*")
    assert found[0]["parameters"] == {**asked, "dataset": str(dataset)}
    assert read_run(pools.output / "runs" / "debug-1").dataset == dataset
    assert pools.read(preprocess)["work_pool_name"] == "cpu"
    assert pools.read(training)["work_pool_name"] == "gpu"


def test_a_training_saves_and_reports_its_end_when_its_worker_is_told_to_end(
    pools: Serving, halt: Halt, pipeline: Make
) -> None:
    flow_run = pools.create("pipeline", preset="debug", advanced=pipeline(pools.output))
    halt.wait()
    pools.running.process.send_signal(signal.SIGTERM)
    assert pools.running.wait() == 0
    halt.resume_told()
    pools.wait_for_state(flow_run, "Crashed")
    pools.wait_for_end_of(ENGINE)
    assert 50 <= (saved_step(pools.output / "runs" / "debug-1") or 0) < 120
