"""Trainings on a real Ray cluster go through lost nodes, stops and killed drivers."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import PATIENCE, Environment, eventually, infini, run, write_settings
from curves import curve, repeatable, weights
from ray_cluster import RayCluster
from stopping import Halt, is_pending
from trials import Make, Start

from infini_model.config import load_config
from infini_model.runtime.errors import DeviceError
from infini_model.runtime.on_ray.joining import joined
from infini_model.training.launch.on_ray import gangs

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "ray::Launcher"
STEPS = 120
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 2},
    "launch": {"hang_timeout_seconds": PATIENCE},
    "logging": {"logging_steps": 5, "eval_steps": STEPS},
    "checkpoint": {"save_steps": 10},
}
HaltAt = Callable[[int], Halt]
# Python reads it at its start: a cluster that is slow must not have fewer nodes tried at once.
PATIENT = """
if sys.orig_argv[1:3] == ["-m", "infini_model.training.launch.on_ray"]:
    from infini_model.training.launch.on_ray import gangs
    gangs.RESERVE_SECONDS = 60
"""

pytestmark = pytest.mark.story


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all ranks look for what halts them."""
    return tmp_path_factory.mktemp("site") / "halt"


@pytest.fixture(scope="module")
def environment(session_environment: Environment, site: Path) -> Environment:
    """That of the nodes and of the driver."""
    paths = f"{site}:{ROOT}"
    return {**session_environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def halt_at(site: Path) -> Iterator[HaltAt]:
    """Halt the ranks that start from now on at a step, and no longer at the one given before."""

    def halt_at(step: int) -> Halt:
        shutil.rmtree(site, ignore_errors=True)
        halt = Halt(site, step)
        with (site / "sitecustomize.py").open("a") as file:
            file.write(PATIENT)
        return halt

    yield halt_at
    shutil.rmtree(site, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(environment: Environment) -> Iterator[RayCluster]:
    """Three nodes of one CPU each, and the head."""
    made = RayCluster(3, environment)
    yield made
    made.end()


@pytest.fixture
def settings(pipeline: Make, tmp_path: Path, environment: Environment) -> Path:
    """Settings of a training whose dataset is ready."""
    path = write_settings(tmp_path / "settings.yaml", pipeline(tmp_path / "output", **SETTINGS))
    done = run(infini("preprocess", "--config", path), environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def on_ray(cluster: RayCluster, settings: Path, nodes: str) -> tuple[str | Path, ...]:
    where = (f"launch.ray_address={cluster.address}", f"launch.nodes={nodes}")
    return ("train", "--config", settings, "run.name=ray", "launch.launcher=ray", *where)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nodes": "5-6"}, "launch.nodes: got 5-6: the Ray cluster at {} has 3 with 1 CPU each"),
        ({"gpus": "all"}, "launch.gpus: got 'all': no node of the Ray cluster at {} has a GPU"),
        (
            {"nodes": "3"},
            "launch.nodes: got 3: the Ray cluster at {} has 3 with 1 CPU each; 3 x 1 "
            "processes cannot split the global batch of 8 windows",
        ),
    ],
)
def test_what_the_cluster_cannot_give_is_one_line(
    cluster: RayCluster,
    asked: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gangs, "PATIENCE_SECONDS", 0.0)
    state = tmp_path / "checkpoints" / "step-20" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"global_batch": 8}')
    config = load_config(overrides=[{"launch": {"launcher": "ray", **asked}}])
    with joined(cluster.address, "launch"), pytest.raises(DeviceError) as refused:
        gangs.Gangs(config, tmp_path, tmp_path, cluster.address, lambda: False).train()
    assert str(refused.value) == message.format(cluster.address)


def test_a_lost_node_changes_no_bit(
    cluster: RayCluster,
    settings: Path,
    start: Start,
    environment: Environment,
    halt_at: HaltAt,
    tmp_path: Path,
) -> None:
    local = infini("train", "--config", settings, "run.name=undisturbed", "launch.processes=2")
    done = run(local, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    halt = halt_at(45)
    running = start(*on_ray(cluster, settings, "2"), env=environment)
    halt.wait(2)
    cluster.lose_node_of(LAUNCHER)
    try:
        assert running.wait() == 0, running.output
    finally:
        cluster.add_node()
    # Within the one task of the flow.
    assert "retry 1 of" not in running.output
    assert running.output.count("with a new gang") == 1
    assert running.output.count("Number of processes: 2, ddp") == 2
    runs = tmp_path / "output" / "runs"
    assert repeatable(runs / "ray") == repeatable(runs / "undisturbed")
    assert weights(runs / "ray") == weights(runs / "undisturbed")


def test_a_gang_of_one_to_three_nodes_goes_on_with_those_that_are_left(
    cluster: RayCluster,
    settings: Path,
    start: Start,
    environment: Environment,
    halt_at: HaltAt,
    tmp_path: Path,
) -> None:
    command = on_ray(cluster, settings, "1-3")
    halt = halt_at(25)
    running = start(*command, env=environment)
    ranks = halt.wait(3)
    running.process.send_signal(signal.SIGINT)
    eventually(
        lambda: all(is_pending(rank, signal.SIGTERM) for rank in ranks), "the signal at all ranks"
    )
    halt.resume()
    assert running.wait() == 130, running.output
    assert "the same command resumes" in running.output
    eventually(lambda: not cluster.workers(LAUNCHER), "the end of the launchers")

    halt = halt_at(55)
    running = start(*command, env=environment)
    halt.wait(3)
    halt = halt_at(85)
    (driver,) = (
        child
        for child in running.tree()
        if "infini_model.training.launch.on_ray" in child.cmdline()
    )
    driver.kill()
    running.wait_for("retry 1 of 2")
    halt.wait(3)
    cluster.lose_node_of(LAUNCHER)
    try:
        assert running.wait() == 0, running.output
    finally:
        cluster.add_node()
    assert "Number of processes: 2, ddp" in running.output
    # Two windows for each of the three processes that the run began with.
    assert running.output.count("Total batch size: 6 windows") == 3
    losses = curve(tmp_path / "output" / "runs" / "ray", "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))
