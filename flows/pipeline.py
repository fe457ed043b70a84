"""The whole pipeline: documents, dataset, training, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.elsewhere import (
    check_elsewhere,
    evaluate_elsewhere,
    known_dataset,
    make_dataset,
    train_elsewhere,
)
from flows.evaluate import evaluate_run, evaluate_unclaimed, with_losses
from flows.form import form, settings
from flows.preprocess import prepare_dataset
from flows.train import outcome, prepare_weights, trained_run
from infini_model.config import Config
from infini_model.runtime.errors import DataError
from infini_model.runtime.holders import Owner
from infini_model.runtime.runs import (
    dataset_here,
    find_run,
    is_started,
    read_run_config,
)
from infini_model.runtime.stored.conditions import check_stores
from infini_model.runtime.stored.working_copy import refresh_runs
from tasks.failures import report_failure
from tasks.flow_run import FLOW, current_owner


@form
@flow(name="pipeline", **FLOW)
@report_failure
@settings
def pipeline(config: Config) -> State[dict[str, Any]]:
    """Download, shard, train and evaluate; an interrupted run is resumed.

    Returns the report's path with the losses and perplexities of the splits, unless the evaluation
    is elsewhere. With several machines only the first one writes the report; the others return the
    run folder.
    """
    result = complete_run(config)
    if "report" not in result:
        message = f"{outcome(Path(result['run_dir']))} · the first machine writes the report"
        return Completed(message=message, data=result)
    return with_losses(result)


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
        return evaluate_unclaimed(config, Path(dataset["folder"]), run_dir)
    return _trained_here(config)


def _trained_here(config: Config) -> dict[str, Any]:
    owner, adopt = current_owner()
    weights = prepare_weights(config, owner, adopt=adopt)
    pinned = config if weights is None else weights.pinned_in(config)
    run_dir = _begun_run(config, owner)
    dataset = None if run_dir is None else _own_dataset(config, dataset_here(run_dir))
    if dataset is None:
        dataset = make_dataset(pinned if run_dir is None else _from_source(pinned, run_dir))
    with trained_run(config, dataset, weights, owner, adopt=adopt) as run_dir:
        if config.launch.node_rank > 0:
            return {"run_dir": str(run_dir)}
        if "evaluate" not in config.deployments:
            return evaluate_run(config, Path(dataset["folder"]), run_dir)
    return evaluate_elsewhere(config, dataset, run_dir)


def _begun_run(config: Config, owner: Owner | None) -> Path | None:
    """The run that this flow run retries, or that `infini resume` names with its dataset."""
    if owner is not None and (own := find_run(config.run.runs_dir, owner.id)):
        return own
    named = config.run.runs_dir / (config.run.name or "")
    if config.run.name is None or config.data.folder is None or not is_started(named):
        return None
    return named if str(dataset_here(named)) == str(config.data.folder) else None


def _from_source(config: Config, run_dir: Path) -> Config:
    """`config` with the source of a run's dataset in place of its folder, if it had one."""
    if read_run_config(run_dir).data.folder is not None:
        return config
    data = config.data.model_copy(update={"folder": None})
    return config.model_copy(update={"data": data})


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
