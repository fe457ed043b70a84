"""Trainings on a real Ray cluster go through lost nodes, stops and killed drivers."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Environment, Running, eventually, infini, run, write_settings
from curves import curve, repeatable, weights
from ray_cluster import RayCluster
from trials import Make, Start

from infini_model.config import load_config
from infini_model.runtime.errors import DeviceError
from infini_model.runtime.on_ray.joining import joined
from infini_model.training.launch.on_ray import gangs

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = "ray::Launcher"
STEPS = 240
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 2},
    "logging": {"logging_steps": 5, "eval_steps": STEPS},
    "checkpoint": {"save_steps": 20},
}

pytestmark = [pytest.mark.story, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(session_environment: Environment) -> Environment:
    """That of the nodes and of the driver."""
    return {**session_environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


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


def begin(start: Start, environment: Environment, command: tuple[str | Path, ...]) -> Running:
    running = start(*command, env=environment)
    running.wait_for("Checkpoint saved: ", seconds=120)
    return running


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
    cluster: RayCluster, settings: Path, start: Start, environment: Environment, tmp_path: Path
) -> None:
    local = infini("train", "--config", settings, "run.name=undisturbed", "launch.processes=2")
    done = run(local, environment, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    running = begin(start, environment, on_ray(cluster, settings, "2"))
    cluster.lose_node_of(LAUNCHER)
    try:
        assert running.wait(240) == 0, running.output
    finally:
        cluster.add_node()
    # Within the one task of the flow.
    assert "retry" not in running.output
    assert running.output.count("with a new gang") == 1
    assert running.output.count("Number of processes: 2, ddp") == 2
    runs = tmp_path / "output" / "runs"
    assert repeatable(runs / "ray") == repeatable(runs / "undisturbed")
    assert weights(runs / "ray") == weights(runs / "undisturbed")


def test_a_gang_of_one_to_three_nodes_goes_on_with_those_that_are_left(
    cluster: RayCluster, settings: Path, start: Start, environment: Environment, tmp_path: Path
) -> None:
    command = on_ray(cluster, settings, "1-3")
    running = begin(start, environment, command)
    running.process.send_signal(signal.SIGINT)
    assert running.wait(120) == 130, running.output
    assert "the same command resumes" in running.output
    eventually(lambda: not cluster.workers(LAUNCHER), "the end of the launchers")

    running = begin(start, environment, command)
    (driver,) = (
        child
        for child in running.tree()
        if "infini_model.training.launch.on_ray" in child.cmdline()
    )
    driver.kill()
    running.wait_for("retry 1 of 2", seconds=60)
    eventually(lambda: running.output.count("Resuming from: ") == 2, "another gang", seconds=120)
    cluster.lose_node_of(LAUNCHER)
    try:
        assert running.wait(240) == 0, running.output
    finally:
        cluster.add_node()
    assert "Number of processes: 2, ddp" in running.output
    # Two windows for each of the three processes that the run began with.
    assert running.output.count("Total batch size: 6 windows") == 3
    losses = curve(tmp_path / "output" / "runs" / "ray", "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))
