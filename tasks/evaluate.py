"""The evaluate stage: score a trained run, write its report, and show it in Prefect and MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import MarkdownArtifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from infini_model.config import Config
from infini_model.data.build import Dataset
from infini_model.runtime.runs import VALIDATION_LOSS
from tasks import artifacts
from tasks.failures import FIRST
from tasks.stage import run_stage, run_with_retries
from tasks.train import mlflow_link, outcome


def evaluate(config: Config, dataset: Dataset, run_dir: Path) -> dict[str, Any]:
    """Score a trained run and write its report.

    Returns the results of all tasks and the paths of the report and its plots; only the run folder
    on any but the first of several machines, which writes the report.
    """
    if config.launch.node_rank > 0:
        return {"run_dir": str(run_dir)}
    return run_with_retries(
        _evaluate, config.stages, "evaluate", run_dir.name, config, dataset.folder, run_dir
    )


def completed(result: dict[str, Any]) -> State[dict[str, Any]]:
    """The end of a flow run with the result of `evaluate`, and what it says in short."""
    if "report" in result:
        losses = result.get("tasks", {}).get("loss", {}).get("metrics", {})
        loss = losses.get(VALIDATION_LOSS)
        said = [] if loss is None else [f"validation loss {loss:.3f}"]
        said.append(f"report {result['report']}")
    else:
        said = [outcome(Path(result["run_dir"])), "the first machine writes the report"]
    return Completed(message=" · ".join(said), data=result)


def _evaluate(config: Config, dataset_dir: Path, run_dir: Path) -> dict[str, Any]:
    arguments = ["--dataset", str(dataset_dir), "--run-dir", str(run_dir)]
    result = run_stage("evaluate", config, *arguments, unit="windows")
    description = f"{FIRST}: what came out. For a browser it is {result['html']}"
    with artifacts.warn_on_error("report"):
        text = artifacts.with_pictures(Path(result["report"]), map(Path, result["plots"]))
        artifacts.show("report", MarkdownArtifact(markdown=text, description=description))
    if link := mlflow_link(run_dir, config):
        artifacts.show("mlflow", link)
    return result
