"""A pipeline whose stages run as flow runs of deployments in other work pools."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Environment, Running, api, eventually
from curves import repeatable, weights
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from serving import ENGINE, TRAINER, Serving, prefect_server
from stopping import Halt, is_pending
from trials import Make, Undisturbed, shards

from flows.serving.deploy import PROJECT, deploy, job_template
from infini_model.training.run_status import saved_step

pytestmark = pytest.mark.story
POOLS = {"cpu": ("pipeline", "preprocess"), "gpu": ("train", "evaluate")}


def move_to_pools(url: str) -> None:
    """What `prefect deploy --name NAME --pool POOL` does for each deployment."""
    deploy(url)
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as client:
        for pool, names in POOLS.items():
            template = job_template()
            client.create_work_pool(
                WorkPoolCreate(name=pool, type="process", base_job_template=template)
            )
            for name in names:
                moved = DeploymentUpdate(work_pool_name=pool, work_queue_name="default")
                found = client.read_deployment_by_name(f"{name}/{name}")
                client.update_deployment(found.id, moved)


@dataclass(frozen=True)
class Pools(Serving):
    """Work pools on a Prefect server; `restart` kills their workers and starts others."""

    restart: Callable[[], None]


@pytest.fixture
def halt(tmp_path: Path) -> Halt:
    """Stops the training twice: it would end before it is disturbed."""
    return Halt(tmp_path / "halt", 10, 60)


@pytest.fixture
def pools(
    tmp_path: Path, with_tables: Callable[[Path], Path], alone: Environment, halt: Halt
) -> Iterator[Pools]:
    """A Prefect server, two work pools, and a worker for each."""
    output, started = with_tables(tmp_path / "output"), list[Running]()
    paths = os.pathsep.join([halt.environment["PYTHONPATH"], str(PROJECT)])
    home = {"PREFECT_HOME": str(output / "prefect"), "PYTHONPATH": paths}
    with prefect_server(output) as url:
        move_to_pools(url)
        env = {**alone, **home, "PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "1"}

        def end() -> None:
            for worker in started:
                worker.end()

        def restart() -> None:
            end()
            for pool in POOLS:
                command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
                started.append(Running(command, tmp_path / f"worker-{pool}", env))

        try:
            restart()
            yield Pools(started[0], output, url, restart)
        finally:
            end()


def create_without_preset(pools: Serving, advanced: dict[str, Any]) -> str:
    """Run the pipeline with the settings of `undisturbed`, which no form would take."""
    deployment = api(pools.url, "deployments/name/pipeline/pipeline", "GET")["id"]
    path = f"deployments/{deployment}/create_flow_run"
    parameters = {"preset": None, "advanced": advanced}
    created = api(pools.url, path, parameters=parameters, enforce_parameter_schema=False)
    return str(created["id"])


def engine_of(pools: Serving, flow_run: str) -> psutil.Process:
    """The engine of a flow run."""
    found: list[psutil.Process] = []

    def is_single() -> bool:
        found.clear()
        for process in pools.processes(ENGINE):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_its = process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run
                found.extend([process] if is_its else [])
        return len(found) == 1

    eventually(is_single, "one engine")
    return found[0]


def parts(pools: Serving, flow_run: str) -> dict[str, dict]:
    """The flow runs that are parts of a flow run, by the name of their deployment."""
    wanted = {"parent_flow_run_id": {"any_": [flow_run]}}
    found = api(pools.url, "flow_runs/filter", flow_runs=wanted)
    by_flow = {each["name"].split()[0]: each for each in found}
    assert len(by_flow) == len(found), [each["name"] for each in found]
    return by_flow


def test_stages_in_other_pools_survive_a_cancelled_whole_and_a_killed_part_and_give_the_same_bits(
    undisturbed: Undisturbed, pools: Pools, halt: Halt, pipeline: Make
) -> None:
    stages = {"shard": {"deployment": "preprocess"}, "train": {"deployment": "train/train"}}
    whole = create_without_preset(pools, pipeline(pools.output, stages=stages))
    run_dir = pools.output / "runs" / "run-1"

    # Cancelling the whole ends the part, which saves a checkpoint first.
    (trainer,) = halt.wait()
    training = parts(pools, whole)["train"]["id"]
    pools.cancel(whole)
    eventually(lambda: is_pending(trainer, signal.SIGTERM), "SIGTERM")
    halt.resume()
    pools.wait_for_state(whole, "Cancelled")
    pools.wait_for_state(training, "Cancelled")
    eventually(lambda: pools.processes(ENGINE) == [], "the end of all engines")
    # A worker sets the state again, seconds after an engine has ended, even if it was retried.
    pools.restart()
    step = saved_step(run_dir)
    assert step is not None
    assert 10 <= step < 60

    # A part whose engine is killed ends the whole with one line, and leaves the checkpoint.
    pools.retry(whole)
    halt.wait()
    engine_of(pools, training).kill()
    state = pools.wait_for_state(whole, "Failed")
    assert state["message"].startswith("stages.train.deployment: flow run train run-1 (http")
    assert " is Crashed: " in state["message"]
    assert "\n" not in state["message"]
    eventually(lambda: pools.processes(TRAINER) == [], "the end of the training")
    pools.restart()

    # The next retry finds the same part, and the part its run folder.
    pools.retry(whole)
    pools.wait_for_state(whole, "Completed")
    assert [path.name for path in (pools.output / "runs").glob("*-*")] == ["run-1"]
    assert shards(pools.output) == shards(undisturbed.output)
    assert repeatable(run_dir) == repeatable(undisturbed.run_dir)
    assert weights(run_dir) == weights(undisturbed.run_dir)
    assert (run_dir / "report.md").is_file()

    found = parts(pools, whole)
    assert found.keys() == {"preprocess", "train"}
    assert found["train"]["id"] == training
    assert found["train"]["work_pool_name"] == "gpu"
    assert found["preprocess"]["run_count"] == 1
    assert found["train"]["run_count"] == 3
    assert "training" in keys(pools, training)
    assert keys(pools, found["preprocess"]["id"]) >= {"dataset", "shard-progress"}
    assert "report" in keys(pools, whole)


def keys(pools: Serving, flow_run: str) -> set[str]:
    """The artifacts of a flow run."""
    wanted = {"flow_run_id": {"any_": [flow_run]}}
    return {each["key"] for each in api(pools.url, "artifacts/filter", artifacts=wanted)}
