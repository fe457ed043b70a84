"""Training alone, on a finished dataset."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, get_run_logger

from flows.form import form, settings
from infini_model.config import Config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.runs import is_finished
from tasks.failures import concluded
from tasks.flow_run import FLOW, current_owner, name_flow_run
from tasks.shard import plan_dataset
from tasks.stage import perform
from tasks.train import train_model


def train_run(config: Config, dataset_dir: Path, run_dir: Path) -> None:
    """Train in a run folder that this process has claimed, unless the run is already evaluated.

    A run with its last checkpoint is resumed too: its last scores may not have been written.
    """
    log = get_run_logger()
    name_flow_run(run_dir.name, f"preset:{config.run.preset or 'custom'}", f"run:{run_dir.name}")
    if is_finished(run_dir):
        log.info("Run %s is already finished", run_dir)
        return
    log.info("Training in %s", run_dir)
    perform(train_model, config.stages.train, config, str(dataset_dir), str(run_dir))


@form
@flow(name="train", **FLOW)
@concluded
@settings
def train(config: Config) -> dict[str, str]:
    """Train on the dataset in `data.folder`, or the newest one. Returns the run folder."""
    dataset = perform(plan_dataset, config.stages.shard, config, None)
    folder = Path(dataset["folder"])
    owner, adopt = current_owner()
    with claim_run(config, dataset["key"], folder, owner=owner, adopt=adopt) as run_dir:
        train_run(config, folder, run_dir)
        return {"run_dir": str(run_dir)}
