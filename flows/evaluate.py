"""Evaluation alone, of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.form import form, settings
from infini_model.config import Config
from infini_model.config.places import folder_here
from infini_model.runtime.holders import Holder
from infini_model.runtime.runs import (
    VALIDATION_LOSS,
    dataset_here,
    latest_run,
    read_run_config,
)
from infini_model.runtime.stored.working_copy import attach_unclaimed, refresh_runs
from tasks.ending import end_predecessors
from tasks.evaluate import evaluate_model
from tasks.failures import report_failure
from tasks.flow_run import FLOW, current_owner, name_flow_run
from tasks.shard import plan_dataset
from tasks.stage import run_with_retries


def evaluate_run(config: Config, dataset_dir: Path, run_dir: Path) -> dict[str, Any]:
    """Score a run and write its report."""
    stage = config.stages.evaluate
    report: dict[str, Any] = run_with_retries(
        evaluate_model, stage, config, str(dataset_dir), str(run_dir)
    )
    end_predecessors(run_dir, str(with_losses(report).message))
    return report


def with_losses(result: dict[str, Any]) -> State[dict[str, Any]]:
    """The end of a flow run that has come to this report, with what it says in short."""
    losses = result.get("tasks", {}).get("loss", {}).get("metrics", {})
    said = [f"validation loss {losses[VALIDATION_LOSS]:.3f}"] if VALIDATION_LOSS in losses else []
    message = " · ".join([*said, f"report {result['report']}"])
    return Completed(message=message, data=result)


def evaluate_unclaimed(config: Config, dataset_dir: Path, run_dir: Path) -> dict[str, Any]:
    """Score a run that this flow run has not claimed, and write its report."""
    holder, keep = Holder.current(run_dir, current_owner()[0]), config.checkpoint.save_total_limit
    with attach_unclaimed(run_dir, holder, config.run.store, keep):
        return evaluate_run(config, dataset_dir, run_dir)


def _as_trained(config: Config, run_dir: Path) -> Config:
    """The run's own settings, with evaluation, dataset folder, devices and stages of `config`."""
    trained = read_run_config(run_dir)
    folder = config.data.folder or dataset_here(run_dir)
    places = {name: getattr(config.run, name) for name in ("output_dir", "store", "log_level")}
    places["data_dir"] = folder_here(trained.run.data_dir, trained.run.data_store)
    changes = {
        "run": trained.run.model_copy(update=places),
        "data": config.data.model_copy(update={"folder": folder}),
        "launch": config.launch,
        "evaluation": config.evaluation,
        "stages": config.stages,
    }
    return trained.model_copy(update=changes)


@form
@flow(name="evaluate", **FLOW)
@report_failure
@settings
def evaluate(config: Config) -> State[dict[str, Any]]:
    """Evaluate the run `run.name`, or the newest one, with the model that it trained.

    Returns the report's path with the losses and perplexities of the splits.
    """
    refresh_runs(config.run.runs_dir, config.run.store)
    run_dir = latest_run(config)
    config = _as_trained(config, run_dir)
    name_flow_run(run_dir.name, f"run:{run_dir.name}")
    dataset = run_with_retries(plan_dataset, config.stages.shard, config, None)
    return with_losses(evaluate_unclaimed(config, Path(dataset["folder"]), run_dir))
