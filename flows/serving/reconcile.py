"""Flow runs whose engine has died without a word: they end in the state that is true.

A process that is killed can report nothing, and neither can one whose server is down: its flow run
would be Running for ever, without Retry, and MLflow's run too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
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
from infini_model.runtime.runs import find_run, run_holder
from infini_model.training.callbacks.mlflow_record import Status, end_record, read_mlflow_record


def _runs(client: SyncPrefectClient, *types: StateType, pool: str | None = None) -> list[FlowRun]:
    wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[*types])))
    pools = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])) if pool else None
    return client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=pools)


def _dead(client: SyncPrefectClient, engines: Path) -> Iterator[FlowRun]:
    """Flow runs of this machine that are said to be at work, and are not."""
    for flow_run in _runs(client, StateType.RUNNING, StateType.CANCELLING):
        if is_alive(engines, str(flow_run.id)) is False:
            # Read again: it may have ended in order between the two looks.
            now = client.read_flow_run(flow_run.id)
            if now.state is not None and (now.state.is_running() or now.state.is_cancelling()):
                yield now


def _ended(flow_run: FlowRun) -> tuple[State, Status]:
    """The state of a flow run whose engine is dead, and of its MLflow run."""
    if flow_run.state is not None and flow_run.state.is_cancelling():
        return Cancelled(message="Cancelled; its process had ended already"), "KILLED"
    message = "Its process was killed; Retry continues from the newest checkpoint"
    return Crashed(message=message), "FAILED"


def end_dead_runs(client: SyncPrefectClient, engines: Path, config: Config) -> list[FlowRun]:
    """Set flow runs whose engine is dead to Crashed, or Cancelled where that was asked for.

    Only runs of this machine are known here; those of other machines are found by their heartbeats.
    Returns the runs that were ended.
    """
    ended = []
    for flow_run in _dead(client, engines):
        state, status = _ended(flow_run)
        client.set_flow_run_state(flow_run.id, state, force=True)
        run_dir = find_run(config.run.runs_dir, str(flow_run.id))
        if run_dir is not None:
            end_record(run_dir, status)
        ended.append(flow_run)
    return ended


def end_dead_records(runs_dir: Path) -> None:
    """Have MLflow show FAILED for runs that it shows as RUNNING and in which nothing works.

    Prefect's worker says itself that an engine was killed, and knows nothing of MLflow.
    """
    for path in runs_dir.glob("*/logs/mlflow.json"):
        run_dir = path.parents[1]
        if run_dir.is_symlink() or read_mlflow_record(run_dir).get("status") != "RUNNING":
            continue
        if run_holder(run_dir) is None and holder_of(run_dir / "checkpoints" / ".lock") is None:
            end_record(run_dir, "FAILED")


def keep_suspended_runs(client: SyncPrefectClient, engines: Path) -> None:
    """Lift the time limit of runs that are suspended and whose engine has ended.

    The page suspends for five minutes by default, after which Prefect would fail the run. A stage
    that is suspended lifts it itself; between two stages nobody else does.
    """
    for flow_run in _runs(client, StateType.PAUSED):
        state = flow_run.state
        if state is None or state.state_details.pause_timeout is None:
            continue
        if is_alive(engines, str(flow_run.id)) is False:
            suspended: State = Suspended(message=state.message)
            client.set_flow_run_state(flow_run.id, suspended, force=True)


def reschedule_lost_runs(client: SyncPrefectClient, engines: Path) -> list[FlowRun]:
    """Schedule again what a worker took and never started; call it before there is a worker."""
    lost = [
        flow_run
        for flow_run in _runs(client, StateType.PENDING, pool=WORK_POOL)
        if not is_alive(engines, str(flow_run.id))
    ]
    for flow_run in lost:
        client.set_flow_run_state(flow_run.id, Scheduled(), force=True)
    return lost
