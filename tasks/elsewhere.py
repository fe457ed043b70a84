"""A stage as a flow run of a deployment, which a worker of its work pool starts.

It is a subflow of the current flow run, and Prefect's UI shows each on the page of the other. It is
started once: whoever retries or resumes the parent finds it by its idempotency key, follows it if
it still runs, and retries it, as the same flow run, if it has ended without success. What it
made it names in its tags, which every machine can read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentFlowRunCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
)
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.states import AwaitingRetry, Cancelling, Scheduled, to_state_create
from prefect.tasks import Task
from prefect.utilities.urls import url_for

from infini_model.runtime.errors import ConfigError, StageError
from infini_model.runtime.processes import deferred_signals
from tasks.control import POLL_SECONDS, Stop, stopped_with_flow_run

# A training saves a checkpoint first, which takes up to a minute.
END_SECONDS = 90.0
# How often a crash is read before it counts: a flow run that was wrongly declared dead says so.
CRASHED_READS = 4


def find_deployment(key: str, name: str, flow: str) -> UUID:
    """The id of a deployment of `flow`, NAME or FLOW/NAME, on the current server.

    Raises `ConfigError` in one line that begins with `key`, which named it.
    """
    given, _, own_name = name.rpartition("/")
    wanted = given or flow
    with get_client(sync_client=True) as client:
        named = DeploymentFilter(name=DeploymentFilterName(any_=[own_name]))
        found = {
            client.read_flow(each.flow_id).name: each.id
            for each in client.read_deployments(deployment_filter=named)
        }
        server = str(client.api_url).rstrip("/")
    if wanted == flow and flow in found:
        return found[flow]
    if others := [each for each in found if given in ("", each)]:
        raise ConfigError(f"{key}: {name} is a deployment of the flow {others[0]}, not {flow}")
    raise ConfigError(f"{key}: there is no deployment {wanted}/{own_name} on {server}")


def describe(flow_run: FlowRun) -> str:
    """A flow run and the address of its page, for messages."""
    return f"flow run {flow_run.name} ({url_for('flow-run', obj_id=flow_run.id) or flow_run.id})"


@dataclass(frozen=True)
class Outcome:
    """A completed flow run; `is_new` unless an earlier attempt of the parent found it completed."""

    flow_run: FlowRun
    is_new: bool


@dataclass(frozen=True)
class Elsewhere:
    """A stage of the current flow run that is a flow run of a deployment.

    Attributes:
        key: The setting that names the deployment, for messages.
        name: The name of the flow run until its engine renames it.
        deployment: The deployment's id.
        identity: What tells it from the other stages of all flow runs.
    """

    key: str
    name: str
    deployment: UUID
    identity: str

    def known(self) -> FlowRun | None:
        """The flow run that was started for this stage, if there is one."""
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[self.identity]))
        with get_client(sync_client=True) as client:
            return next(iter(client.read_flow_runs(flow_run_filter=wanted, limit=1)), None)

    def run(self, parameters: Mapping[str, Any], *, again: bool = False) -> Outcome:
        """Run the stage to its end; with `again`, even if an earlier attempt has completed it.

        Ends it when the current flow run is suspended or cancelled, and with a command that is
        interrupted, since the next one could not find it.

        Raises `StageError` if the flow run does not complete.
        """
        with (
            stopped_with_flow_run(self._end) as stop,
            self._ended_with_command(),
            get_client(sync_client=True) as client,
        ):
            flow_run = self.known()
            if flow_run is None:
                flow_run = self._start(client, parameters)
            elif _state(flow_run).is_completed() and not again:
                return Outcome(flow_run, is_new=False)
            else:
                _start_again(client, flow_run)
            return Outcome(self._follow(client, flow_run, stop), is_new=True)

    def _start(self, client: SyncPrefectClient, parameters: Mapping[str, Any]) -> FlowRun:
        """Create the flow run, as Prefect's `run_deployment` does.

        The parameters are those of settings that have been checked. The schema of a deployment is
        that of a form, in which the preset cannot be left out.
        """
        created = DeploymentFlowRunCreate(
            name=self.name,
            parameters=dict(parameters),
            enforce_parameter_schema=False,
            state=to_state_create(Scheduled()),
            idempotency_key=self.identity,
            parent_task_run_id=self._task_run(client),
        )
        answer = client.request(
            "POST",
            "/deployments/{id}/create_flow_run",
            path_params={"id": self.deployment},
            json=created.model_dump(mode="json", exclude_unset=True),
        )
        return FlowRun.model_validate(answer.json())

    def _task_run(self, client: SyncPrefectClient) -> UUID | None:
        """The task run that stands for the stage in the current flow run."""
        context = FlowRunContext.get()
        if context is None or context.flow_run is None:
            return None
        stage: Task[[], None] = Task(fn=lambda: None, name=self.key)
        found = client.create_task_run(stage, context.flow_run.id, dynamic_key=self.identity)
        return found.id

    def _follow(self, client: SyncPrefectClient, flow_run: FlowRun, stop: Stop) -> FlowRun:
        """Wait for the end of a flow run; log what it does. An API that is down is waited for."""
        log, shown, crashed = get_run_logger(), None, 0
        log.info("%s: waiting for %s", self.key, describe(flow_run))
        while True:
            if change := stop():
                raise change
            now = self._read(client, flow_run)
            if now is not None:
                state = _state(now)
                if state.name != shown:
                    shown = state.name
                    log.info("%s: flow run %s: %s", self.key, now.name, shown)
                if state.is_completed():
                    return now
                crashed = crashed + 1 if state.is_crashed() else 0
                if state.is_final() and crashed in (0, CRASHED_READS):
                    raise self._failure(now, state)
            time.sleep(POLL_SECONDS)

    def _read(self, client: SyncPrefectClient, flow_run: FlowRun) -> FlowRun | None:
        try:
            return client.read_flow_run(flow_run.id)
        except ObjectNotFound as error:
            raise StageError(f"{self.key}: {describe(flow_run)} was deleted") from error
        except httpx.HTTPError:
            return None

    def _failure(self, flow_run: FlowRun, state: State) -> StageError:
        why = " ".join((state.message or "").split())
        return StageError(f"{self.key}: {describe(flow_run)} is {state.name}: {why}")

    @contextlib.contextmanager
    def _ended_with_command(self) -> Iterator[None]:
        """End the subflow with a command in a terminal; a flow run of a deployment is retried."""
        try:
            yield
        except (KeyboardInterrupt, TerminationSignal):
            context = FlowRunContext.get()
            if context and context.flow_run and context.flow_run.deployment_id is None:
                self._end()
            raise

    def _end(self) -> str:
        """Cancel the subflow and wait until it has ended; returns what it says to have saved."""
        log, message = get_run_logger(), ""
        # The worker's SIGTERM may come meanwhile; the engine is about to exit in any case.
        with deferred_signals() as received:
            try:
                with get_client(sync_client=True) as client:
                    if known := self.known():
                        log.info("%s: ending %s", self.key, describe(known))
                        # Not forced: what has ended meanwhile stays as it is.
                        client.set_flow_run_state(known.id, Cancelling())
                        message = _settled(client, known).message or ""
            except httpx.HTTPError as error:
                log.warning("%s: its flow run may still be running: %s", self.key, error)
            received.clear()
        return message.partition("; ")[2]


def _start_again(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Do what Retry does to a flow run that has ended, and leave one alone that has not."""
    state = _settled(client, flow_run) if _state(flow_run).is_cancelling() else _state(flow_run)
    if state.is_final() or state.is_paused():
        client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)


def _settled(client: SyncPrefectClient, flow_run: FlowRun) -> State:
    """The state of a flow run once it is no longer being cancelled, or after a time."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        state = _state(client.read_flow_run(flow_run.id))
        if not state.is_cancelling() or time.monotonic() > deadline:
            return state
        time.sleep(POLL_SECONDS / 4)


def _state(flow_run: FlowRun) -> State:
    # A flow run of a deployment has one from its creation.
    return cast("State", flow_run.state)
