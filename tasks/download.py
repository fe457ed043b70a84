"""The download stage: list the files of the source, and fetch what cannot be read in place."""

from __future__ import annotations

from typing import Any

from prefect import task

from infini_model.config import Config
from tasks.failures import failure_as_state
from tasks.stage import STAGE, run_stage


@task(name="download", task_run_name="download {config.data.name}", **STAGE)
@failure_as_state
def download(config: Config) -> dict[str, Any]:
    """List the source's files by what identifies their content; fetch what is missing.

    Returns the listing, and the numbers of files and bytes.
    """
    return run_stage("download", config, config.stages.download)
