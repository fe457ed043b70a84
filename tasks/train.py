"""The train stage: torchrun, retried from the newest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from prefect import task
from prefect.logging import get_run_logger

from infini_model.config import Config
from tasks.control import stopped_with_flow_run
from tasks.progress import Progress
from tasks.stage import STAGE

STEP = re.compile(r"^GPU0:.* Step \[(\d+)/(\d+)\]")


@task(name="train", **STAGE)
def train_model(config: Config, dataset_dir: str, run_dir: str) -> str:
    """Train in `run_dir`, or go on from its newest checkpoint; a retry is just that.

    What a retry does differently, and whether there is one, follows from how the training failed
    (`infini_model.training.recovery`). The MLflow run stays the same across retries. Returns
    `run_dir`.
    """
    from infini_model.training.launch import launch

    log = get_run_logger()
    folder = Path(run_dir)

    def saved() -> str:
        steps = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
        return f"step {max(steps)} is saved" if steps else ""

    with (
        Progress("train", "steps", logged=False) as progress,
        stopped_with_flow_run(saved) as stop,
    ):

        def on_line(line: str) -> None:
            log.info(line)
            if step := STEP.match(line):
                progress.show(int(step[1]), int(step[2]))

        launch(
            config,
            Path(dataset_dir),
            folder,
            timeout_seconds=config.stages.train.timeout_seconds,
            on_line=on_line,
            stop=stop,
        )
    return run_dir
