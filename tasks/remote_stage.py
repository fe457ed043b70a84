"""A stage as a flow run of the deployment that `stages.X.deployment` names, in its work pool.

It is a subflow of the current flow run, and Prefect's UI shows each on the page of the other. It is
started once: whoever retries or resumes the parent finds it by its idempotency key, follows it if
it still runs, and retries it, as the same flow run, if it has ended without success. What it
made it names in its tags, which every machine can read. The code that opens any dataset and any run
opens it here, and thereby checks it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
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
from prefect.client.schemas.responses import DeploymentResponse
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.states import AwaitingRetry, Cancelling, Scheduled, to_state_create
from prefect.tasks import Task
from prefect.utilities.urls import url_for

from infini_model.config import Config
from infini_model.config.locations import shareable_location
from infini_model.runtime.errors import ConfigError, DataError, StageError
from infini_model.runtime.processes import deferred_signals, wait_until
from tasks.control import POLL_SECONDS, Stop, stopped_with_flow_run
from tasks.flow_run import tagged

# The flow of each stage that has one.
FLOWS = {"shard": "preprocess", "train": "train", "evaluate": "evaluate"}
# A training saves a checkpoint first, which takes up to a minute.
END_SECONDS = 90.0
# How often a crash is read before it counts: a flow run that was wrongly declared dead says so.
CRASHED_READS = 4

T = TypeVar("T")


def find_deployment(key: str, name: str, flow: str) -> DeploymentResponse:
    """A deployment of `flow`, NAME or FLOW/NAME, on the current server.

    Raises `ConfigError` in one line that begins with `key`, which named it.
    """
    given, _, own_name = name.rpartition("/")
    wanted = given or flow
    with get_client(sync_client=True) as client:
        named = DeploymentFilter(name=DeploymentFilterName(any_=[own_name]))
        found = {
            client.read_flow(each.flow_id).name: each
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


def remote_parameters(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """The parameters by which a flow with these `fields` has the same settings elsewhere.

    No field is left to the deployment or to a preset, which may be others there: all that was
    resolved here is in `advanced`. Folders are given so that each machine has the same. No stage of
    it is remote again.
    """
    tree = config.in_place.model_dump(mode="json")
    tree["data"]["keep"] = None
    run = config.run
    tree["run"]["output_dir"] = shareable_location(run.output_dir, run.store)
    if run.data_dir is not None:
        tree["run"]["data_dir"] = shareable_location(run.data_dir, run.data_store)
    return {**dict.fromkeys(fields), "preset": None, "advanced": tree}


@dataclass(frozen=True)
class RemoteStage:
    """A stage of the current flow run that is a flow run of a deployment.

    Attributes:
        key: The setting that names the deployment, for messages.
        name: The name of the flow run until its engine renames it.
        deployment: Of the flow of the stage.
        parent: The current flow run.
        identity: What tells it from the other stages of all flow runs; the runs of a sweep, which
            have names, have their own.
    """

    key: str
    name: str
    deployment: DeploymentResponse
    parent: UUID
    identity: str

    @classmethod
    def find(cls, config: Config, stage: str) -> RemoteStage:
        """The stage `shard`, `train` or `evaluate`, by its deployment on the server.

        Raises as `find_deployment` does.
        """
        key, flow, context = f"stages.{stage}.deployment", FLOWS[stage], FlowRunContext.get()
        if context is None or context.flow_run is None:
            raise StageError(f"{key}: there is no flow run to be a subflow of")
        deployment = find_deployment(key, config.deployments[stage], flow)
        parent, name = context.flow_run.id, f"{flow} {config.run.preset or 'custom'}"
        identity = " ".join(filter(None, (str(parent), stage, config.run.name)))
        return cls(key, name, deployment, parent, identity)

    def known(self) -> FlowRun | None:
        """The flow run that was started for this stage, if there is one."""
        wanted = FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[self.identity]))
        with get_client(sync_client=True) as client:
            return next(iter(client.read_flow_runs(flow_run_filter=wanted, limit=1)), None)

    def run(self, config: Config, opened: Callable[[FlowRun], T]) -> T:
        """Run the stage to its end, and open what it made.

        It is made again if an earlier attempt of the parent made it, and it is not there any more.
        Ends the flow run when the current one is suspended or cancelled, and with a command that is
        interrupted, since the next one could not find it.

        Raises `StageError` if the flow run does not complete, and what `opened` raises.
        """
        known = self.known()
        if known is not None and _state(known).is_completed():
            try:
                return opened(known)
            except DataError as error:
                get_run_logger().warning("%s; making it again", error)
        return opened(self._completed(config, known))

    def made(self, flow_run: FlowRun, kind: str) -> str:
        """The name of the dataset or the run that a flow run made."""
        name = tagged(flow_run, kind)
        if name is None:
            raise DataError(f"{self.key}: {describe(flow_run)} has no tag {kind}:… that names it")
        return name

    def unseen(self, flow_run: FlowRun, kind: str, path: Path, shared: str) -> DataError:
        """What to raise if what it made is not on this machine, which must have `shared`."""
        return DataError(
            f"{self.key}: {kind} {path.name} of {describe(flow_run)} is not in {path.parent}; the "
            f"machines must share {shared} or use an object store"
        )

    def _completed(self, config: Config, known: FlowRun | None) -> FlowRun:
        with (
            stopped_with_flow_run(self._end) as stop,
            self._ended_with_command(),
            get_client(sync_client=True) as client,
        ):
            if known is not None:
                _start_again(client, known)
            return self._follow(client, known or self._start(client, config), stop)

    def _start(self, client: SyncPrefectClient, config: Config) -> FlowRun:
        """Create the flow run, as Prefect's `run_deployment` does.

        That would have the server compare the settings, which have been checked, with the schema of
        the deployment: a form, in which the preset cannot be left out.
        """
        # It stands for the stage in the current flow run.
        stage: Task[[], None] = Task(fn=lambda: None, name=self.key)
        task_run = client.create_task_run(stage, self.parent, dynamic_key=self.identity)
        fields = (self.deployment.parameter_openapi_schema or {}).get("properties", {})
        created = DeploymentFlowRunCreate(
            name=self.name,
            parameters=remote_parameters(config, fields),
            enforce_parameter_schema=False,
            state=to_state_create(Scheduled()),
            idempotency_key=self.identity,
            parent_task_run_id=task_run.id,
        )
        answer = client.request(
            "POST",
            "/deployments/{id}/create_flow_run",
            path_params={"id": self.deployment.id},
            json=created.model_dump(mode="json", exclude_unset=True),
        )
        return FlowRun.model_validate(answer.json())

    def _follow(self, client: SyncPrefectClient, flow_run: FlowRun, stop: Stop) -> FlowRun:
        """Wait for the end of a flow run; log what it does. An API that is down is waited for."""
        log, shown, crashed = get_run_logger(), None, 0
        log.info("%s: waiting for %s", self.key, describe(flow_run))
        while True:
            if change := stop():
                raise change
            with contextlib.suppress(httpx.HTTPError):
                try:
                    flow_run = client.read_flow_run(flow_run.id)
                except ObjectNotFound as error:
                    raise StageError(f"{self.key}: {describe(flow_run)} was deleted") from error
                state = _state(flow_run)
                if state.name != shown:
                    shown = state.name
                    log.info("%s: flow run %s: %s", self.key, flow_run.name, shown)
                if state.is_completed():
                    return flow_run
                crashed = crashed + 1 if state.is_crashed() else 0
                if state.is_final() and crashed in (0, CRASHED_READS):
                    why = " ".join((state.message or "").split())
                    raise StageError(f"{self.key}: {describe(flow_run)} is {state.name}: {why}")
            time.sleep(POLL_SECONDS)

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
    states = [_state(flow_run)]

    def is_settled() -> bool:
        states.append(_state(client.read_flow_run(flow_run.id)))
        return not states[-1].is_cancelling()

    wait_until(is_settled, every_seconds=POLL_SECONDS / 4, timeout_seconds=END_SECONDS)
    return states[-1]


def _state(flow_run: FlowRun) -> State:
    # A flow run of a deployment has one from its creation.
    return cast("State", flow_run.state)
