"""slurm.sh on a real Slurm: trainings go through preemptions and lost nodes."""

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import PATIENCE, Environment, infini, run, write_settings
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
def settings(cluster: Cluster, pipeline: Make, tmp_path: Path) -> Path:
    """Settings of a training whose dataset is ready."""
    path = write_settings(tmp_path / "settings.yaml", pipeline(tmp_path / "output", **SETTINGS))
    done = run(infini("preprocess", "--config", path), cluster.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.fixture
def halt_at(tmp_path: Path) -> Callable[[int], Halt]:
    """Halt the ranks that start from now on at a step, and no longer at the one given before."""

    def halt_at(step: int) -> Halt:
        shutil.rmtree(tmp_path / "halt", ignore_errors=True)
        return Halt(tmp_path / "halt", step)

    return halt_at


def steps_of(output: str) -> list[int]:
    """The steps that a job has reported."""
    return [int(step) for step in re.findall(r"Step \[(\d+)/", output)]


def test_a_preempted_job_and_a_lost_node_change_no_bit(
    cluster: Cluster, settings: Path, halt_at: Callable[[int], Halt], tmp_path: Path
) -> None:
    train = ("train", "--config", settings)
    undisturbed = tmp_path / "output" / "runs" / "undisturbed"
    done = run(infini(*train, "run.name=undisturbed", "launch.processes=2"), cluster.env)
    assert done.returncode == 0, done.stdout + done.stderr

    halt = halt_at(10)
    job = cluster.submit(
        "--nodes=2", *OPTIONS, SCRIPT, *train, "run.name=slurm", **halt.environment
    )
    halt.wait(2)
    # Slurm continues what it ends; the job that follows halts later than any step of this one.
    halt = halt_at(STEPS - 50)
    first = cluster.submit("--partition=high", "--nodes=3", "--wrap", "true")
    cluster.wait_for(first, "COMPLETED")
    assert cluster.field(job, "Restarts") == "1"
    cluster.wait_for_output(job, "Resuming from: ")
    preempted, *_ = cluster.output(job).partition("Resuming from: ")
    run_dir = tmp_path / "output" / "runs" / "slurm"
    *_, saved = re.findall(rf"Checkpoint saved: {run_dir}/checkpoints/step-(\d+)", preempted)
    assert max(steps_of(preempted)) - 5 <= int(saved) < STEPS - 50
    cluster.wait_for_output(job, f"Resuming from: {run_dir}/checkpoints/step-{saved}")
    halt.wait(2)
    _, lost = cluster.nodes(job)
    cluster.lose(lost)
    cluster.wait_for(job, "COMPLETED")
    assert lost not in cluster.nodes(job)
    assert cluster.field(job, "Restarts") == "2"
    assert repeatable(run_dir) == repeatable(undisturbed)
    assert weights(run_dir) == weights(undisturbed)


def test_a_job_of_two_to_four_nodes_goes_on_with_those_that_are_left(
    cluster: Cluster, settings: Path, halt_at: Callable[[int], Halt], tmp_path: Path
) -> None:
    halt = halt_at(105)
    train = ("train", "--config", settings, "run.name=slurm")
    job = cluster.submit("--nodes=2-4", *OPTIONS, SCRIPT, *train, **halt.environment)
    halt.wait(3)
    assert "Number of processes: 3, ddp" in cluster.output(job)
    cluster.lose("n1")
    cluster.wait_for_output(job, "Number of processes: 2, ddp")
    cluster.wait_for(job, "COMPLETED")
    assert "Resuming from: " in cluster.output(job)
    # Two windows for each of the three processes that the run began with.
    assert cluster.output(job).count("Total batch size: 6 windows") == 2
    losses = curve(tmp_path / "output" / "runs" / "slurm", "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))
