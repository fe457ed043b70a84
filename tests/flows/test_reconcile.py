"""Flow runs whose engine is dead, on a real server; locked files stand for the engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Paused, Pending, Running, Suspended

from flows.serving.reconcile import end_dead_runs, keep_suspended_runs
from infini_model.config import Config, load_config
from infini_model.runtime.storage import lock


@flow
def story() -> None:
    """Never run."""


@pytest.fixture
def client(server: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(overrides=[f"run.output_dir={tmp_path}"])


def begin(client: SyncPrefectClient, state: State) -> str:
    """A flow run in a state; the id."""
    created = client.create_flow_run(story, state=Pending())
    client.set_flow_run_state(created.id, Running(), force=True)
    client.set_flow_run_state(created.id, state, force=True)
    return str(created.id)


def test_dead_runs_get_their_true_state_and_other_runs_are_left_alone(
    client: SyncPrefectClient, config: Config, tmp_path: Path
) -> None:
    running, alive, elsewhere = (begin(client, Running()) for _ in range(3))
    cancelling, paused = begin(client, Cancelling()), begin(client, Paused())
    for number in (running, cancelling, paused):
        (tmp_path / f"{number}.lock").touch()
    with lock(tmp_path / f"{alive}.lock"):
        ended = {str(each.id) for each in end_dead_runs(client, tmp_path, config)}
        assert end_dead_runs(client, tmp_path, config) == []
    assert ended == {running, cancelling}
    states = {
        number: client.read_flow_run(number).state
        for number in (running, alive, elsewhere, cancelling, paused)
    }
    assert [state.name for state in states.values()] == [
        *("Crashed", "Running", "Running", "Cancelled", "Paused")
    ]
    assert "Retry resumes from the newest checkpoint" in states[running].message


def test_a_suspended_run_whose_engine_has_ended_waits_without_a_limit(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    # Far beyond the end of this test: Prefect fails a run whose limit has passed.
    ended, alive = (begin(client, Suspended(timeout_seconds=86_400)) for _ in range(2))
    (tmp_path / f"{ended}.lock").touch()
    with lock(tmp_path / f"{alive}.lock"):
        keep_suspended_runs(client, tmp_path)
    limits = {
        number: client.read_flow_run(number).state.state_details.pause_timeout
        for number in (ended, alive)
    }
    assert limits[ended] is None
    assert limits[alive] is not None
