"""The train stage: torchrun, retried from the newest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from prefect import task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from infini_model.config import Config
from tasks.stage import STAGE, Throttle

STEP = re.compile(r"^GPU0:.* Step \[(\d+)/(\d+)\]")


@task(name="train", **STAGE)
def train_model(config: Config, dataset_dir: str, run_dir: str) -> str:
    """Train in `run_dir`, or go on from its newest checkpoint; a retry is just that.

    The MLflow run stays the same across retries. Returns `run_dir`.
    """
    from infini_model.training.launch import launch

    log = get_run_logger()
    artifact = create_progress_artifact(0.0, key="train-progress", description="train: steps")
    due = Throttle()

    def on_line(line: str) -> None:
        log.info(line)
        if (step := STEP.match(line)) and due(last=step[1] == step[2]):
            update_progress_artifact(artifact, 100.0 * int(step[1]) / int(step[2]))

    launch(
        config,
        Path(dataset_dir),
        Path(run_dir),
        timeout_seconds=config.stages.train.timeout_seconds,
        on_line=on_line,
    )
    return run_dir
