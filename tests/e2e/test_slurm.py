"""slurm.sh on a real Slurm: trainings go through a preemption and the loss of a node."""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import PATIENCE, Environment, dataset_of, infini, succeed, write_settings
from curves import curve, repeatable, weights
from slurm_cluster import Cluster, slurm_cluster
from stopping import Halt
from trials import Make

SCRIPT = Path(__file__).resolve().parents[2] / "deployments" / "work-pools" / "slurm.sh"
STEPS = 200
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 2},
    "launch": {"hang_timeout_seconds": PATIENCE},
    "logging": {"logging_steps": 5, "eval_steps": STEPS},
    "checkpoint": {"save_steps": 50},
}
# The nodes have one CPU and no GPU each.
OPTIONS = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=20")

pytestmark = pytest.mark.story


@pytest.fixture
def cluster(connected: Environment) -> Iterator[Cluster]:
    """A cluster that submits from a checkout, with its virtual environment."""
    # The path of a socket has at most 107 characters, and slurmd makes a long one.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name:
        folder = Path(name)
        (folder / ".venv").symlink_to(sys.prefix)
        with slurm_cluster(folder, connected) as started:
            yield started


@pytest.fixture
def settings(pipeline: Make, tmp_path: Path) -> Path:
    """Settings of a training whose dataset is ready."""
    path = write_settings(tmp_path / "settings.yaml", pipeline(tmp_path / "output", **SETTINGS))
    dataset_of(path)
    return path


def test_a_preempted_job_changes_no_bit(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    train = ("train", "--config", settings)
    undisturbed = tmp_path / "output" / "runs" / "undisturbed"
    succeed(infini(*train, "run.name=undisturbed", "launch.processes=2"), cluster.env)

    halt = Halt(tmp_path / "halt", 10)
    train = (*train, "run.name=slurm")
    job = cluster.submit("--nodes=2", *OPTIONS, SCRIPT, *train, **halt.environment)
    halt.wait(2)
    # Slurm continues what it ends.
    first = cluster.submit("--partition=high", "--nodes=3", "--wrap", "true")
    cluster.wait_for(first, "COMPLETED")
    cluster.wait_for(job, "COMPLETED")
    assert cluster.field(job, "Restarts") == "1"
    run_dir = tmp_path / "output" / "runs" / "slurm"
    preempted, *_ = cluster.output(job).partition("Resuming from: ")
    *_, saved = re.findall(rf"Checkpoint saved: {run_dir}/checkpoints/step-(\d+)", preempted)
    *_, last = re.findall(r"Step \[(\d+)/", preempted)
    assert int(last) - 5 <= int(saved) < STEPS
    assert f"Resuming from: {run_dir}/checkpoints/step-{saved}" in cluster.output(job)
    assert repeatable(run_dir) == repeatable(undisturbed)
    assert weights(run_dir) == weights(undisturbed)


def test_a_job_goes_on_with_the_nodes_that_are_left(
    cluster: Cluster, settings: Path, tmp_path: Path
) -> None:
    halt = Halt(tmp_path / "halt", 105)
    train = ("train", "--config", settings, "run.name=slurm")
    job = cluster.submit("--nodes=2-4", *OPTIONS, SCRIPT, *train, **halt.environment)
    halt.wait(3)
    cluster.wait_for_output(job, "Number of processes: 3, ddp")
    cluster.lose("n1")
    cluster.wait_for_output(job, "Number of processes: 2, ddp")
    cluster.wait_for(job, "COMPLETED")
    assert "Resuming from: " in cluster.output(job)
    # Two windows for each of the three processes that the run began with.
    assert cluster.output(job).count("Total batch size: 6 windows") == 2
    losses = curve(tmp_path / "output" / "runs" / "slurm", "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))
