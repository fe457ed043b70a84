"""The evaluate stage: score a trained run, write its report, and show it in Prefect and MLflow."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_image_artifact, create_markdown_artifact

from infini_model.config import Config
from tasks.stage import STAGE, run_stage

PLOT_LINK = re.compile(r"^!\[.*\]\(plots/.*\)\n+", re.MULTILINE)


@task(name="evaluate", **STAGE)
def evaluate_model(config: Config, dataset_dir: str, run_dir: str) -> dict[str, Any]:
    """Write report.md and the plots of a run, and put them into MLflow and Prefect's artifacts.

    Returns the losses and perplexities and the paths of the report and its plots.
    """
    arguments = ["--dataset", dataset_dir, "--run-dir", run_dir]
    result = run_stage("evaluate", config, config.stages.evaluate, *arguments, unit="windows")
    report = Path(result["report"])
    # Prefect cannot follow the links to the plots; they are artifacts of their own.
    text = PLOT_LINK.sub("", report.read_text(encoding="utf-8"))
    create_markdown_artifact(text, key="report")
    for plot in map(Path, result["plots"]):
        image = base64.b64encode(plot.read_bytes()).decode("ascii")
        create_image_artifact(f"data:image/png;base64,{image}", key=plot.stem.replace("_", "-"))
    return result
