"""The plan and shard stages: identify the requested dataset, and build its missing parts."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from prefect import task
from prefect.artifacts import TableArtifact
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.runtime import task_run
from prefect.states import Completed

from infini_model.config import Config
from infini_model.data.manifest import SPLITS, Manifest, read_manifest
from tasks import artifacts
from tasks.failures import failure_as_state
from tasks.flow_run import attempt, dataset_before
from tasks.stage import STAGE, run_stage

NEW_DATASET = "infini.dataset.ready"


def _plan_name() -> str:
    """The name of a task run: the dataset that is asked for, by its folder if that is given."""
    data = task_run.get_parameters()["config"].data
    asked = data.name if data.folder is None else PurePath(data.folder).name
    return f"plan {asked}{attempt()}"


@task(name="plan", task_run_name=_plan_name, **STAGE)
@failure_as_state
def plan_dataset(config: Config, listing: dict[str, Any] | None) -> dict[str, Any]:
    """Identify the requested dataset by its content key, and what of it stands.

    Trains the tokenizer if requested and not done yet. Without a listing, the dataset is the one in
    `data.folder`, or the newest one. An existing folder is checked to be intact.
    """
    arguments = [] if listing is None else _arguments(listing)
    plan = run_stage("plan", config, config.stages.shard, *arguments)
    counts = [{"partitions": name, "count": plan[name]} for name in ("new", "reused")]
    description = f"What is new of the dataset {Path(plan['folder']).name}, and what is reused"
    artifacts.show("partitions", TableArtifact(table=counts, description=description))
    if plan["intact"]:
        _show(plan)
    return plan


@task(name="shard", task_run_name="shard {config.data.name}-{plan[key]:.16}", **STAGE)
@failure_as_state
def build_dataset(
    config: Config, listing: dict[str, Any], plan: dict[str, Any]
) -> dict[str, Any] | State[dict[str, Any]]:
    """Build missing or damaged partitions, and the dataset folder of all partitions.

    If the plan found the folder intact, the task ends at once in the state Reused. Concurrent runs
    with the same key build it only once. Returns the folder, its key, and how many partitions are
    `missing`: with `data.share`, those that other shares have yet to make.
    """
    dataset = {name: plan[name] for name in ("folder", "key", "address")} | {"missing": 0}
    if plan["intact"]:
        message = f"{place_of(plan)} is intact"
        return Completed(name="Reused", message=message, data=dataset)
    result = run_stage("shard", config, config.stages.shard, *_arguments(listing))
    if result["missing"]:
        return dataset | result
    manifest = _show(result)
    if plan["fault"] is None:
        _announce(result, manifest)
    return result


def _arguments(listing: dict[str, Any]) -> list[str]:
    """What a stage is told of the source, and of what the same schedule made before."""
    previous = dataset_before()
    return ["--listing", listing["listing"], *(["--previous", previous] if previous else [])]


def place_of(dataset: dict[str, Any]) -> str:
    """Where a dataset is: its address if machines share it, else its folder."""
    return str(dataset["address"] or dataset["folder"])


def _show(dataset: dict[str, Any]) -> Manifest:
    """Show the size of each split and where the dataset is; returns its manifest."""
    folder = Path(dataset["folder"])
    manifest = read_manifest(folder)
    rows = [
        {"split": name, **manifest.splits[name].model_dump(include={"documents", "tokens"})}
        for name in SPLITS
    ]
    description = f"Documents and tokens of each split of {place_of(dataset)}"
    artifacts.show("dataset", TableArtifact(table=rows, description=description))
    artifacts.show_folder("dataset-folder", folder, "The tokenised documents of all splits")
    return manifest


def _announce(dataset: dict[str, Any], manifest: Manifest) -> None:
    """Emit the event of a new dataset, for Prefect's automations."""
    resource = {
        "prefect.resource.id": f"infini.dataset.{manifest.key}",
        "prefect.resource.name": manifest.folder_name,
    }
    payload = {
        "folder": dataset["folder"],
        "address": dataset["address"],
        "key": manifest.key,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
    }
    emit_event(NEW_DATASET, resource, payload=payload)
