"""Running a flow for a command in a terminal."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import typer

from flows.serving.connection import prefect_api
from infini_model.config import Config

# The start of Prefect's messages about a Ctrl-C.
INTERRUPTED = (
    "Crash detected! Execution was aborted by",
    "Finished in state Crashed('Execution was aborted by",
)


class _WithoutReason(logging.Filter):
    """Drops the reason why a flow ended, which the command prints as its last line.

    It filters the loggers: Prefect replaces their handlers whenever it sets up logging.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not hasattr(record, "is_reason") and not record.getMessage().startswith(INTERRUPTED)


def run_flow(name: str, config: Config) -> Any:
    """Run the flow `name` of `flows.<name>` and return its result.

    Raises what the flow raises, and `typer.Exit` if it was ended from the Prefect UI.
    """
    from infini_model.training.launch.devices import choose_gpus

    choose_gpus(config.launch.gpus)
    with prefect_api(config) as wait_until_up:
        from prefect.exceptions import Abort, Pause

        from flows.parameters import parameters_of

        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        for logger in map(logging.getLogger, ("prefect.flow_runs", "prefect.task_runs")):
            logger.setLevel(config.run.log_level.upper())
            logger.addFilter(_WithoutReason())
        # Its warning about unsent events would come last, after what matters.
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)
        wait_until_up()
        try:
            return flow(**parameters_of(config, flow))
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # The terminal may have been closed.
                typer.echo("interrupted; the same command resumes where this one stopped", err=True)
            raise
        except (Abort, Pause) as end:
            typer.echo("stopped from the Prefect UI; the same command resumes", err=True)
            raise typer.Exit(1) from end
