"""The evaluate stage: score a trained run, write its report, and show it in Prefect and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task

from infini_model.config import Config
from tasks import artifacts
from tasks.failures import FIRST, failure_as_state
from tasks.stage import STAGE, named_after_run, run_stage
from tasks.training_view import mlflow_link


@task(name="evaluate", task_run_name=named_after_run, **STAGE)
@failure_as_state
def evaluate_model(config: Config, dataset_dir: str, run_dir: str) -> dict[str, Any]:
    """Write the report and the plots of a run, and show them in MLflow and Prefect.

    Returns the results of all tasks and the paths of the report and its plots.
    """
    arguments = ["--dataset", dataset_dir, "--run-dir", run_dir]
    result = run_stage("evaluate", config, config.stages.evaluate, *arguments, unit="windows")
    description = f"{FIRST}: what came out. For a browser it is {result['html']}"
    plots = map(Path, result["plots"])
    artifacts.show_report("report", Path(result["report"]), plots, description)
    if link := mlflow_link(Path(run_dir), config):
        artifacts.show("mlflow", link)
    return result
