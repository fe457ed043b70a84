"""One stage as a child process: its progress, its result and its errors come back typed.

The work of a stage runs as `python -m infini_model STAGE …`, so that a timeout or a cancelled
flow can end it for certain. The child tells its story in lines of JSON (see
`infini_model.__main__`); every other line is passed on to the log.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ParamSpec

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.runtime import task_run
from prefect.tasks import Task, exponential_backoff

from infini_model.__main__ import ERROR, PROGRESS, RESULT
from infini_model.config import Config, StageConfig
from infini_model.runtime.errors import StageError, UserError
from infini_model.runtime.processes import ProcessTimeoutError, run
from infini_model.training.launch.failures import TrainingFailure
from tasks.control import stopped_with_flow_run
from tasks.progress import Progress

TAIL_LINES = 20

P = ParamSpec("P")


async def is_worth_a_retry(_task: Task[..., Any], _run: TaskRun, state: State) -> bool:
    """False for what the user has to mend, and where the training knows that it would not help."""
    error = await state.aresult(raise_on_failure=False)
    if isinstance(error, TrainingFailure):
        return not error.is_final
    return not isinstance(error, UserError)


# What all stages have in common as Prefect tasks. None is cached or stored by Prefect: each answer
# depends on the disk, and the library reuses what stands there by content and checksum.
STAGE: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retry_condition_fn": is_worth_a_retry,
    "retry_jitter_factor": 0.5,
}


def named_after_run() -> str:
    """The stage and its run folder, as the name of a task run."""
    folder = Path(task_run.get_parameters()["run_dir"])
    return f"{task_run.get_task_name()} {folder.name}"


def perform(task: Task[P, Any], stage: StageConfig, *args: P.args, **kwargs: P.kwargs) -> Any:
    """Run the task of a stage, retried as its settings say, each time after twice the wait.

    The timeout is the stage's own: Prefect's would leave the children running. Raises what the
    stage failed with.
    """
    retried = task.with_options(
        retries=stage.retries, retry_delay_seconds=exponential_backoff(stage.retry_delay_seconds)
    )
    return retried(*args, **kwargs, return_state=True).result()


def run_stage(
    name: str, config: Config, stage: StageConfig, *arguments: str, unit: str = "bytes"
) -> dict[str, Any]:
    """Run stage `name` in a child process and return the result that it reports.

    Raises what the child reported: `UserError`, `ConnectionError`; `StageError` with its last
    lines if it ended without a word; `ProcessTimeoutError` past the stage's timeout, when nothing
    of it is left running. Where the flow run is suspended or cancelled, the child is ended.
    """
    told: dict[str, Any] = {}
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    log = get_run_logger()

    def on_line(line: str) -> None:
        mark, _, body = line.partition(" ")
        if mark == PROGRESS:
            progress.show(*json.loads(body))
        elif mark in (RESULT, ERROR):
            told[mark] = json.loads(body)
        else:
            tail.append(line)
            log.info(line)

    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(name, unit) as progress,
        stopped_with_flow_run() as stop,
    ):
        file = Path(folder) / "config.json"
        file.write_text(config.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "infini_model", name, "--config", str(file), *arguments]
        try:
            status = run(command, on_line=on_line, timeout_seconds=stage.timeout_seconds, stop=stop)
        except ProcessTimeoutError as error:
            message = f"{name}: not done after {stage.timeout_seconds:g} s"
            raise ProcessTimeoutError(message) from error
    return _outcome(name, status, told, list(tail))


def _outcome(name: str, status: int, told: dict[str, Any], tail: Sequence[str]) -> dict[str, Any]:
    if error := told.get(ERROR):
        kind = {"user": UserError, "network": ConnectionError}[error["kind"]]
        raise kind(error["message"])
    if status != 0 or RESULT not in told:
        failure = StageError(": ".join([f"{name} ended with status {status}", *tail[-1:]]))
        failure.last_lines = tail
        raise failure
    result: dict[str, Any] = told[RESULT]
    return result
