"""The whole pipeline: documents, dataset, training, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows.evaluate import evaluate_run
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

    Returns the report's path with the losses and perplexities of the splits. With several machines,
    only the first one writes the report.
    """
    return complete_run(config)


def complete_run(config: Config) -> dict[str, Any]:
    """All stages of the pipeline, within a flow; returns what `pipeline` does."""
    owner, adopt = current_owner()
    # First of all: a store that refuses access is found out before any work is done.
    refresh_runs(config.run.runs_dir, config.run.store)
    check_stores(config.run, builds_dataset=config.data.folder is None)
    weights = prepare_weights(config, owner, adopt=adopt)
    pinned = config if weights is None else weights.pinned_in(config)
    dataset = _own_dataset(config, owner) or prepare_dataset(pinned)
    with trained_run(config, dataset, weights, owner, adopt=adopt) as run_dir:
        if config.launch.node_rank > 0:
            return {"report": str(run_dir / REPORT), "html": str(run_dir / REPORT_PAGE)}
        return evaluate_run(config, Path(dataset["folder"]), run_dir)


def _own_dataset(config: Config, owner: Owner | None) -> dict[str, Any] | None:
    """The dataset that this flow run already trains on; None if it has to be built or rebuilt.

    A run that is retried or resumed keeps its dataset, even if documents were added since.
    """
    run_dir = None if owner is None else find_run(config.run.runs_dir, owner.id)
    if run_dir is None:
        return None
    data = config.data.model_copy(update={"folder": dataset_here(run_dir)})
    try:
        return prepare_dataset(config.model_copy(update={"data": data}))
    except DataError as error:
        get_run_logger().warning("%s; rebuilding it", error)
        return None
