"""The whole pipeline: documents, dataset, training, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.elsewhere import (
    check_elsewhere,
    evaluate_elsewhere,
    known_dataset,
    make_dataset,
    train_elsewhere,
)
from flows.evaluate import evaluate_run, evaluate_visited
from flows.form import form, settings
from flows.preprocess import prepare_dataset
from flows.train import prepare_weights, trained_run
from infini_model.config import Config
from infini_model.runtime.errors import DataError
from infini_model.runtime.holders import Owner
from infini_model.runtime.runs import REPORT, REPORT_PAGE, dataset_here, find_run
from infini_model.runtime.stored.conditions import check_stores
from infini_model.runtime.stored.working_copy import refresh_runs
from tasks.failures import concluded
from tasks.flow_run import FLOW, current_owner


@form
@flow(name="pipeline", **FLOW)
@concluded
@settings
def pipeline(config: Config) -> dict[str, Any]:
    """Download, shard, train and evaluate; an interrupted run is resumed.

    Returns the report's path with the losses and perplexities of the splits, unless the evaluation
    is elsewhere. With several machines, only the first one writes the report.
    """
    return complete_run(config)


def complete_run(config: Config) -> dict[str, Any]:
    """All stages of the pipeline, within a flow; returns what `pipeline` does."""
    # First of all: a store that refuses access is found out before any work is done.
    refresh_runs(config.run.runs_dir, config.run.store)
    check_stores(config.run, builds_dataset=config.data.folder is None)
    check_elsewhere(config)
    if "train" in config.deployments:
        dataset = _own_dataset(config, known_dataset(config)) or make_dataset(config)
        run_dir = train_elsewhere(config, dataset)
        if "evaluate" in config.deployments:
            return evaluate_elsewhere(config, dataset, run_dir)
        return evaluate_visited(config, Path(dataset["folder"]), run_dir)
    return _trained_here(config)


def _trained_here(config: Config) -> dict[str, Any]:
    owner, adopt = current_owner()
    weights = prepare_weights(config, owner, adopt=adopt)
    pinned = config if weights is None else weights.pinned_in(config)
    dataset = _own_dataset(config, _dataset_of(config, owner)) or make_dataset(pinned)
    with trained_run(config, dataset, weights, owner, adopt=adopt) as run_dir:
        if config.launch.node_rank > 0:
            return {"report": str(run_dir / REPORT), "html": str(run_dir / REPORT_PAGE)}
        if "evaluate" not in config.deployments:
            return evaluate_run(config, Path(dataset["folder"]), run_dir)
    return evaluate_elsewhere(config, dataset, run_dir)


def _dataset_of(config: Config, owner: Owner | None) -> Path | str | None:
    """The dataset that this flow run already trains on, if it does."""
    run_dir = None if owner is None else find_run(config.run.runs_dir, owner.id)
    return None if run_dir is None else dataset_here(run_dir)


def _own_dataset(config: Config, folder: Path | str | None) -> dict[str, Any] | None:
    """That dataset, for a run that is retried or resumed, even if documents were added since.

    None if it has to be built or rebuilt.
    """
    if folder is None:
        return None
    data = config.data.model_copy(update={"folder": folder})
    try:
        return prepare_dataset(config.model_copy(update={"data": data}))
    except DataError as error:
        get_run_logger().warning("%s; rebuilding it", error)
        return None
