"""The plan and shard stages: identify the requested dataset, and build its missing parts."""

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
    """Identify the requested dataset by its content key, and check whether it is intact.

    Trains the tokenizer if requested and not done yet. Without a corpus, the dataset is the one in
    `data.folder`, or the newest one. All checksums of an existing folder are verified.
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
    """Build missing or damaged partitions, and the dataset folder of all partitions.

    If the plan found the folder intact, the task ends at once in the state Reused. Concurrent runs
    with the same key build it only once. Returns the folder and its key.
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
    """Show the size of each split and the folder; returns the folder's manifest."""
    manifest = read_manifest(folder)
    rows = [
        {"split": name, **manifest.splits[name].model_dump(include={"documents", "tokens"})}
        for name in SPLITS
    ]
    artifacts.show("dataset", TableArtifact(table=rows, description=str(folder)))
    artifacts.show_folder("dataset-folder", folder)
    return manifest


def _announce(folder: Path, manifest: Manifest) -> None:
    """Emit the event of a new dataset, for Prefect's automations."""
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
