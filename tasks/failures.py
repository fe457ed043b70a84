"""Reporting of failures: one line in the state of the run; a traceback only if unexpected.

A task or flow that raises is logged by Prefect with a traceback at each level, and its state
begins with "encountered an exception". One that returns a `Failed` state is not; `state.result()`
and the caller of the flow raise the exception in that state again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from prefect.artifacts import MarkdownArtifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogWorker
from prefect.states import Failed

from infini_model.config import Config
from infini_model.data.manifest import read_manifest
from infini_model.runtime.errors import StageError, UserError, describe_error
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.memory_estimate import SMALLER, Machine, advice
from infini_model.training.model_shape import UnknownShapeError, known_shape, with_vocabulary
from infini_model.training.run_status import saved_step
from tasks import artifacts
from tasks.flow_run import current_flow_run, library_logged

EXPECTED = (UserError, ConnectionError, StageError)
KEY = "failure"
FIRST = "Open this first"
TRACEBACK_LINES = 20
SEND_SECONDS = 5.0
LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
RETRY = "Task run failed with %s: %r - Retry %s/%s will start %s"
# What a message says that needs no advice on how to resume.
RESUMES = re.compile(r"\bRetry resumes|\bsame command resumes")

P = ParamSpec("P")
R = TypeVar("R")


class _OneTraceback(logging.Filter):
    """Drops records whose traceback is of an expected failure, was logged already, or is empty.

    It filters the loggers: Prefect replaces their handlers whenever it sets up logging.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            error = record.exc_info[1]
            # Prefect logs a task that returns a `Failed` state with the traceback of nothing.
            if error is None or isinstance(error, EXPECTED) or error is self._logged:
                return False
            self._logged = error
        if record.msg == RETRY and isinstance(record.args, tuple):
            _, failure, number, retries, when = record.args
            cause = failure.data if isinstance(failure, State) else failure
            message = _happened(cause) if isinstance(cause, Exception) else failure
            # Such as "1.93 second(s) from now", or "immediately".
            delay, is_later, _ = str(when).partition(" second")
            start = f"in {math.ceil(float(delay))} s" if is_later else delay
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg = "%s; retry %s of %s %s"
            record.args = (message, number, retries, start)
        return True


_one_traceback = _OneTraceback()
for _name in LOGGERS:
    logging.getLogger(_name).addFilter(_one_traceback)


def reason(error: BaseException) -> str:
    """Why a run failed and how to resume it, in one line."""
    return "; ".join(filter(None, [_happened(error), _advice(error)]))


def _happened(error: BaseException) -> str:
    """Why a run failed and what is left of it; an unexpected error also by its type."""
    kind = "" if isinstance(error, EXPECTED) else f"{type(error).__name__}: "
    return kind + describe_error(error)


def _advice(error: BaseException) -> str:
    """How to resume what failed through no fault of the user's; empty if that does not help."""
    if not isinstance(error, StageError) or error.is_final or RESUMES.search(describe_error(error)):
        return ""
    return "Retry resumes" if _is_retried_in_ui() else "the same command resumes"


def _is_started_by_worker() -> bool:
    return "PREFECT__FLOW_RUN_ID" in os.environ


def _is_retried_in_ui() -> bool:
    """Whether a flow run is retried in the UI: a worker has started it, and not a command.

    Where there is no flow run, it is `infini serve` that speaks of one.
    """
    return current_flow_run() is None or _is_started_by_worker()


def note_training(
    error: Exception, config: Config, dataset_dir: Path, run_dir: Path, lines: Sequence[str]
) -> None:
    """Note on the error that ended a training what its message does not say.

    That is the newest checkpoint, and what needs less memory if it ran out of that; of a failure
    also the last `lines` of its log.
    """
    if isinstance(error, StageError):
        error.last_lines = list(lines)
    if isinstance(error, TrainingFailure) and error.kind == "out of memory" and error.is_final:
        error.add_note(_lighter(config, dataset_dir, in_main_memory=error.is_killed))
    if note := saved_note(run_dir):
        error.add_note(note)


def saved_note(run_dir: Path) -> str:
    """The newest checkpoint of a run, for a message."""
    step = saved_step(run_dir)
    return "" if step is None else f"step {step} is saved"


def _lighter(config: Config, dataset_dir: Path, *, in_main_memory: bool) -> str:
    """What needs less memory on this machine."""
    if config.launch.launcher == "ray":
        return SMALLER
    with contextlib.suppress(UnknownShapeError, UserError):
        machine = Machine.of(config)
        if in_main_memory and machine.device == "cuda":
            return "end other programs on the machine, or give it more main memory"
        size = read_manifest(dataset_dir).tokenizer.vocab_size
        return advice(known_shape(with_vocabulary(config, size, dataset_dir)), machine)
    return SMALLER


def failed(error: Exception) -> State[Any]:
    """Make the state of a task or flow run that ended with an expected failure."""
    return Failed(message=reason(error), data=error)


def report_failure(function: Callable[P, R]) -> Callable[P, R]:
    """Make a flow's function report its failure, and send all log lines before the process ends.

    A failure is reported in the artifact `failure` and, if a worker has started the flow run, in
    one line of the log; who calls the flow gets the exception. An expected one is returned as the
    state of the flow run. Log lines are sent even if the flow run is cancelled or the process gets
    SIGTERM.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with library_logged():
                return function(*args, **kwargs)
        except EXPECTED as error:
            if _is_started_by_worker():  # A command says it in its last line.
                get_run_logger().error(reason(error))
            artifacts.show(KEY, _explanation(error))
            if advice := _advice(error):
                error.add_note(advice)  # for the last line of a command
            return cast("R", failed(error))
        except Exception as error:
            artifacts.show(KEY, _explanation(error))
            raise
        finally:
            # Prefect's own flush would also stop sending events, while other threads emit some.
            APILogWorker.drain_all(timeout=SEND_SECONDS)

    return wrapper


def _explanation(error: Exception) -> MarkdownArtifact:
    """Why the run failed, what to do, and the last log lines if the reason is not enough."""
    text = explanation(reason(error), _remedy(error), _last_lines(error))
    return MarkdownArtifact(markdown=text, description=f"{FIRST}: {reason(error)}")


def explanation(why: str, remedy: str, lines: Sequence[str]) -> str:
    """The Markdown of the artifact `failure`, with the last `lines` of a log if there are any."""
    parts = ["## Why it failed", why, "## What to do", remedy]
    if lines:
        parts += ["## Last lines of the log", "\n".join(["```", *lines, "```"])]
    return "\n\n".join(parts)


def _remedy(error: Exception) -> str:
    is_in_ui = _is_retried_in_ui()
    again = "Retry" if is_in_ui else "run the same command again"
    if isinstance(error, UserError):
        return (
            "Fix the problem named above. If it is a setting, start a new run with it; "
            f"if it is a file, a disk or a device, {again}. Finished work is reused."
        )
    if isinstance(error, ConnectionError):
        return f"Check the address and the network, then {again}. Finished work is reused."
    if isinstance(error, TrainingFailure) and error.is_final:
        resume = "name it in Resume" if is_in_ui else "infini resume"
        return (
            "The same settings would fail again. Start a new run with others, or resume this one "
            f"({resume}) with others of `launch`, which do not affect the weights."
        )
    if advice := _advice(error):
        return f"{advice[0].upper()}{advice[1:]}."
    return f"{again[0].upper()}{again[1:]}. If it fails again, report it with the lines below."


def _last_lines(error: Exception) -> list[str]:
    if isinstance(error, StageError):
        return list(error.last_lines)
    if isinstance(error, EXPECTED):
        return []
    return "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
