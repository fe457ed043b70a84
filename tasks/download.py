"""The download stage: list the files of the source, and fetch what cannot be read in place."""

from __future__ import annotations

from pathlib import Path

from infini_model.config import Config
from infini_model.data.lookup import check_holds_datasets
from tasks.stage import run_stage, run_with_retries


def download(config: Config) -> Path:
    """List the source's files by what identifies their content; fetch what is missing.

    Returns the file with the listing.
    """
    config = config.updated(data={"folder": None})
    check_holds_datasets(config.run)
    return run_with_retries(_download, config.stages, "download", config.data.name, config)


def _download(config: Config) -> Path:
    return Path(run_stage("download", config)["listing"])
