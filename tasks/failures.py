"""How a failure is told: one line as the state of the run, and a traceback only if unforeseen.

A task or flow that raises is logged by Prefect with a traceback at each level, and its state
begins with "encountered an exception". One that returns a `Failed` state is not; the exception in
that state is raised again by `state.result()` and by whoever called the flow.
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

FORESEEN = (UserError, ConnectionError, StageError, TimeoutError)
KEY = "failure"
TRACEBACK_LINES = 20
SEND_SECONDS = 5.0
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
# What Prefect says of a failure, or of a stage that was ended, besides the reason.
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


class _SaidOnce(logging.Filter):
    """Drops what Prefect repeats of a failure, and every traceback of a foreseen one.

    A filter of the loggers: Prefect replaces their handlers whenever it sets up logging.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (error := record.exc_info[1]):
            if isinstance(error, FORESEEN) or error is self._told:
                return False
            self._told = error
        if record.msg == RETRY and isinstance(record.args, tuple):
            _, failure, *rest = record.args
            told = failure.message if isinstance(failure, State) else failure
            record.msg, record.args = "%s; retry %s of %s starts %s", (told, *rest)
        return not record.getMessage().startswith(ECHOES)


def _install(log_filter: logging.Filter) -> None:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(log_filter)


_install(_SaidOnce())


def reason(error: BaseException) -> str:
    """Why a run failed and how it continues, in one line."""
    told = str(error) if isinstance(error, FORESEEN) else f"{type(error).__name__}: {error}"
    advice = error.advice if isinstance(error, StageError) else ""
    return "; ".join(filter(None, [" ".join(told.split()), advice]))


def _failed(error: Exception) -> State[Any]:
    name = "TimedOut" if isinstance(error, TimeoutError) else "Failed"
    return Failed(name=name, message=reason(error), data=error)


def reported(stage: Callable[P, R]) -> Callable[P, R]:
    """Have the function of a task return a foreseen failure as its state instead of raising it."""

    @wraps(stage)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return stage(*args, **kwargs)
        except FORESEEN as error:
            return cast("R", _failed(error))

    return wrapper


def concluded(story: Callable[P, R]) -> Callable[P, R]:
    """Have the function of a flow end in order.

    A failure is told in one line of the log and in the artifact `failure`; one that was foreseen
    is returned as the state of the flow run. All log lines are on the server before the process
    ends, also where the flow run is cancelled or the process gets SIGTERM.
    """

    @wraps(story)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_retried():
            artifacts.remove(KEY)
        try:
            return story(*args, **kwargs)
        except FORESEEN as error:
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
    """Send the log lines that Prefect has queued, or give up after some seconds.

    Prefect's own flush would stop the sending of events too, while other threads still send some.
    """
    worker = APILogWorker.instance()
    sending = threading.Thread(target=worker.drain, name="last log lines", daemon=True)
    sending.start()
    sending.join(SEND_SECONDS)


def resume_advice() -> str:
    """How the person continues a run that has failed."""
    context = FlowRunContext.get()
    deployed = context and context.flow_run and context.flow_run.deployment_id
    return "Retry resumes" if deployed else "the same command resumes"


def _explanation(error: Exception) -> MarkdownArtifact:
    """Why it ended, what to do about it, and the last lines where the reason is not enough."""
    parts = ["## Why it ended", reason(error), "## What to do", _remedy(error)]
    if lines := _last_lines(error):
        parts += ["## The last lines", "\n".join(["```", *lines, "```"])]
    return MarkdownArtifact(markdown="\n\n".join(parts), description=reason(error))


def _remedy(error: Exception) -> str:
    if isinstance(error, UserError):
        return (
            "Correct what the line above names. If it is a setting, start a new run with it; "
            "if it is a file, a disk or a device, Retry. What is finished is reused."
        )
    if isinstance(error, ConnectionError):
        return "Check the address and the network, then Retry. What is finished is reused."
    if isinstance(error, TimeoutError):
        return "Raise the timeout of the stage (`stages`), or Retry. What is finished is reused."
    if isinstance(error, StageError) and error.advice:
        return f"{error.advice[0].upper()}{error.advice[1:]}."
    return "Retry. If it ends in the same way, report it with the lines below."


def _last_lines(error: Exception) -> list[str]:
    if isinstance(error, StageError):
        return list(error.last_lines)
    if isinstance(error, FORESEEN):
        return []
    return "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
