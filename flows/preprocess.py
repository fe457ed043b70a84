"""From documents to a dataset folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.form import form, settings
from infini_model.config import Config
from tasks.download import download
from tasks.failures import concluded
from tasks.flow_run import FLOW, name_flow_run
from tasks.shard import build_dataset, plan_dataset
from tasks.stage import perform


def prepare_dataset(config: Config) -> dict[str, Any]:
    """Build the dataset folder of the configuration, or reuse it if it is intact.

    Returns its `folder`, its `key`, and whether it was `reused`.
    """
    log = get_run_logger()
    stage = config.stages.shard
    corpus = None
    if config.data.folder is None:
        corpus = perform(download, config.stages.download, config)
    plan = perform(plan_dataset, stage, config, corpus)
    if plan["fault"]:
        log.warning("%s; rebuilding its partition", plan["fault"])
    if corpus is None:
        log.info("Using dataset %s without changes", plan["folder"])
        return {"folder": plan["folder"], "key": plan["key"], "reused": True}
    dataset = perform(build_dataset, stage, config, corpus, plan) | {"reused": plan["intact"]}
    log.info("Dataset %s is %s", dataset["folder"], "reused" if plan["intact"] else "ready")
    return dict(dataset)


@form
@flow(name="preprocess", **FLOW)
@concluded
@settings
def preprocess(config: Config) -> State[dict[str, Any]]:
    """Download and shard. Returns the dataset's folder and key, and whether it was reused."""
    dataset = prepare_dataset(config)
    name = Path(dataset["folder"]).name
    name_flow_run(name, f"dataset:{name}")
    message = f"nothing new: dataset {name} is reused" if dataset["reused"] else f"dataset {name}"
    get_run_logger().info("%s", message)
    return Completed(message=message, data=dataset)
