"""Ending a stage whose flow run was suspended, cancelled or otherwise changed from outside.

Prefect notifies an engine of a suspension only between tasks, and of a cancellation only through
the worker that started it. But training is one task of many hours, and outlives its worker. The
state of the flow run is therefore polled while a stage's child process runs: once it is no longer
Running, or deleted, the child gets its grace period, in which it saves a checkpoint, and the engine
exits.
Of a parent and its subflow, which share an engine, either one ends both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.context import TaskRunContext
from prefect.exceptions import Abort, ObjectNotFound, Pause, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Running, Suspended

from infini_model.runtime.processes import deferred_signals
from tasks.artifacts import find, warn_on_error
from tasks.failures import FIRST, KEY
from tasks.flow_run import current_flow_run, retried_flow_run

POLL_SECONDS = 2.0

DELETED: State = Cancelled(name="Deleted")

Stop = Callable[[], Exception | None]


class StateChangedError(Exception):
    """`flow_run` is no longer Running; `state` is its new state."""

    def __init__(self, flow_run: FlowRun, state: State) -> None:
        super().__init__(f"the flow run is {state.name}")
        self.flow_run, self.state = flow_run, state


class _Watch(threading.Thread):
    """Reads the states of some flow runs until one is no longer Running.

    Those are the flow run of a stage and its parent. While the API is down, nothing has changed.
    """

    def __init__(self, flow_run: FlowRun) -> None:
        super().__init__(name="flow run state", daemon=True)
        # A parent before its subflow.
        self.flow_runs = [flow_run]
        # The parent is looked up once the API answers. A flow run of a deployment that a flow of
        # somebody else's has started has an engine of its own, and no parent here.
        self._parent_task = None if flow_run.deployment_id else flow_run.parent_task_run_id
        self._closed = threading.Event()
        self.found: StateChangedError | None = None

    def run(self) -> None:
        with get_client(sync_client=True) as client:
            while self.found is None and not self._closed.wait(POLL_SECONDS):
                with contextlib.suppress(Exception):
                    self.found = self._change(client)

    def close(self) -> None:
        """Stop reading; a hanging request stays in its daemon thread."""
        self._closed.set()

    def change(self) -> StateChangedError | None:
        """The first flow run that is no longer Running; None as well if the API does not answer."""
        with contextlib.suppress(Exception), get_client(sync_client=True) as client:
            return self._change(client)
        return None

    def _change(self, client: SyncPrefectClient) -> StateChangedError | None:
        if self._parent_task is not None:
            self._find_parent(client, self._parent_task)
        for flow_run in self.flow_runs:
            try:
                state = client.read_flow_run(flow_run.id).state
            except ObjectNotFound:
                if client.api_healthcheck() is not None:
                    raise  # what stands before a server that is down may answer that, too
                state = DELETED
            if state is None or state.is_running():
                continue
            if state.is_crashed():
                # Wrongly declared dead, such as by an automation after a server outage.
                client.set_flow_run_state(flow_run.id, Running(), force=True)
                continue
            return StateChangedError(flow_run, state)
        return None

    def _find_parent(self, client: SyncPrefectClient, parent_task: UUID) -> None:
        with contextlib.suppress(ObjectNotFound):  # deleted, or the answer of a proxy
            parent = client.read_task_run(parent_task).flow_run_id
            if parent is not None:
                self.flow_runs.insert(0, client.read_flow_run(parent))
            self._parent_task = None


@contextlib.contextmanager
def stopped_with_flow_run(saved: Callable[[], str] = lambda: "") -> Iterator[Stop]:
    """Yield a `stop` for `processes.run` and `launch` that follows the state of the flow run.

    When the state has changed, the block ends with Prefect's `Pause` or `Abort`, on which the
    engine exits without setting another state. `saved` returns what was saved by then, such as
    "step 120 is saved". A SIGTERM during a cancellation, which is how a worker ends its engines, is
    handled in the same way; any other one is re-raised.
    """
    current = current_flow_run()
    if current is None:
        yield lambda: None
        return
    watch = _Watch(current)
    watch.start()
    try:
        yield lambda: watch.found
    except StateChangedError as change:
        raise _conclude(watch.flow_runs, change, saved()) from None
    except TerminationSignal:
        if (found := watch.change()) is None:
            raise
        raise _conclude(watch.flow_runs, found, saved()) from None
    finally:
        watch.close()


def _conclude(flow_runs: list[FlowRun], change: StateChangedError, saved: str) -> BaseException:
    """Record the end in the states of flow runs and task run; returns the signal to raise."""
    log = get_run_logger()
    flow_run, state = change.flow_run, change.state
    try:
        # The worker's SIGTERM may come only now; the engine is about to exit in any case.
        with deferred_signals() as received, get_client(sync_client=True) as client:
            state = _final_state(client, flow_run, saved) or state
            task_run = TaskRunContext.get()
            is_there = state.name != DELETED.name
            if task_run is not None and is_there and (state.is_paused() or state.is_final()):
                client.set_task_run_state(task_run.task_run.id, like(state), force=True)
            for other in flow_runs:
                if other.id != flow_run.id:
                    # Only a parent can be resumed; it begins its subflow anew.
                    ended: State = Cancelled(message=f"With {flow_run.name}: {state.message}")
                    end(client, other, ended)
            received.clear()
    except Exception as error:  # noqa: BLE001 - everything is saved; the state is corrected from outside
        log.warning("The state of the flow run could not be updated: %s", error)
    log.info("%s", state.message or f"The flow run is {state.name}")
    if state.is_paused():
        return Pause(state=state)
    signal = Abort(f"the flow run is {state.name}")
    signal.state = state  # type: ignore[attr-defined] # the engine reads it from either signal
    return signal


def _final_state(client: SyncPrefectClient, flow_run: FlowRun, saved: str) -> State | None:
    """Set the flow run to Suspended, without a timeout, or to Cancelled, as requested.

    Returns its resulting state. It may have been resumed meanwhile; the next engine then already
    waits for this one to end. Of one that was deleted only the folder of its run is left.
    """
    try:
        now = client.read_flow_run(flow_run.id).state
    except ObjectNotFound:
        left = ["The flow run was deleted", saved, "infini resume continues from there"]
        return DELETED.model_copy(update={"message": "; ".join(filter(None, left))})
    if now is None:
        return None
    if now.is_paused():
        resume = "Resume" if flow_run.deployment_id else "infini resume"
        after = "continues from there" if saved else "runs the stage again"
        message = "; ".join(filter(None, ["Suspended", saved, f"{resume} {after}"]))
        # The UI suspends for five minutes by default, after which Prefect would fail the run.
        now = client.set_flow_run_state(flow_run.id, Suspended(message=message), force=True).state
    # The worker does not wait longer than 30 seconds for what is being saved.
    elif now.is_cancelling() or now.is_cancelled():
        message = "; ".join(filter(None, ["Cancelled", saved]))
        now = client.set_flow_run_state(flow_run.id, Cancelled(message=message), force=True).state
    return now


def end(
    client: SyncPrefectClient, flow_run: FlowRun, state: State, explanation: str | None = None
) -> None:
    """Set a flow run to a final state, with those of its tasks that have none.

    Its artifact `failure` becomes `explanation`, Markdown, or goes. The flow run's own state is set
    last: who is interrupted begins again. Raises what Prefect's client raises.
    """
    _end_attempt(client, flow_run, state)
    if explanation is not None:
        failure = ArtifactCreate(key=KEY, type="markdown", data=explanation)
        failure.description, failure.flow_run_id = f"{FIRST}: {state.message}", flow_run.id
        client.create_artifact(failure)
    client.set_flow_run_state(flow_run.id, state, force=True)


def end_earlier_attempt() -> None:
    """End what earlier engines of the current flow run have left: its tasks, and its `failure`."""
    current = retried_flow_run()
    if current is None:
        return
    with warn_on_error("end of the earlier attempt"), get_client(sync_client=True) as client:
        _end_attempt(client, current, Cancelled(message="A later attempt takes its place"))


def _end_attempt(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> None:
    end_tasks(client, flow_run, state)
    if earlier := find(client, flow_run.id, KEY):
        client.delete_artifact(earlier)


def end_tasks(client: SyncPrefectClient, flow_run: FlowRun, state: State) -> None:
    """Set the task runs of a flow run that have no final state to one like `state`.

    One that stands for a subflow has the state of that.
    """
    kinds = {"type": {"any_": list(set(StateType) - TERMINAL_STATES)}}
    for task_run in client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run.id]}}),
        task_run_filter=TaskRunFilter.model_validate(
            {"state": kinds, "subflow_runs": {"exists_": False}}
        ),
    ):
        client.set_task_run_state(task_run.id, like(state), force=True)


def like(state: State) -> State:
    return State(type=state.type, name=state.name, message=state.message)
