"""From documents to a dataset folder."""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger

from flows.form import form, settings
from infini_model.config import Config
from tasks.download import download
from tasks.shard import build_dataset, plan_dataset
from tasks.stage import options


def prepare_dataset(config: Config) -> dict[str, Any]:
    """The dataset folder that the configuration asks for, reused if it stands intact."""
    log = get_run_logger()
    if config.data.folder is not None:
        plan = plan_dataset.with_options(**options(config.stages.shard))(config, None)
        log.info("Dataset %s is used as it is", plan["folder"])
        return plan
    corpus = download.with_options(**options(config.stages.download))(config)
    plan = plan_dataset.with_options(**options(config.stages.shard))(config, corpus)
    if plan["fault"]:
        log.warning("%s; its partition is made again", plan["fault"])
    build = build_dataset.with_options(
        **options(config.stages.shard), refresh_cache=not plan["intact"]
    )
    # A result from the cache tells where the folder was; the plan, where it has been checked.
    dataset = build(config, corpus, plan) | {"folder": plan["folder"]}
    log.info("Dataset %s is %s", dataset["folder"], "reused" if plan["intact"] else "ready")
    return dataset


@form
@flow(name="preprocess")
@settings("documents", "dataset_name", "tokenizer")
def preprocess(config: Config) -> dict[str, Any]:
    """Download and shard. Returns the dataset's folder, key and size."""
    return prepare_dataset(config)
