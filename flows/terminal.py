"""Running a flow for a command in a terminal."""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

import typer

from flows.presets import Invocation
from flows.serving.connection import configured_url, prefect_api, served_url
from infini_model.config import Config
from infini_model.runtime.errors import ConfigError

# The flows whose stages may run elsewhere.
OF_SEVERAL_STAGES = ("pipeline", "compare")
# The stage for which a flow needs the GPUs of this machine first; preprocessing needs none.
ON_GPUS = {"pipeline": "train", "compare": "train", "train": "train", "evaluate": "evaluate"}


def _check(name: str, config: Config) -> None:
    """Find out before anything slow is imported what cannot work.

    Raises `ConfigError` if a deployment is named and nothing could run it, `DeviceError` as
    `choose_gpus` does.
    """
    from infini_model.training.launch.devices import choose_gpus

    elsewhere = config.deployments if name in OF_SEVERAL_STAGES else {}
    if elsewhere and not (configured_url() or served_url(config)):
        raise ConfigError(
            f"stages.{next(iter(elsewhere))}.deployment: needs a Prefect server that has workers; "
            "start infini serve, or set PREFECT_API_URL"
        )
    stage = ON_GPUS.get(name)
    on_ray = stage == "train" and config.launch.launcher == "ray"
    if stage is not None and stage not in elsewhere and not on_ray:
        choose_gpus(config.launch.gpus)


def run_flow(name: str, asked: Invocation) -> Any:
    """Run the flow `name` of `flows.<name>` and return its result.

    Raises what `_check` and the flow raise, and `typer.Exit` if it was ended from the Prefect UI.
    """
    config = asked.config
    _check(name, config)
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
