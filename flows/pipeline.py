"""The whole pipeline: documents, dataset, training, report."""

from __future__ import annotations

from typing import Any

from prefect.client.schemas.objects import State

from flows.parameters import as_flow
from infini_model.config import Config
from tasks.checks import check_gpus_of_evaluation, check_training_memory, refresh_and_check_stores
from tasks.download import download
from tasks.evaluate import completed, evaluate
from tasks.screen import screen
from tasks.shard import known_dataset, shard
from tasks.train import train
from tasks.weights import fetch_weights


@as_flow
def pipeline(config: Config) -> State[dict[str, Any]]:
    """Download, shard, train and evaluate; an interrupted run is resumed.

    Returns the report's path with the losses and perplexities of the splits. With several machines
    only the first one writes the report; the others return the run folder.
    """
    return completed(complete_run(config))


def complete_run(config: Config) -> dict[str, Any]:
    """All stages, within a flow. Each is retried by itself, and reuses what stands."""
    refresh_and_check_stores(config, builds_dataset=config.data.folder is None)
    check_gpus_of_evaluation(config)
    check_training_memory(config)
    weights = fetch_weights(config)
    dataset = known_dataset(config)
    if dataset is None:
        dataset = shard(config, screen(config, download(config)), weights)
    with train(config, dataset, weights) as run_dir:
        return evaluate(config, dataset, run_dir)
