"""The clean stage: remove older datasets of a name, and what only they needed."""

from __future__ import annotations

from prefect import get_run_logger, task
from rich.filesize import decimal

from infini_model.config import Config
from tasks.failures import failure_as_state
from tasks.stage import STAGE, run_stage


@task(name="clean", task_run_name="clean {config.data.name}", **STAGE)
@failure_as_state
def clean(config: Config) -> None:
    """Keep `data.keep` datasets of the name and those that are in use or that runs refer to."""
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
