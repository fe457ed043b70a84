"""The evaluate stage: score a trained run, write its report, and show it in Prefect and MLflow."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import ImageArtifact, MarkdownArtifact

from infini_model.config import Config
from tasks import artifacts
from tasks.failures import reported
from tasks.stage import STAGE, named_after_run, run_stage

PLOT_LINK = re.compile(r"^!\[.*\]\(plots/.*\)\n+", re.MULTILINE)


@task(name="evaluate", task_run_name=named_after_run, **STAGE)
@reported
def evaluate_model(config: Config, dataset_dir: str, run_dir: str) -> dict[str, Any]:
    """Write report.md and the plots of a run, and put them into MLflow and Prefect's artifacts.

    Returns the losses and perplexities and the paths of the report and its plots.
    """
    arguments = ["--dataset", dataset_dir, "--run-dir", run_dir]
    result = run_stage("evaluate", config, config.stages.evaluate, *arguments, unit="windows")
    report = Path(result["report"])
    # Prefect cannot follow the links to the plots; they are artifacts of their own.
    text = PLOT_LINK.sub("", report.read_text(encoding="utf-8"))
    artifacts.show("report", MarkdownArtifact(markdown=text))
    for plot in map(Path, result["plots"]):
        image = base64.b64encode(plot.read_bytes()).decode("ascii")
        picture = ImageArtifact(image_url=f"data:image/png;base64,{image}")
        artifacts.show(plot.stem.replace("_", "-"), picture)
    return result
