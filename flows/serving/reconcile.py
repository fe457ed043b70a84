"""Correction of the states of flow runs whose engine died without reporting it.

A killed process cannot report its end, nor can one whose server is down: its flow run would stay
Running forever, without Retry, and so would MLflow's run.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Cancelled, Crashed, Scheduled, Suspended

from flows.serving.deploy import WORK_POOL
from flows.serving.engine import is_alive
from infini_model.config import Config
from infini_model.runtime.holders import holder_of
from infini_model.runtime.runs import CHECKPOINTS, find_run, run_holder
from infini_model.training.callbacks.callback import Status
from infini_model.training.callbacks.mlflow_record import end_record, read_mlflow_record

# What Prefect's worker says of every run that it cancelled.
WORKER_MESSAGE = "Flow run was cancelled successfully."
# It kills the engine's parent after 30 seconds at the latest.
RECENTLY = timedelta(minutes=5)


def _runs(
    client: SyncPrefectClient,
    *types: StateType,
    pool: str | None = None,
    ended_after: datetime | None = None,
) -> list[FlowRun]:
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*types])),
        end_time=None if ended_after is None else FlowRunFilterEndTime(after_=ended_after),
    )
    pools = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])) if pool else None
    return client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=pools)


def _dead_runs(client: SyncPrefectClient, engines: Path) -> Iterator[FlowRun]:
    """Flow runs of this machine that are recorded as running but have no engine."""
    for flow_run in _runs(client, StateType.RUNNING, StateType.CANCELLING):
        if is_alive(engines, str(flow_run.id)) is False:
            # Read again: it may have ended normally in the meantime.
            now = client.read_flow_run(flow_run.id)
            if now.state is not None and (now.state.is_running() or now.state.is_cancelling()):
                yield now


def _final_states(flow_run: FlowRun) -> tuple[State, Status]:
    """The final states of a flow run whose engine is dead, and of its MLflow run."""
    if flow_run.state is not None and flow_run.state.is_cancelling():
        return Cancelled(message="Cancelled; its process had already ended"), "KILLED"
    message = "Its process was killed; Retry resumes from the newest checkpoint"
    return Crashed(message=message), "FAILED"


def end_dead_runs(client: SyncPrefectClient, engines: Path, config: Config) -> list[FlowRun]:
    """Set flow runs whose engine is dead to Crashed, or to Cancelled if that was requested.

    Covers the runs of this machine only; heartbeats reveal dead runs of other machines. Returns the
    runs that were changed.
    """
    ended = []
    for flow_run in _dead_runs(client, engines):
        state, status = _final_states(flow_run)
        client.set_flow_run_state(flow_run.id, state, force=True)
        run_dir = find_run(config.run.runs_dir, str(flow_run.id))
        if run_dir is not None:
            end_record(run_dir, status)
        ended.append(flow_run)
    return ended


def end_dead_records(runs_dir: Path) -> None:
    """Set MLflow runs to FAILED that are RUNNING although no process holds their run folder.

    Prefect's worker reports a killed engine to Prefect, but not to MLflow.
    """
    for path in runs_dir.glob("*/logs/mlflow.json"):
        run_dir = path.parents[1]
        if run_dir.is_symlink() or read_mlflow_record(run_dir).get("status") != "RUNNING":
            continue
        if run_holder(run_dir) is None and holder_of(run_dir / CHECKPOINTS / ".lock") is None:
            end_record(run_dir, "FAILED")


def keep_suspended_runs(client: SyncPrefectClient, engines: Path) -> None:
    """Remove the timeout of suspended runs whose engine has ended.

    The UI suspends for five minutes by default, after which Prefect would fail the run. A suspended
    stage removes the timeout itself; this covers runs that are suspended between two stages.
    """
    for flow_run in _runs(client, StateType.PAUSED):
        state = flow_run.state
        if state is None or state.state_details.pause_timeout is None:
            continue
        if is_alive(engines, str(flow_run.id)) is False:
            suspended: State = Suspended(message=state.message)
            client.set_flow_run_state(flow_run.id, suspended, force=True)


def restore_cancellation_messages(client: SyncPrefectClient, engines: Path) -> None:
    """Let cancelled flow runs say what was saved, as their engines did.

    The worker sets the state once more, seconds after the engine has set it and ended.
    """
    since = datetime.now(UTC) - RECENTLY
    for flow_run in _runs(client, StateType.CANCELLED, ended_after=since):
        state = flow_run.state
        if state is None or state.message != WORKER_MESSAGE:
            continue
        if is_alive(engines, str(flow_run.id)) is not False:
            continue
        message = _engine_message(client.read_flow_run_states(flow_run.id))
        if message is not None:
            client.set_flow_run_state(flow_run.id, Cancelled(message=message), force=True)


def _engine_message(states: list[State]) -> str | None:
    """What the engine said when it was last cancelled; None if it was killed before."""
    message = None
    for state in sorted(states, key=lambda state: state.timestamp):
        if not state.is_cancelled():
            message = None
        elif state.message != WORKER_MESSAGE:
            message = state.message
    return message


def reschedule_lost_runs(client: SyncPrefectClient, engines: Path) -> list[FlowRun]:
    """Reschedule runs that a worker took and never started; call it before a worker starts."""
    lost = [
        flow_run
        for flow_run in _runs(client, StateType.PENDING, pool=WORK_POOL)
        if not is_alive(engines, str(flow_run.id))
    ]
    for flow_run in lost:
        client.set_flow_run_state(flow_run.id, Scheduled(), force=True)
    return lost
