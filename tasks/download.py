"""The download stage: bring the documents here and fingerprint them."""

from __future__ import annotations

from typing import Any

from prefect import task

from infini_model.config import Config
from tasks.failures import reported
from tasks.stage import STAGE, run_stage


@task(name="download", task_run_name="download {config.data.name}", **STAGE)
@reported
def download(config: Config) -> dict[str, Any]:
    """Fetch what is missing and read every document once.

    Only the content tells whether something changed. What has been fetched or read before is
    reused by the library. Returns the corpus file, its fingerprint,
    documents and bytes.
    """
    return run_stage("download", config, config.stages.download)
