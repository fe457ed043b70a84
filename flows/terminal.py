"""Running a flow for a command in a terminal."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import typer

from flows.presets import Invocation
from flows.serving.connection import prefect_api


def run_flow(name: str, asked: Invocation) -> Any:
    """Run the flow `name` of `flows.<name>` and return its result.

    Raises what the flow raises, `typer.Exit` if it was ended from the Prefect UI, and, before
    anything slow is imported, `DeviceError` as `choose_gpus` does; Ray chooses those of a training.
    """
    from infini_model.training.launch.devices import choose_gpus

    config = asked.config
    if name != "preprocess" and (name == "evaluate" or config.launch.launcher == "local"):
        choose_gpus(config.launch.gpus)
    with prefect_api(config) as wait_until_up:
        from prefect.exceptions import Abort, Pause

        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        for logger in map(logging.getLogger, ("prefect.flow_runs", "prefect.task_runs")):
            logger.setLevel(config.run.log_level.upper())
        # Its warning about unsent events would come last, after what matters.
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)
        wait_until_up()
        try:
            return flow(**asked.parameters)
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # The terminal may have been closed.
                typer.echo("interrupted; the same command resumes where this one stopped", err=True)
            raise
        except (Abort, Pause) as end:
            typer.echo("stopped from the Prefect UI; the same command resumes", err=True)
            raise typer.Exit(1) from end
