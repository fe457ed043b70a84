"""The clean stage: remove older datasets of a name, and what only they needed."""

from __future__ import annotations

from prefect import get_run_logger
from rich.filesize import decimal

from infini_model.config import Config
from tasks.stage import run_stage, run_with_retries


def clean(config: Config) -> None:
    """Keep `data.keep` datasets of the name and those that are in use or that runs refer to."""
    run_with_retries(_clean, config.stages.clean, "clean", config.data.name, config)


def _clean(config: Config) -> None:
    result = run_stage("clean", config, config.stages.clean)
    log = get_run_logger()
    for problem in result["problems"]:
        log.warning("%s", problem)
    counts, freed = result["counts"], result["bytes"]
    if not counts:
        log.info("Nothing to clean up: %s datasets are kept", config.data.keep)
        return
    removed = ", ".join(f"{count:,} {kind}{'s' * (count != 1)}" for kind, count in counts.items())
    log.info("Removed %s: %s are free again", removed, decimal(freed))
