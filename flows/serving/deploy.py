"""The work pool, deployments and automations of the project on a Prefect server.

Edits on the server are kept. A deployment of prefect.yaml is created if it is missing; afterwards
only the fields that follow the code are updated: parameters, schedules, paused state, tags and
concurrency limit belong to the user, a deployment that was moved to another work pool is left
alone. An automation is never changed. What was deleted stays so. `reset=True` restores everything.

Import this once the environment is set up: Prefect reads its settings when it is imported.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import AutomationCore
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.processutils import command_to_string
from prefect.variables import Variable

from flows.serving.access import LOOPBACK_NAMES
from flows.serving.servers import PROJECT, WORK_POOL
from infini_model.runtime.errors import UserError

# The variable that names the deployments and automations that were once created, in the server's
# own database.
DEPLOYED = "infini_deployments"


def deploy(api_url: str, *, reset: bool = False) -> None:
    """Create or update the work pool, the deployments and the automations at `api_url`.

    Raises `UserError` in one line if the server does not answer or rejects a request.
    """
    with (
        temporary_settings({PREFECT_API_URL: api_url}),
        _one_line_errors(api_url),
        get_client(sync_client=True) as client,
    ):
        _apply_work_pool(client)
        known: list[str] = Variable.get(DEPLOYED, default=[])
        created = set() if reset else set(known)
        ids: dict[str, UUID | None] = {}
        for definition in _read_definitions():
            name = definition["name"]
            is_new = name not in created
            ids[name] = _apply_deployment(client, definition, reset=reset, is_new=is_new)
        is_local = urlsplit(api_url).hostname in LOOPBACK_NAMES
        for automation in _automations(ids["train"], watch_heartbeats=not is_local):
            is_new = automation.name not in created
            ids[automation.name] = _apply_automation(client, automation, reset=reset, is_new=is_new)
        if deleted := [name for name, number in ids.items() if number is None]:
            print(
                f"{', '.join(deleted)}: deleted on the server and not created again; infini deploy "
                "--reset restores everything"
            )
        if known != (names := sorted({*created, *ids})):
            Variable.set(DEPLOYED, names, overwrite=True)


@contextlib.contextmanager
def _one_line_errors(api_url: str) -> Iterator[None]:
    try:
        yield
    except PrefectHTTPStatusError as error:
        raise UserError(f"{api_url} rejected the deployment: {_reason(error)}") from error
    except httpx.RequestError as error:
        raise UserError(f"{api_url} does not answer ({error}); nothing was deployed") from error


def _reason(error: Any) -> str:
    """The server's answer in a `PrefectHTTPStatusError`, in one line."""
    return " ".join(f"{error.response.status_code} {error.response.text}".split())


def job_template() -> dict[str, Any]:
    """The base job template of the work pool: one fixed command and no variables.

    Any caller of the API can send job variables, and the worker applies those that the template
    mentions. It also merges `env` into a template whose `env` is a dictionary, so this one has
    none: a run inherits the worker's environment.
    """
    return {
        "variables": {"type": "object", "properties": {}, "additionalProperties": False},
        "job_configuration": {
            "command": command_to_string([sys.executable, "-m", "flows.serving.engine"]),
            "working_dir": str(PROJECT),
            "stream_output": True,
        },
    }


def _apply_work_pool(client: SyncPrefectClient) -> None:
    template = job_template()
    try:
        pool = client.read_work_pool(WORK_POOL)
    except ObjectNotFound:
        client.create_work_pool(
            WorkPoolCreate(
                name=WORK_POOL,
                description="Runs flows on this machine, from the checkout.",
                type="process",
                base_job_template=template,
            )
        )
        return
    if pool.type != "process":
        raise UserError(f"work pool {WORK_POOL}: its type is {pool.type}, not process; rename it")
    if pool.base_job_template != template:
        client.update_work_pool(WORK_POOL, WorkPoolUpdate(base_job_template=template))


