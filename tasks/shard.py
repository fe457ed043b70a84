"""The plan and shard stages: which dataset is asked for, and making what is missing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import TableArtifact
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed

from infini_model.config import Config
from infini_model.data.manifest import SPLITS, Manifest, read_manifest
from tasks import artifacts
from tasks.failures import reported
from tasks.stage import STAGE, run_stage

NEW_DATASET = "infini.dataset.ready"


@task(name="plan", task_run_name="plan {config.data.name}", **STAGE)
@reported
def plan_dataset(config: Config, corpus: dict[str, Any] | None) -> dict[str, Any]:
    """Tell which dataset is asked for, by its content key, and whether it stands intact.

    Trains the tokenizer where that is asked for and not done. Without a corpus it is the finished
    folder of `data.folder`, or the newest one. Every checksum of a folder that stands is compared.
    """
    arguments = [] if corpus is None else ["--corpus", corpus["corpus"]]
    plan = run_stage("plan", config, config.stages.shard, *arguments)
    if plan["intact"]:
        _show(Path(plan["folder"]))
    return plan


@task(name="shard", task_run_name="shard {config.data.name}-{plan[key]:.16}", **STAGE)
@reported
def build_dataset(
    config: Config, corpus: dict[str, Any], plan: dict[str, Any]
) -> dict[str, Any] | State[dict[str, Any]]:
    """Make the partitions that are missing or damaged, and the dataset folder of all of them.

    Where the plan found the folder intact the task ends at once, in the state Reused. Two runs that
    ask for the same key at once do the work once. Returns the folder and its key.
    """
    if plan["intact"]:
        dataset = {"folder": plan["folder"], "key": plan["key"]}
        message = f"{plan['folder']} is intact"
        return Completed(name="Reused", message=message, data=dataset)
    result = run_stage("shard", config, config.stages.shard, "--corpus", corpus["corpus"])
    folder = Path(result["folder"])
    manifest = _show(folder)
    if plan["fault"] is None:
        _announce(folder, manifest)
    return {"folder": result["folder"], "key": result["key"]}


def _show(folder: Path) -> Manifest:
    """Show the size of each split, and the folder; returns what was read of it."""
    manifest = read_manifest(folder)
    rows = [
        {"split": name, **manifest.splits[name].model_dump(include={"documents", "tokens"})}
        for name in SPLITS
    ]
    artifacts.show("dataset", TableArtifact(table=rows, description=str(folder)))
    artifacts.show_folder("dataset-folder", folder)
    return manifest


def _announce(folder: Path, manifest: Manifest) -> None:
    """Tell Prefect's automations that there is a dataset that was not there before."""
    resource = {
        "prefect.resource.id": f"infini.dataset.{manifest.key}",
        "prefect.resource.name": folder.name,
    }
    payload = {
        "folder": str(folder),
        "key": manifest.key,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
    }
    emit_event(NEW_DATASET, resource, payload=payload)
