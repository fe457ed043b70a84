"""What all flows share as Prefect flows: options, names, ownership, and the library's messages."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Running

from infini_model.runtime.holders import Owner
from tasks.artifacts import warn_on_error

LEVEL = re.compile(r"\b(?:CPU\d*|GPU\d+):([A-Z]+) \| ")


def unwrapped(value: Any) -> Any:
    """Unwrap a value of a schedule's form: of `{"__prefect_kind": "json", "value": "5"}`, 5.

    Without a value it was left empty. What is not JSON stays text, for the settings to refuse.
    """
    if isinstance(value, Mapping) and value.get("__prefect_kind") == "json":
        inner = value.get("value")
        with contextlib.suppress(TypeError, ValueError):
            return json.loads(inner)  # type: ignore[arg-type] # not text, then
        return inner
    if isinstance(value, Mapping):
        return {key: unwrapped(each) for key, each in value.items()}
    return list(map(unwrapped, value)) if isinstance(value, list) else value


def current_flow_run() -> FlowRun | None:
    """The innermost flow run that this thread executes, if there is one."""
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


def retried_flow_run() -> FlowRun | None:
    """The current flow run, if an earlier engine has begun it."""
    current = current_flow_run()
    return current if current is not None and current.run_count > 1 else None


def first_name() -> str:
    """Name a flow run after its flow and its preset or the run it resumes, until that is known.

    The name of an earlier attempt stays.
    """
    current = current_flow_run()
    if current is not None and current.run_count > 0:
        return current.name
    given = unwrapped(flow_run.get_parameters())
    # Of what travels whole, such as a file over a preset.
    whole = given.get("advanced")
    run = whole.get("run") if isinstance(whole, Mapping) else None
    recorded = (run.get("name"), run.get("preset")) if isinstance(run, Mapping) else ()
    preset = given.get("preset")
    presets = "-".join(preset) if isinstance(preset, list) else preset
    known = *map(given.get, ("name", "resume", "branch_of", "run")), presets, *recorded, "custom"
    return f"{flow_run.get_flow_name()} {next(filter(None, known))}"


# JSON, so that neither results nor exceptions are stored as pickles.
FLOW: dict[str, Any] = {
    "flow_run_name": first_name,
    "persist_result": True,
    "result_serializer": "json",
}


def name_flow_run(folder: str, *tags: str) -> None:
    """Rename the flow run after its flow and the folder it works in, and add tags.

    A tag `kind:name` replaces one of its kind, which an earlier attempt may have left.
    """
    current = current_flow_run()
    if current is None:
        return
    name, kinds = f"{flow_run.get_flow_name()} {folder}", {_kind(tag) for tag in tags}
    with warn_on_error("name of the run"):
        client = get_client(sync_client=True)
        known = client.read_flow_run(current.id).tags
        others = {tag for tag in known if _kind(tag) not in kinds}
        client.update_flow_run(current.id, name=name, tags=sorted({*others, *tags}))


def attempt() -> str:
    """Return a suffix for the tasks of all engines but the first, such as " attempt 2".

    Prefect's count of runs would count as well how often it has waited.
    """
    number = 1
    if current := retried_flow_run():
        with warn_on_error("number of the attempt"):
            states = get_client(sync_client=True).read_flow_run_states(current.id)
            # Each engine begins from one of these, and waits from Running to Running.
            before = (StateType.SCHEDULED, StateType.PENDING)
            after = [new.type for old, new in itertools.pairwise(states) if old.type in before]
            number = after.count(StateType.RUNNING)
    return f" attempt {number}" if number > 1 else ""


class Waiting:
    """Shows in the state of the flow run that its training waits for a device, and for whom.

    It remains Running by its type, as the stage must be to go on.
    """

    def __init__(self, note: Path) -> None:
        """`note` is the file that says it, while it is so."""
        self._note, self._shown = note, ""

    def update(self) -> None:
        """Show what has changed. Raises what Prefect's client raises."""
        said, current = "", current_flow_run()
        with contextlib.suppress(FileNotFoundError):
            said = self._note.read_text(encoding="utf-8")
        if said == self._shown or current is None:
            return
        client = get_client(sync_client=True)
        state = client.read_flow_run(current.id).state
        # It may have been suspended or cancelled meanwhile.
        if state is not None and state.is_running():
            now: State = Running(name="Waiting", message=said) if said else Running()
            client.set_flow_run_state(current.id, now)
        self._shown = said


def earlier_subflows(flow_name: str) -> list[FlowRun]:
    """The subflows of a flow that earlier attempts of the current flow run have begun."""
    current = retried_flow_run()
    if current is None:
        return []
    within = {"parent_flow_run_id": {"any_": [current.id]}}
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(
            flow_filter=FlowFilter.model_validate({"name": {"any_": [flow_name]}}),
            flow_run_filter=FlowRunFilter.model_validate(within),
            sort=FlowRunSort.START_TIME_ASC,
        )


def _kind(tag: str) -> str:
    return tag.partition(":")[0]


def current_owner() -> Owner:
    """The current flow run as the owner of a run folder.

    A command in a terminal resumes interrupted runs with the same settings. A flow run of a
    deployment does not: those runs may be suspended, and are resumed or retried by themselves.
    """
    current = current_flow_run()
    if current is None:
        return Owner()
    return Owner(str(current.id), adopts=current.deployment_id is None)


def log_line(line: str) -> None:
    """Log a line of a child process in the flow run, at the level that a rank of a training names.

    Its lines begin with, for example, `GPU0:WARNING | `; all others are information.
    """
    named = LEVEL.search(line)
    level = logging.getLevelNamesMapping().get(named[1], logging.INFO) if named else logging.INFO
    get_run_logger().log(level, "%s", line)


class _ToFlowRun(logging.Handler):
    """Passes records on to a flow run's log, from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._log = get_run_logger()

    def emit(self, record: logging.LogRecord) -> None:
        """Log it again, without what only the library's own loggers know."""
        self._log.log(record.levelno, "%s", record.getMessage())


@contextlib.contextmanager
def library_logged() -> Iterator[None]:
    """Show in the flow run's log what the library says in this process.

    The stages run in processes of their own, whose lines are logged as they are. Within a
    subflow the lines are those of the subflow alone.
    """
    logger = logging.getLogger("infini_model")
    before = logger.level, logger.propagate, logger.handlers
    logger.setLevel(logging.INFO)
    logger.propagate, logger.handlers = False, [_ToFlowRun()]
    try:
        yield
    finally:
        logger.level, logger.propagate, logger.handlers = before