def _read_definitions() -> list[dict[str, Any]]:
    """The deployments of prefect.yaml, each with the file's pull steps."""
    text = (PROJECT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
    # Prefect's own command would insert the shell's current folder.
    tree = yaml.safe_load(text.replace("{{ $PWD }}", str(PROJECT)))
    return [{"pull": tree["pull"], **definition} for definition in tree["deployments"]]


def _code_fields(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a deployment that follow the code, as the API names them."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(str(PROJECT / definition["entrypoint"]))
    return {
        "entrypoint": definition["entrypoint"],
        "path": None,
        "pull_steps": definition["pull"],
        "description": definition["description"],
        "version": flow.version,
        "parameter_openapi_schema": parameter_schema(flow).model_dump(mode="json"),
        "enforce_parameter_schema": True,
        "work_pool_name": definition["work_pool"]["name"],
        "work_queue_name": definition["work_pool"]["work_queue_name"],
        "job_variables": {},
    }


def _apply_deployment(
    client: SyncPrefectClient, definition: Mapping[str, Any], *, reset: bool, is_new: bool
) -> UUID | None:
    """Create a deployment or update the one that is there; None if it was deleted."""
    name = definition["name"]
    if not reset:
        with contextlib.suppress(ObjectNotFound):
            existing = client.read_deployment_by_name(f"{name}/{name}")
            _update(client, existing, definition)
            return existing.id
        if not is_new:
            return None
    # This replaces an existing deployment completely, schedules included.
    return client.create_deployment(
        flow_id=client.create_flow_from_name(name),
        name=name,
        parameters=definition.get("parameters", {}),
        schedules=[
            DeploymentScheduleCreate(schedule=CronSchedule(**schedule))
            for schedule in definition.get("schedules", [])
        ],
        paused=False,
        tags=definition.get("tags", []),
        **_code_fields(definition),
    )


def _update(
    client: SyncPrefectClient, existing: DeploymentResponse, definition: Mapping[str, Any]
) -> None:
    """Update the fields that follow the code, if they have changed."""
    if existing.work_pool_name not in (None, WORK_POOL):
        return
    code = _code_fields(definition)
    known = code["parameter_openapi_schema"]["properties"]
    if dropped := set(existing.parameters) - set(known):
        code["parameters"] = {k: v for k, v in existing.parameters.items() if k in known}
        print(f"{existing.name}: dropped parameters that the flow no longer has: {sorted(dropped)}")
    if all(getattr(existing, field) == value for field, value in code.items()):
        return
    try:
        client.update_deployment(existing.id, DeploymentUpdate(**code))
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 409:
            raise
        # One deployment with outdated parameters must not block the others.
        print(
            f"{existing.name}: the parameters edited on the server no longer fit the flow; edit "
            f"them, or run infini deploy --reset: {_reason(error)}"
        )


def _automations(train: UUID | None, *, watch_heartbeats: bool) -> list[AutomationCore]:
    """The automations of automations.yaml, given the id of the deployment `train` if it is there.

    Heartbeats are watched on a server that other machines reach: `infini serve` notices dead
    processes within seconds, while a server that was down for longer than the timeout would take
    healthy runs for dead on its return. Trainings start once the user enables that.
    """
    text = (PROJECT / "deployments" / "automations.yaml").read_text(encoding="utf-8")
    heartbeats, trainings = yaml.safe_load(text.replace("{{ $TRAIN }}", str(train)))
    heartbeats["enabled"] = watch_heartbeats
    trees = [heartbeats] if train is None else [heartbeats, trainings]
    return [AutomationCore.model_validate(tree) for tree in trees]


def _apply_automation(
    client: SyncPrefectClient, automation: AutomationCore, *, reset: bool, is_new: bool
) -> UUID | None:
    """Create an automation, or reset the one that is there; None if it was deleted."""
    existing = client.read_automations_by_name(automation.name)
    if not existing:
        return client.create_automation(automation) if is_new else None
    if reset:
        client.update_automation(existing[0].id, automation)
    return existing[0].id
