"""Which flow run claims a run folder."""

from __future__ import annotations

from prefect.runtime import deployment, flow_run
from prefect.utilities.urls import url_for

from infini_model.holders import Owner


def current_owner() -> tuple[Owner | None, bool]:
    """The flow run at work as an owner, and whether it may continue what others have begun.

    A command in a terminal continues interrupted runs of the same settings. A flow run of a
    deployment does not: the other one may be suspended, and is resumed or retried by itself.
    """
    number = flow_run.id
    if number is None:
        return None, True
    return Owner(number, url_for("flow-run", obj_id=number)), deployment.id is None
