"""From documents to a dataset folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.form import form, settings
from infini_model.config import Config
from infini_model.data.keeping.named import check_holds_datasets
from infini_model.runtime.errors import DataError
from infini_model.runtime.stored.conditions import check_stores
from tasks.clean import clean
from tasks.download import download
from tasks.failures import EXPECTED, reason, report_failure
from tasks.flow_run import FLOW, name_flow_run
from tasks.shard import build_dataset, place_of, plan_dataset
from tasks.stage import run_with_retries


def prepare_dataset(config: Config) -> dict[str, Any]:
    """Build the dataset folder of the configuration, or reuse it if it is intact.

    Returns its `folder`, its `key`, its `address` if it is in an object store, and whether it was
    `reused`. Raises `DataError` if only `data.share` of it is made.
    """
    dataset = _make_dataset(config)
    if dataset["missing"]:
        raise DataError(f"data.share: {_share_made(config, dataset)}, so there is no dataset yet")
    return dataset


def _share_made(config: Config, dataset: dict[str, Any]) -> str:
    missing = f"{dataset['missing']:,} partitions of other shares are missing"
    return f"{config.data.share} is done; {missing}"


def _make_dataset(config: Config) -> dict[str, Any]:
    """What `prepare_dataset` does, and returns, with the number of `missing` partitions."""
    log = get_run_logger()
    stage = config.stages.shard
    listing = None
    if config.data.folder is None:
        check_holds_datasets(config.run)
        listing = run_with_retries(download, config.stages.download, config)
    plan = run_with_retries(plan_dataset, stage, config, listing)
    if plan["fault"]:
        log.warning("%s; rebuilding its partition", plan["fault"])
    if listing is None:
        log.info("Using dataset %s without changes", place_of(plan))
        dataset = {name: plan[name] for name in ("folder", "key", "address")}
        return dataset | {"reused": True, "missing": 0}
    dataset = run_with_retries(build_dataset, stage, config, listing, plan) | {
        "reused": plan["intact"]
    }
    if not dataset["missing"]:
        log.info("Dataset %s is %s", place_of(dataset), "reused" if plan["intact"] else "ready")
    return dict(dataset)


def clean_up(config: Config) -> None:
    """Remove older datasets if `data.keep` says so. A failure is a warning: the dataset stands."""
    if config.data.keep is None or config.data.folder is not None:
        return
    try:
        run_with_retries(clean, config.stages.clean, config)
    except EXPECTED as error:
        get_run_logger().warning("Older datasets were not removed: %s", reason(error))


@form
@flow(name="preprocess", **FLOW)
@report_failure
@settings
def preprocess(config: Config) -> State[dict[str, Any]]:
    """Download and shard. Returns the dataset's folder and key, and whether it was reused.

    With `data.share`, the dataset may have `missing` partitions; the last share has none.
    """
    check_stores(config.run, builds_dataset=True)
    dataset = _make_dataset(config)
    name = Path(dataset["folder"]).name
    if dataset["missing"]:
        name_flow_run(f"{name} {config.data.share}", f"dataset:{name}")
        return Completed(message=f"share {_share_made(config, dataset)}", data=dataset)
    name_flow_run(name, f"dataset:{name}")
    message = f"nothing new: dataset {name} is reused" if dataset["reused"] else f"dataset {name}"
    get_run_logger().info("%s", message)
    clean_up(config)
    return Completed(message=message, data=dataset)
