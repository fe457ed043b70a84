"""Reporting of failures: one line in the state of the run; a traceback only if unexpected.

A task or flow that raises is logged by Prefect with a traceback at each level, and its state
begins with "encountered an exception". One that returns a `Failed` state is not; `state.result()`
and the caller of the flow raise the exception in that state again.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect.artifacts import MarkdownArtifact
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogWorker
from prefect.states import Failed

from infini_model.runtime.errors import StageError, UserError
from tasks import artifacts
from tasks.flow_run import library_logged

EXPECTED = (UserError, ConnectionError, StageError, TimeoutError)
KEY = "failure"
TRACEBACK_LINES = 20
SEND_SECONDS = 5.0
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
# How Prefect's messages begin that only repeat a failure or the end of a stage.
ECHOES = (
    "Finished in state Failed",
    "Finished in state TimedOut",
    "Finished in state Running",
    "Task run failed with state",
    "Task run was aborted",
)
RETRY = "Task run failed with %s: %r - Retry %s/%s will start %s"

P = ParamSpec("P")
R = TypeVar("R")


class _WithoutEchoes(logging.Filter):
    """Drops repeated messages about a failure, and all tracebacks of an expected one.

    It filters the loggers: Prefect replaces their handlers whenever it sets up logging.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (error := record.exc_info[1]):
            if isinstance(error, EXPECTED) or error is self._logged:
                return False
            self._logged = error
        if record.msg == RETRY and isinstance(record.args, tuple):
            _, failure, *rest = record.args
            message = failure.message if isinstance(failure, State) else failure
            record.msg, record.args = "%s; retry %s of %s starts %s", (message, *rest)
        return not record.getMessage().startswith(ECHOES)


def _install(log_filter: logging.Filter) -> None:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(log_filter)


_install(_WithoutEchoes())


def reason(error: BaseException) -> str:
    """Why a run failed and how to resume it, in one line."""
    message = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
    advice = error.advice if isinstance(error, StageError) else ""
    return "; ".join(filter(None, [" ".join(message.split()), advice]))


def _failed(error: Exception) -> State[Any]:
    name = "TimedOut" if isinstance(error, TimeoutError) else "Failed"
    return Failed(name=name, message=reason(error), data=error)


def reported(stage: Callable[P, R]) -> Callable[P, R]:
    """Make a task's function return an expected failure as its state instead of raising it."""

    @wraps(stage)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return stage(*args, **kwargs)
        except EXPECTED as error:
            return cast("R", _failed(error))

    return wrapper


def concluded(function: Callable[P, R]) -> Callable[P, R]:
    """Make a flow's function report its failure, and send all log lines before the process ends.

    A failure is reported in one line of the log and in the artifact `failure`; an expected one is
    returned as the state of the flow run. Log lines are sent even if the flow run is cancelled or
    the process gets SIGTERM.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_retried():
            artifacts.remove(KEY)
        try:
            with library_logged():
                return function(*args, **kwargs)
        except EXPECTED as error:
            get_run_logger().error(reason(error), extra={"is_reason": True})
            artifacts.show(KEY, _explanation(error))
            return cast("R", _failed(error))
        except Exception as error:
            artifacts.show(KEY, _explanation(error))
            raise
        finally:
            send_logs()

    return wrapper


def _is_retried() -> bool:
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.run_count > 1)


def send_logs() -> None:
    """Send the log lines that Prefect has queued, for at most a few seconds.

    Prefect's own flush would also stop sending events, while other threads still emit some.
    """
    worker = APILogWorker.instance()
    sending = threading.Thread(target=worker.drain, name="last log lines", daemon=True)
    sending.start()
    sending.join(SEND_SECONDS)


def resume_advice() -> str:
    """How the user resumes a failed run."""
    context = FlowRunContext.get()
    deployed = context and context.flow_run and context.flow_run.deployment_id
    return "Retry resumes" if deployed else "the same command resumes"


def _explanation(error: Exception) -> MarkdownArtifact:
    """Why the run failed, what to do, and the last log lines if the reason is not enough."""
    parts = ["## Why it failed", reason(error), "## What to do", _remedy(error)]
    if lines := _last_lines(error):
        parts += ["## Last lines of the log", "\n".join(["```", *lines, "```"])]
    return MarkdownArtifact(markdown="\n\n".join(parts), description=reason(error))


def _remedy(error: Exception) -> str:
    if isinstance(error, UserError):
        return (
            "Fix the problem named above. If it is a setting, start a new run with it; if it is a "
            "file, a disk or a device, Retry. Finished work is reused."
        )
    if isinstance(error, ConnectionError):
        return "Check the address and the network, then Retry. Finished work is reused."
    if isinstance(error, TimeoutError):
        return "Increase the timeout of the stage (`stages`), or Retry. Finished work is reused."
    if isinstance(error, StageError) and error.advice:
        return f"{error.advice[0].upper()}{error.advice[1:]}."
    return "Retry. If it fails again, report it with the lines below."


def _last_lines(error: Exception) -> list[str]:
    if isinstance(error, StageError):
        return list(error.last_lines)
    if isinstance(error, EXPECTED):
        return []
    return "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
