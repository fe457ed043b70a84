"""Partitions and trainings on a real Ray cluster: the same bits, whatever is killed meanwhile."""

import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PATIENCE,
    Environment,
    Running,
    alive,
    dataset_of,
    eventually,
    flow_run,
    infini,
    stage,
    succeed,
    tiny,
    words_of,
    write_settings,
    write_texts,
)
from curves import curve, repeatable, weights
from ray_cluster import RayCluster
from s3_server import S3Server
from serving import Server
from stopping import Halt
from trials import Make, Start

from infini_model.config import load_config
from infini_model.data.downloads import download_shards
from infini_model.runtime.errors import DeviceError
from infini_model.runtime.ray import connect
from infini_model.training.launch import ray as on_nodes

pytestmark = pytest.mark.story
ROOT = Path(__file__).resolve().parents[2]
LOST = "its worker was lost"
LAUNCHER = "ray::NodeLauncher"
PARTITIONS = 18  # that the sources fall into, by their hashes
STEPS = 120
SETTINGS = {
    "training": {"max_steps": STEPS, "batch_size": 2},
    "launch": {"hang_timeout_seconds": PATIENCE},
    "logging": {"logging_steps": 5, "eval_steps": STEPS},
    "checkpoint": {"save_steps": 10},
}
HaltAt = Callable[[int], Halt]
Begin = Callable[[Path], Running]
# Python reads it at its start: a cluster that is slow must not have fewer nodes tried at once.
PATIENT = """
if sys.orig_argv[1:3] == ["-m", "infini_model.training.launch.ray"]:
    from infini_model.training.launch import ray
    ray.RESERVE_SECONDS = 60
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all ranks look for what halts them."""
    return tmp_path_factory.mktemp("site") / "halt"


@pytest.fixture(scope="module")
def environment(
    s3: S3Server, session_environment: Environment, server: str, site: Path
) -> Environment:
    """That of the nodes and of their driver: credentials come from nowhere else."""
    own = {"PREFECT_API_URL": server, "PYTHONPATH": f"{site}:{ROOT}"}
    return {**session_environment, **s3.environment(), **own}


@pytest.fixture(scope="module")
def cluster(environment: Environment) -> Iterator[RayCluster]:
    made = RayCluster(3, environment)
    environment["RAY_ADDRESS"] = made.address
    yield made
    made.end()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("sources"), 60, words=30_000)


def settings_of(
    folder: Path, sources: Path, *, stages: dict[str, Any] | None = None, **data: Any
) -> Path:
    """A configuration whose datasets are in `folder`."""
    tree = tiny(sources, folder, stages=stages or {})
    tokenizer = {"spec": "train", "vocab_size": 300}
    tree["data"] |= {"partition_megabytes": 1, "tokenizer": tokenizer, **data}
    folder.mkdir(parents=True, exist_ok=True)
    return write_settings(folder / "settings.yaml", tree)


def on_ray(folder: Path, sources: Path, **data: Any) -> Path:
    return settings_of(folder, sources, engine="ray", **data)


