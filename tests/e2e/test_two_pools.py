"""A pipeline whose stages run as flow runs of deployments in other work pools."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Environment, Running
from curves import repeatable, weights
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.settings import PREFECT_API_URL, temporary_settings
from serving import ENGINE, Serving, prefect_server
from stopping import Halt
from trials import Make, shards

from flows.serving.deploy import PROJECT, deploy
from infini_model.training.run_status import saved_step

pytestmark = pytest.mark.story
TEMPLATE = PROJECT / "deployments" / "work-pools" / "process.json"
POOLS = {"cpu": ("pipeline", "preprocess"), "gpu": ("train", "evaluate")}


def move_to_pools(url: str) -> None:
    """What `prefect deploy --name NAME --pool POOL -jv working_dir=…` does for each deployment."""
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


@dataclass(frozen=True)
class Pools(Serving):
    """Work pools on a Prefect server; `restart` kills their workers and starts others."""

    restart: Callable[[], None]


@pytest.fixture
def halt(tmp_path: Path) -> Halt:
    """Stops the training once: it would end before it is disturbed."""
    # A checkpoint is saved already: a worker kills what it cancels after 30 seconds.
    return Halt(tmp_path / "halt", 50)


@pytest.fixture
def pools(
    tmp_path: Path,
    with_tables: Callable[[Path], Path],
    alone: Environment,
    halt: Halt,
    background: Callable[..., Running],
) -> Iterator[Pools]:
    output, started = with_tables(tmp_path / "output"), list[Running]()
    paths = os.pathsep.join([halt.environment["PYTHONPATH"], str(PROJECT)])
    home = {"PREFECT_HOME": str(output / "prefect"), "PYTHONPATH": paths}
    home["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with prefect_server(output) as url:
        move_to_pools(url)
        env = {**alone, **home, "PREFECT_API_URL": url, "PREFECT_WORKER_QUERY_SECONDS": "1"}

        def restart() -> None:
            for worker in started:
                worker.end()
            for pool in POOLS:
                command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
                started.append(background(command, env))

        restart()
        yield Pools(url, started[0], output, restart)


def test_stages_in_other_pools_end_with_the_whole_and_with_a_retry_give_the_same_bits(
    undisturbed: Path, pools: Pools, halt: Halt, pipeline: Make
) -> None:
    stages = {"shard": {"deployment": "preprocess"}, "train": {"deployment": "train/train"}}
    tree = pipeline(pools.output, stages=stages)
    # With the settings of `undisturbed`, which no form would take.
    whole = pools.create("pipeline", checked=False, preset=None, advanced=tree)
    run_dir = pools.output / "runs" / "run-1"

    # Cancelling the parent ends the subflow, which saves a checkpoint first.
    halt.wait()
    (training,) = [each["id"] for each in pools.parts(whole) if each["work_pool_name"] == "gpu"]
    pools.cancel(whole)
    halt.resume_told()
    pools.wait_for_state(whole, "Cancelled")
    pools.wait_for_state(training, "Cancelled")
    pools.wait_for_end_of(ENGINE)
    # A worker sets the state again, seconds after an engine has ended, even if it was retried.
    pools.restart()
    assert 20 <= (saved_step(run_dir) or 0) < 70

    # The retry finds the same part, and the part its run folder.
    pools.retry(whole)
    pools.wait_for_state(whole, "Completed")
    assert [path.name for path in run_dir.parent.glob("*-*")] == ["run-1"]
    for made in (shards, repeatable, weights):
        assert made(run_dir) == made(undisturbed)

    preprocess, train = sorted(pools.parts(whole), key=lambda each: each["name"])
    assert (preprocess["work_pool_name"], preprocess["run_count"]) == ("cpu", 1)
    assert (train["id"], train["run_count"]) == (training, 2)
    assert train["name"] == "train run-1"
    assert "training" in pools.artifacts(training)
    assert pools.artifacts(preprocess["id"]).keys() >= {"dataset", "shard-progress"}
    assert "report" in pools.artifacts(whole)


def test_a_training_saves_and_reports_its_end_when_its_worker_is_told_to_end(
    pools: Pools, halt: Halt, pipeline: Make
) -> None:
    flow_run = pools.create("pipeline", checked=False, preset=None, advanced=pipeline(pools.output))
    halt.wait()
    pools.running.process.send_signal(signal.SIGTERM)
    assert pools.running.wait() == 0
    halt.resume_told()
    pools.wait_for_state(flow_run, "Crashed")
    pools.wait_for_end_of(ENGINE)
    assert 50 <= (saved_step(pools.output / "runs" / "run-1") or 0) < 120
