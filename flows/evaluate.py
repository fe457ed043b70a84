"""Evaluation alone, of a run that has been trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow

from infini_model.config import Config, load_config
from infini_model.runs import dataset_of, latest_run, read_run_config
from tasks.evaluate import evaluate_model
from tasks.shard import plan_dataset
from tasks.stage import options


def evaluate_run(config: Config, dataset_dir: Path, run_dir: Path) -> dict[str, Any]:
    """Score a run and write its report."""
    evaluate = evaluate_model.with_options(**options(config.stages.evaluate))
    return evaluate(config, str(dataset_dir), str(run_dir))


@flow(name="evaluate")
def evaluate(config: Config = load_config("quickstart")) -> dict[str, Any]:
    """Evaluate the run of `run.name`, or the newest one, with the model it was trained as.

    Returns the report's path with the losses and perplexities of the splits.
    """
    run_dir = latest_run(config)
    trained = read_run_config(run_dir)
    data = config.data.model_copy(update={"folder": config.data.folder or dataset_of(run_dir)})
    config = trained.model_copy(
        update={"data": data, "evaluation": config.evaluation, "stages": config.stages}
    )
    dataset = plan_dataset.with_options(**options(config.stages.shard))(config, None)
    return evaluate_run(config, Path(dataset["folder"]), run_dir)
