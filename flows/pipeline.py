"""The whole story: documents, dataset, training, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from flows.evaluate import evaluate_run
from flows.form import form, settings
from flows.owner import current_owner
from flows.preprocess import prepare_dataset
from flows.train import train_run
from infini_model.config import Config
from infini_model.runs import claim_run
from tasks.failures import concluded
from tasks.flow_run import FLOW


@form
@flow(name="pipeline", **FLOW)
@concluded
@settings(
    "documents",
    "dataset",
    "steps",
    "learning_rate",
    "batch_size",
    "context_length",
    "devices",
    "resume",
    "name",
    "seed",
)
def pipeline(config: Config) -> dict[str, Any]:
    """Download, shard, train and evaluate; an interrupted run is gone on with.

    Returns the report's path with the losses and perplexities of the splits; of several machines
    the first one writes the report.
    """
    dataset = prepare_dataset(config)
    folder = Path(dataset["folder"])
    owner, adopt = current_owner()
    with claim_run(config, dataset["key"], folder, owner=owner, adopt=adopt) as run_dir:
        train_run(config, folder, run_dir)
        if config.training.node_rank > 0:
            return {"report": str(run_dir / "report.md")}
        return evaluate_run(config, folder, run_dir)
