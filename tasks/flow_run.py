"""What all flows have in common as Prefect flows, and the names of their runs."""

from __future__ import annotations

from typing import Any

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from tasks.artifacts import harmless


def first_name() -> str:
    """The flow and its preset: the name of a flow run until its folder is known."""
    preset = flow_run.get_parameters().get("preset") or "custom"
    return f"{flow_run.get_flow_name()} {preset}"


# JSON, so that no result and no exception is stored as a pickle.
FLOW: dict[str, Any] = {
    "flow_run_name": first_name,
    "persist_result": True,
    "result_serializer": "json",
}


def name_flow_run(folder: str, *tags: str) -> None:
    """Name the flow run after the flow and the folder that it works in, and add tags."""
    context = FlowRunContext.get()
    if context is None or context.flow is None or context.flow_run is None:
        return
    name = f"{context.flow.name} {folder}"
    with harmless("name of the run"):
        client = get_client(sync_client=True)
        known = client.read_flow_run(context.flow_run.id).tags
        client.update_flow_run(context.flow_run.id, name=name, tags=sorted({*known, *tags}))
