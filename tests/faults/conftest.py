"""The dataset of the trials, the undisturbed trainings, and the summary at the end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import answers, eventually
from harness import DAMAGES, KINDS, Kind, Strike, Trial, every_strike, settings

FILES = ("manifest.json", "state.json", "optimizer.safetensors", "model/model.safetensors")
# A killed agent and stopped processes are in tests/infini_model/training/launch/test_launch.py.
SELECTED = (
    Strike(signal.SIGKILL, "rank 0", None, "one"),
    pytest.param(Strike(signal.SIGKILL, "launcher", 3, "two"), marks=pytest.mark.story),
    pytest.param(Strike(signal.SIGTERM, "rank 1", 2, "two sharded"), marks=pytest.mark.story),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All faults with `--every-fault`, otherwise a selection."""
    every = metafunc.config.getoption("--every-fault")
    if "fault" in metafunc.fixturenames:
        metafunc.parametrize("fault", every_strike() if every else SELECTED, ids=str)
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", list(KINDS) if every else ["one"])
    if "damage" in metafunc.fixturenames:
        metafunc.parametrize("damage", list(DAMAGES) if every else ["truncated"])
        metafunc.parametrize("file", FILES if every else FILES[:1])


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """No GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, dataset: Path, environment: dict[str, str]
) -> Callable[[Kind], tuple[object, object]]:
    """The outcome of an undisturbed training of each kind."""
    known: dict[Kind, tuple[object, object]] = {}

    def outcome(kind: Kind) -> tuple[object, object]:
        if kind not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            trial = Trial(folder, dataset, settings(folder, kind), environment)
            trial.finish()
            known[kind] = trial.outcome()
        return known[kind]

    return outcome


@pytest.fixture
def begin(
    tmp_path: Path, dataset: Path, environment: dict[str, str]
) -> Iterator[Callable[..., Trial]]:
    """Starts trials in folders; all their processes end with the test."""
    begun: list[Trial] = []

    def make(kind: Kind, folder: Path = tmp_path, **sections: dict[str, Any]) -> Trial:
        begun.append(Trial(folder, dataset, settings(folder, kind, **sections), environment))
        return begun[-1]

    yield make
    for trial in begun:
        trial.end()


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Starts MLflow's server at a port, with the same records each time; returns a killer."""
    servers: list[subprocess.Popen[bytes]] = []

    def begin(port: int) -> Callable[[], None]:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        stores = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--workers", "1"]
        with (tmp_path / "mlflow.log").open("ab") as log:
            server = subprocess.Popen(
                [*command, *stores, "--port", str(port)],
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                start_new_session=True,
            )
        servers.append(server)
        url = f"http://127.0.0.1:{port}/health"
        eventually(lambda: answers(url), "MLflow's server")
        return lambda: kill_session(server)

    yield begin
    for server in servers:
        kill_session(server)


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
