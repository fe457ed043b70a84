"""One stage as a child process: its progress, its result and its errors come back typed.

The work of a stage runs as `python -m infini_model STAGE …`, so that a cancelled flow run
reliably ends it. The child sends messages (`infini_model.runtime.stage_protocol`); every other line
goes to the log.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from infini_model.config import Config, StagesConfig
from infini_model.runtime.errors import DataError, StageError, UserError
from infini_model.runtime.processes import run
from infini_model.runtime.stage_protocol import ERROR, PROGRESS, RESULT, parse_line
from tasks.artifacts import progress
from tasks.control import stopped_with_flow_run
from tasks.failures import EXPECTED, failed
from tasks.flow_run import attempt, log_line

TAIL_LINES = 20
# What a program does to itself, and so would do again; other signals come from outside.
FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

P = ParamSpec("P")
R = TypeVar("R")


async def is_worth_a_retry(_task: Task[..., Any], _run: TaskRun, state: State) -> bool:
    """False for a user's mistake, and for a failure that a retry would not fix."""
    error = await state.aresult(raise_on_failure=False)
    return not isinstance(error, UserError) and not getattr(error, "is_final", False)


def run_with_retries(
    work: Callable[P, R],
    stages: StagesConfig,
    name: str,
    subject: str,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Run the work of a stage as the Prefect task `name`, on `subject`, retried as `stages` say.

    Prefect caches and stores no results: they depend on the disk, where the library reuses existing
    outputs by content and checksum. Raises what the stage failed with.
    """

    @wraps(work)
    def with_failure_as_state(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return work(*args, **kwargs)
        except EXPECTED as error:
            return cast("R", failed(error))

    title = f"{name} {subject}{attempt()}"
    task = Task(
        with_failure_as_state,
        name=name,
        task_run_name=lambda: title,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=stages.retries_of(name),
        retry_delay_seconds=exponential_backoff(stages.retry_delay_seconds),
        retry_condition_fn=is_worth_a_retry,
        retry_jitter_factor=0.5,
    )
    return task(*args, **kwargs, return_state=True).result()


def run_stage(name: str, config: Config, *arguments: str, unit: str = "bytes") -> dict[str, Any]:
    """Run stage `name` in a child process and return the result that it reports.

    Raises the error that the child reported (`UserError`, `ConnectionError` or `StageError`);
    `StageError` with its last lines if it ended without reporting one. Ends the child when the flow
    run is suspended or cancelled.
    """
    reported: dict[str, Any] = {}
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def on_line(line: str) -> None:
        mark, body = parse_line(line)
        if mark == PROGRESS:
            show_progress(*body)
        elif mark:
            reported[mark] = body
        else:
            tail.append(line)
            log_line(line)

    with (
        tempfile.TemporaryDirectory() as folder,
        progress(name, unit) as show_progress,
        stopped_with_flow_run() as stop,
    ):
        file = Path(folder) / "config.json"
        file.write_text(config.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "infini_model", name, "--config", str(file), *arguments]
        status = run(command, on_line=on_line, stop=stop)
    return _outcome(name, status, reported, list(tail))


def _outcome(
    name: str, status: int, reported: dict[str, Any], tail: Sequence[str]
) -> dict[str, Any]:
    if error := reported.get(ERROR):
        kinds = {
            "user": UserError,
            "data": DataError,
            "network": ConnectionError,
            "stage": StageError,
        }
        raise kinds[error["kind"]](error["message"])
    if status != 0 or RESULT not in reported:
        failure = StageError(": ".join([f"{name} ended with status {status}", *tail[-1:]]))
        failure.last_lines, failure.is_final = tail, -status in FAULTS
        raise failure
    result: dict[str, Any] = reported[RESULT]
    return result
