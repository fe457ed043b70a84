"""Shared fixtures: a Prefect server, environments and a corpus for tests of the command line.

Prefect and S3 are imported by the fixtures that use them: `pytest -m cuda` must run on a GPU
machine that has only what the library needs.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings
from shared import WORDS, once

from infini_model.config import validate
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources

if TYPE_CHECKING:
    from commands import Environment, Running
    from s3_server import S3Server

# One thread, here and in every process that a test starts: sums are then bit-identical, and workers
# that share the cores do not wait for each other's threads.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# How long an example takes to run, or to draw, depends on what else the machine does. An example
# that is one in thousands must not turn up in a run that is about something else.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
WithTables = Callable[[Path], Path]
# Triton's interpreter runs kernels on the CPU, and with them every test that is for a GPU.
REHEARSAL = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not REHEARSAL
GPU = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
QUIET = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def pytest_configure() -> None:
    """Do not pass on ignored signals: a shell ignores SIGINT in the background, nohup SIGHUP."""
    for number, handler in {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with stories first.

    Otherwise one worker would still be busy with such a file when the others are done.
    """
    long = {item.path for item in items if item.get_closest_marker("story")}
    items.sort(key=lambda item: item.path not in long)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m cuda`, import only files with such tests: others need what a GPU machine lacks."""
    if config.option.markexpr != "cuda" or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "mark.cuda" in text or "each_device" in text else True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none, except in a rehearsal."""
    if item.get_closest_marker("cuda") and not (HAS_GPU or REHEARSAL):
        pytest.skip("needs a GPU; TRITON_INTERPRET=1 rehearses it on the CPU")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def each_device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU or, in a rehearsal, the CPU again."""
    return GPU if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The GPU, or the CPU in a rehearsal, for tests that are marked `cuda`."""
    return GPU


def _make_tables(output: Path) -> None:
    from serving import prefect_server

    with prefect_server(output):
        pass


@pytest.fixture(scope="session")
def with_tables(tmp_path_factory: pytest.TempPathFactory) -> WithTables:
    """Copies Prefect's database tables into an output folder.

    Creating them takes the server ten seconds, once per output folder.
    """
    made = once(tmp_path_factory, "tables", _make_tables)

    def make(output: Path) -> Path:
        shutil.copytree(made / "prefect", output / "prefect")
        return output

    return make


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, with_tables: WithTables) -> Iterator[str]:
    """The API of a Prefect server shared by all tests of a worker."""
    from serving import prefect_server

    with prefect_server(with_tables(tmp_path_factory.mktemp("server"))) as url:
        yield url


@pytest.fixture(scope="session")
def session_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment of a user who has configured no server and no GPU."""
    own = ("PREFECT_", "INFINI_", "MLFLOW_", "TRITON_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    return {**inherited, **QUIET, "PREFECT_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The output folder of a test, which is not there yet."""
    return tmp_path / "output"


@pytest.fixture
def alone(tmp_path: Path, session_environment: Environment) -> Environment:
    """The same, with the test's folder as home."""
    return {**session_environment, "PREFECT_HOME": str(tmp_path / "prefect-home")}


@pytest.fixture
def connected(alone: Environment, server: str) -> Environment:
    """The environment of a user whose Prefect server is the shared one."""
    return {**alone, "PREFECT_API_URL": server}


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Callable[[Sequence[str], Environment], Running]]:
    """Starts a command in the background; what is left of it at the end of the test is killed."""
    from commands import Running

    started: list[Running] = []

    def begin(command: Sequence[str], env: Environment) -> Running:
        started.append(Running(command, tmp_path / f"log-{len(started)}", env))
        return started[-1]

    yield begin
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 small text files."""
    from commands import write_texts

    return write_texts(tmp_path_factory.mktemp("texts"), 40)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dataset folder: 60 documents of various lengths, tokenised as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(7)
    for number in range(60):
        words = chance.choices(WORDS, k=chance.randrange(20, 160))
        (folder / f"{number}.txt").write_text(f"{number}. " + " ".join(words))
    data = {
        "source": {"paths": [str(folder / "*.txt")]},
        "splits": {"train": 0.7, "validation": 0.2, "test": 0.1},
        "workers": 1,
    }
    config = validate({"data": data})
    output = tmp_path_factory.mktemp("output")
    manifest = build_dataset(list_sources(config.data, output), config.data, output / "datasets")
    return output / "datasets" / manifest.folder_name


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server shared by all tests of a worker."""
    from s3_server import S3Server

    with closing(S3Server()) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a new bucket, which this process can reach."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{s3.make_bucket()}"
