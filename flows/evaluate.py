"""Evaluation alone, of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State

from flows.parameters import as_flow
from infini_model.config import Config
from infini_model.runtime.claims import resume_config
from infini_model.runtime.runs import latest_run
from infini_model.runtime.stored_runs import attach_unclaimed, refresh_runs
from tasks import evaluate as stage
from tasks.flow_run import current_owner, name_flow_run
from tasks.shard import use_dataset


def _as_trained(config: Config, run_dir: Path) -> Config:
    """The run's own settings, with devices, places and stages of `config`.

    Of the evaluation, the tracking and the dataset folder, what was given in `config` is laid over
    the run's own.
    """
    sections: Any = {"evaluation": True, "tracking": True, "data": {"folder"}}
    given = config.model_dump(mode="json", exclude_unset=True, include=sections)
    places = {name: getattr(config.run, name) for name in ("output_dir", "store", "log_level")}
    trained = resume_config(run_dir, [given])
    return trained.updated(run=places, launch=config.launch, stages=config.stages)


@as_flow
def evaluate(config: Config) -> State[dict[str, Any]]:
    """Evaluate the run `run.name`, or the newest one, with the model that it trained.

    Returns the report's path with the losses and perplexities of the splits.
    """
    refresh_runs(config.run.runs_dir, config.run.store)
    run_dir = latest_run(config)
    config = _as_trained(config, run_dir)
    name_flow_run(run_dir.name, f"run:{run_dir.name}")
    dataset = use_dataset(config)
    with attach_unclaimed(run_dir, config, current_owner()):
        return stage.completed(stage.evaluate(config, dataset, run_dir))
