"""Which flow run claims a run folder."""

from __future__ import annotations

from prefect.context import FlowRunContext
from prefect.utilities.urls import url_for

from infini_model.runtime.holders import Owner


def current_owner() -> tuple[Owner | None, bool]:
    """The flow run at work as an owner, and whether it may continue what others have begun.

    A command in a terminal continues interrupted runs of the same settings. A flow run of a
    deployment does not: the other one may be suspended, and is resumed or retried by itself.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None, True
    flow_run = context.flow_run
    owner = Owner(str(flow_run.id), url_for("flow-run", obj_id=flow_run.id))
    return owner, flow_run.deployment_id is None
