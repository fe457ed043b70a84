"""From documents to a dataset folder."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.dataset_commands import summary
from flows.parameters import as_flow
from infini_model.cleaning import remove_garbage
from infini_model.config import Config
from infini_model.runtime.errors import UserError
from tasks.checks import check_stores
from tasks.download import download
from tasks.failures import reason
from tasks.flow_run import name_flow_run
from tasks.screen import screen
from tasks.shard import shard, use_dataset


@as_flow
def preprocess(config: Config) -> State[dict[str, Any]]:
    """Download and shard. Returns the dataset's folder and key, and whether it was reused."""
    check_stores(config.run, builds_dataset=True)
    if config.data.folder is not None:
        dataset = use_dataset(config)
    else:
        dataset = shard(config, screen(config, download(config)))
    name, known = dataset.folder.name, {"folder", "key", "address"}
    result = dataset.model_dump(mode="json", include=known) | {"reused": dataset.intact}
    name_flow_run(name, f"dataset:{name}")
    message = f"nothing new: dataset {name} is reused" if dataset.intact else f"dataset {name}"
    get_run_logger().info("%s", message)
    if config.data.keep is not None and config.data.folder is None:
        _clean(config, config.data.keep)
    return Completed(message=message, data=result)


def _clean(config: Config, keep: int) -> None:
    """Remove older datasets of the name. A failure is a warning, as the new one is complete."""
    run, log = config.run, get_run_logger()
    try:
        removed = remove_garbage(run.output_dir, run.datasets_dir, keep, only=config.data.name)
    except (UserError, OSError) as error:
        log.warning("Older datasets were not removed: %s", reason(error))
        return
    for problem in removed.problems:
        log.warning("%s", problem)
    log.info("%s", summary(removed, "Removed"))
