"""The download stage: fetch the documents and fingerprint them."""

from __future__ import annotations

from typing import Any

from prefect import task

from infini_model.config import Config
from tasks.failures import reported
from tasks.stage import STAGE, run_stage


@task(name="download", task_run_name="download {config.data.name}", **STAGE)
@reported
def download(config: Config) -> dict[str, Any]:
    """Fetch missing documents and read each one once.

    Changes are detected by content; the library reuses what it has fetched or read before. Returns
    the corpus file, its fingerprint, and the numbers of documents and bytes.
    """
    return run_stage("download", config, config.stages.download)