def shards(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.arrow")}


def finished(folder: Path) -> set[str]:
    # Not those that a killed worker was writing, `.tmp-…`.
    found = folder.glob("datasets/.partitions/[0-9a-f]*/partition.json")
    return {path.parent.name for path in found}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> dict[str, bytes]:
    """The shards that the local engine makes."""
    folder = tmp_path_factory.mktemp("local")
    dataset_of(settings_of(folder, sources))
    made = shards(folder)
    assert len(finished(folder)) == PARTITIONS
    return made


@pytest.fixture
def begin(background: Callable[..., Running], environment: Environment) -> Begin:
    def start(settings: Path) -> Running:
        listing = stage("download", settings)["listing"]
        words = ("shard", "--config", str(settings), "--listing", listing)
        return background([sys.executable, "-m", "infini_model", *words], environment)

    return start


def test_a_flow_on_nodes_that_share_only_a_store_makes_the_bytes_of_the_local_engine(
    cluster: RayCluster,
    sources: Path,
    expected: dict[str, bytes],
    bucket: str,
    environment: Environment,
    server: str,
    tmp_path: Path,
) -> None:
    settings = on_ray(tmp_path / "output", sources)
    command = infini("preprocess", "--config", settings, f"run.data_dir={bucket}/data")
    done = succeed(command, {**environment, "INFINI_CACHE_DIR": str(tmp_path / "cache")})
    output = done.stdout + done.stderr
    assert f"making {PARTITIONS} partitions on the Ray cluster at {cluster.address}" in output
    shown = Server(server).artifacts(flow_run(server, output)["id"])
    assert shown["shard-progress"] == 100.0
    (folder,) = (tmp_path / "cache").glob("*/tiny-*")
    download_shards(folder)
    found = {f"datasets/{folder.name}/{name}": each for name, each in shards(folder).items()}
    assert found
    assert found == {name: each for name, each in expected.items() if folder.name in name}


def test_a_killed_worker_and_a_killed_node_cost_their_partitions_alone(
    cluster: RayCluster, sources: Path, expected: dict[str, bytes], begin: Begin, tmp_path: Path
) -> None:
    with cluster.held():
        running = begin(on_ray(tmp_path, sources))
        cluster.kill_worker()
        running.wait_for(LOST)
        cluster.kill_node()
    try:
        assert running.wait() == 0, running.output
    finally:
        cluster.add_node()
    assert shards(tmp_path) == expected
    # A node has one CPU, so that it makes one partition at a time.
    assert running.output.count(LOST) == 2
    assert "making it again" in running.output


def test_what_the_user_can_mend_ends_the_job_in_one_line(
    cluster: RayCluster, sources: Path, environment: Environment, tmp_path: Path
) -> None:
    shutil.copytree(sources, tmp_path / "texts")
    settings = on_ray(tmp_path / "output", tmp_path / "texts", tokenizer={})
    listing = stage("download", settings)["listing"]
    # Tasks are under way when one of them fails.
    (tmp_path / "texts" / "0030.txt").unlink()
    report = stage("shard", settings, "--listing", listing, env=environment)
    assert report["kind"] == "user"
    assert "0030.txt: does not exist (on " in report["error"]
    eventually(lambda: cluster.workers() == [], "the end of all tasks")
    large = on_ray(tmp_path / "large", tmp_path / "texts", tokenizer={}, ray_cpus=2)
    listing = stage("download", large)["listing"]
    report = stage("shard", large, "--listing", listing, env=environment)
    assert report["error"].startswith(f"data.ray_cpus: no node of {cluster.address}")


def test_sigterm_ends_the_tasks_and_the_same_command_goes_on(
    cluster: RayCluster, sources: Path, expected: dict[str, bytes], begin: Begin, tmp_path: Path
) -> None:
    settings = on_ray(tmp_path, sources)
    with cluster.held():
        running = begin(settings)
        cluster.wait_until_held()
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() != 0
        eventually(lambda: cluster.workers() == [], "the end of all tasks")
    standing = finished(tmp_path)
    assert 0 < len(standing) < PARTITIONS
    again = begin(settings)
    assert again.wait() == 0, again.output
    assert (
        f"{PARTITIONS - len(standing)} partitions to make, {len(standing)} present" in again.output
    )
    assert shards(tmp_path) == expected


def test_another_version_of_the_package_or_of_ray_is_refused(
    cluster: RayCluster,
    sources: Path,
    environment: Environment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ray adds the working directory to the path of its workers.
    monkeypatch.chdir(tmp_path)
    settings = on_ray(tmp_path / "output", sources)
    listing = stage("download", settings)["listing"]
    other = tmp_path / "other"
    # Whatever else runs may be writing there.
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "infini_model", other / "infini_model", ignore=compiled)
    with (other / "infini_model" / "data" / "threads.py").open("a") as file:
        file.write("# Another version.\n")
    words = ("shard", settings, "--listing", listing)
    report = stage(*words, env={**environment, "PYTHONPATH": str(other)})
    assert "infini_model: is not the infini_model that started the job" in report["error"]
    (other / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.9.9'\n")
    report = stage(*words, env={**environment, "PYTHONPATH": f"{other}:{ROOT}"})
    python = ".".join(map(str, sys.version_info[:3]))
    assert report["error"].endswith(f" was started with: Ray: 2.9.9 Python: {python}")


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
def settings(pipeline: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a training whose dataset is ready; its output folder is beside them."""
    folder = tmp_path_factory.mktemp("training")
    path = write_settings(folder / "settings.yaml", pipeline(folder / "output", **SETTINGS))
    dataset_of(path)
    return path


def training_on(settings: Path, nodes: str) -> tuple[str | Path, ...]:
    where = ("launch.launcher=ray", f"launch.nodes={nodes}")
    return ("train", "--config", settings, f"run.name=on-{nodes}", *where)


def test_what_the_cluster_cannot_give_is_one_line(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_nodes, "PATIENCE_SECONDS", 0.0)
    state = tmp_path / "checkpoints" / "step-20" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"global_batch": 8, "config": {"training": {}}}')
    where = f"the Ray cluster at {cluster.address}"
    batch = "all processes must divide the global batch of 8 windows"
    refusals = {
        "nodes=5-6": f"nodes: got 5-6: {where} has 3 with 1 CPU each; {batch}",
        "gpus=all": f"gpus: got 'all': no node of {where} has a GPU",
        "nodes=3": f"nodes: got 3: {where} has 3 with 1 CPU each; {batch}",
    }
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with connect("launch.launcher"):
        for setting, refusal in refusals.items():
            config = load_config(overrides=["launch.launcher=ray", f"launch.{setting}"])
            folders = tmp_path, tmp_path
            with pytest.raises(DeviceError) as refused:
                on_nodes.RayLauncher(config, *folders, cluster.address, lambda: False).train()
            assert str(refused.value) == f"launch.{refusal}"


def test_a_lost_node_changes_no_bit(
    cluster: RayCluster, settings: Path, start: Start, environment: Environment, halt_at: HaltAt
) -> None:
    local = infini("train", "--config", settings, "run.name=undisturbed", "launch.processes=2")
    succeed(local, environment)
    halt = halt_at(45)
    running = start(*training_on(settings, "2"), env=environment)
    halt.wait(2)
    cluster.lose_node_of(LAUNCHER)
    try:
        assert running.wait() == 0, running.output
    finally:
        cluster.add_node()
    # Within the one task of the flow.
    assert "retry 1 of" not in running.output
    assert "with a new gang" in running.output
    assert running.output.count("Number of processes: 2, ddp") == 2
    runs = settings.parent / "output" / "runs"
    assert repeatable(runs / "on-2") == repeatable(runs / "undisturbed")
    assert weights(runs / "on-2") == weights(runs / "undisturbed")


def test_a_gang_of_one_to_three_nodes_goes_on_with_those_that_are_left(
    cluster: RayCluster, settings: Path, start: Start, environment: Environment, halt_at: HaltAt
) -> None:
    command = training_on(settings, "1-3")
    halt = halt_at(25)
    running = start(*command, env=environment)
    halt.wait(3)
    running.process.send_signal(signal.SIGINT)
    halt.resume_told()
    assert running.wait() == 130, running.output
    assert "the same command resumes" in running.output
    eventually(lambda: not cluster.workers(LAUNCHER), "the end of the launchers")

    halt = halt_at(55)
    running = start(*command, env=environment)
    halt.wait(3)
    halt = halt_at(85)
    name = "infini_model.training.launch.ray"
    (driver,) = (child for child in running.tree() if name in words_of(child))
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
    losses = curve(settings.parent / "output" / "runs" / "on-1-3", "train/loss")
    assert list(losses) == list(range(1, STEPS + 1))


def test_a_dead_head_is_an_error_of_the_stage(
    cluster: RayCluster, sources: Path, environment: Environment, start: Start, tmp_path: Path
) -> None:
    """The last test of the cluster."""
    settings = on_ray(tmp_path, sources, stages={"retries": 0})
    with cluster.held():
        running = start("preprocess", "--config", settings, env=environment)
        workers = cluster.wait_until_held()
        cluster.kill_head()
        assert running.wait() == 1
        eventually(lambda: alive(workers) == [], "the end of all tasks")
    assert running.output.splitlines()[-1].startswith("error: shard ended with status 1: ")
    assert "Traceback" not in running.output
    assert 0 < len(finished(tmp_path)) < PARTITIONS
