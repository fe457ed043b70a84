"""The end of a flow run that its engine does not report: it was killed, or another finished it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed

from infini_model.runtime.runs import is_finished, read_record
from tasks.artifacts import warn_on_error
from tasks.failures import FIRST, KEY
from tasks.flow_run import current_owner


def end(
    client: SyncPrefectClient, flow_run: FlowRun, state: State, explanation: str | None = None
) -> None:
    """Set a flow run to a final state, with those of its tasks that have none.

    Its artifact `failure` becomes `explanation`, Markdown, or goes. The flow run's own state is set
    last: who is interrupted begins again. Raises what Prefect's client raises.
    """
    end_tasks(client, flow_run, state)
    earlier = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]), key=ArtifactFilterKey(any_=[KEY])
    )
    for artifact in client.read_artifacts(artifact_filter=earlier):
        client.delete_artifact(artifact.id)
    if explanation is not None:
        failure = ArtifactCreate(key=KEY, type="markdown", data=explanation)
        failure.description, failure.flow_run_id = f"{FIRST}: {state.message}", flow_run.id
        client.create_artifact(failure)
    client.set_flow_run_state(flow_run.id, state, force=True)


def end_tasks(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> None:
    """Set the task runs of a flow run that have no final state to one like `state`."""
    of_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    kinds = TaskRunFilterStateType(any_=[*(set(StateType) - TERMINAL_STATES)])
    unfinished = TaskRunFilter(state=TaskRunFilterState(type=kinds))
    for task_run in client.read_task_runs(flow_run_filter=of_run, task_run_filter=unfinished):
        client.set_task_run_state(task_run.id, like(state), force=True)


def like(state: State) -> State:
    """The same state for a task run."""
    return State(type=state.type, name=state.name, message=state.message)


def end_predecessors(run_dir: Path, outcome: str) -> None:
    """Complete the flow runs that had a run folder before, once the current one did their work.

    Otherwise one that was suspended, or failed, would wait for someone to resume it for ever.
    """
    owner = current_owner()
    former = read_record(run_dir).get("former_owners", [])
    if owner.id is None or not former:
        return
    with warn_on_error("end of earlier flow runs"), get_client(sync_client=True) as client:
        current = client.read_flow_run(UUID(owner.id))
        done: State = Completed(message=f"{outcome}; finished by flow run {current.name}")
        for number in former:
            with contextlib.suppress(ObjectNotFound):  # deleted, or of another server
                earlier = client.read_flow_run(UUID(number))
                # A training alone is all of the work of another one, but not of a pipeline.
                is_done = is_finished(run_dir) or earlier.flow_id == current.flow_id
                if is_done and (earlier.state is None or not earlier.state.is_completed()):
                    end(client, earlier, done)
