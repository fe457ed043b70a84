"""The shard stage: a dataset that is finished, or one that is made of the source's files.

Its first part, the plan, identifies the dataset and what of it already exists; the second builds
the rest.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import cast

from prefect import get_run_logger
from prefect.artifacts import TableArtifact
from prefect.events import emit_event
from prefect.states import Completed

from infini_model.config import Config
from infini_model.data.build import Dataset
from infini_model.data.manifest import SPLITS, Manifest, read_manifest
from infini_model.runtime.errors import DataError
from infini_model.runtime.runs import dataset_here, find_run, is_started, read_run_config
from infini_model.training.initial_weights import InitialWeights
from tasks import artifacts
from tasks.flow_run import current_owner
from tasks.stage import run_stage, run_with_retries

NEW_DATASET = "infini.dataset.ready"


def known_dataset(config: Config) -> Dataset | None:
    """The dataset to use as it stands, even if documents were added since.

    It is that of the run which this flow run retries or `infini resume` names, else the one in
    `data.folder`. None if there is none, or if it is damaged and can be made again. Raises
    `DataError` if it cannot, since the user gave it as `data.folder`.
    """
    run_dir = _begun_run(config)
    folder = config.data.folder if run_dir is None else dataset_here(run_dir)
    if folder is None:
        return None
    try:
        return use_dataset(config.updated(data={"folder": folder}))
    except DataError as error:
        # To resume sets `data.folder`: what the user gave is in the settings of the run.
        asked = config if run_dir is None else read_run_config(run_dir)
        if asked.data.folder is not None:
            raise
        get_run_logger().warning("%s; rebuilding it", error)
        return None


def _begun_run(config: Config) -> Path | None:
    """The run that this flow run retries, or that `infini resume` names with its dataset."""
    owner = current_owner()
    if owner.id is not None and (own := find_run(config.run.runs_dir, owner.id)):
        return own
    if config.run.name is None or config.data.folder is None:
        return None
    named = config.run.runs_dir / config.run.name
    is_its_own = is_started(named) and str(dataset_here(named)) == str(config.data.folder)
    return named if is_its_own else None


def use_dataset(config: Config) -> Dataset:
    """The dataset in `data.folder`, or the newest one, which is checked to be intact."""
    folder = config.data.folder
    asked = config.data.name if folder is None else PurePath(folder).name
    dataset = run_with_retries(_plan, config.stages, "plan", asked, config, None)
    get_run_logger().info("Using dataset %s without changes", dataset.place)
    return dataset


def shard(config: Config, listing: Path, weights: InitialWeights | None = None) -> Dataset:
    """Tokenise the files in the listing of `download` into a dataset, or reuse what already exists.

    `weights` are those whose tokenizer `data.tokenizer.spec: model` means.
    """
    config = config if weights is None else weights.pinned_in(config)
    config = config.updated(data={"folder": None})
    log, name = get_run_logger(), config.data.name
    plan = run_with_retries(_plan, config.stages, "plan", name, config, listing)
    if plan.fault:
        log.warning("%s; rebuilding its partition", plan.fault)
    subject = f"{name}-{plan.key:.16}"
    dataset = run_with_retries(_build, config.stages, "shard", subject, config, listing, plan)
    log.info("Dataset %s is %s", dataset.place, "reused" if dataset.intact else "ready")
    return dataset


def _plan(config: Config, listing: Path | None) -> Dataset:
    """Identify the requested dataset by its content key, and what of it already exists.

    Trains the tokenizer if requested and not done yet. Without a listing, the dataset is the one in
    `data.folder`, or the newest one. An existing folder is checked to be intact.
    """
    arguments = [] if listing is None else ["--listing", str(listing)]
    plan = Dataset.model_validate(run_stage("plan", config, *arguments))
    counts = [{"partitions": name, "count": getattr(plan, name)} for name in ("new", "reused")]
    description = f"What is new of the dataset {plan.folder.name}, and what is reused"
    artifacts.show("partitions", TableArtifact(table=counts, description=description))
    if plan.intact:
        _show(plan)
    return plan


def _build(config: Config, listing: Path, plan: Dataset) -> Dataset:
    """Build missing or damaged partitions, and the dataset folder of all partitions.

    If the plan found the folder intact, the task ends at once in the state Reused. Concurrent runs
    with the same key build it only once.
    """
    if plan.intact:
        message = f"{plan.place} is intact"
        return cast("Dataset", Completed(name="Reused", message=message, data=plan))
    made = run_stage("shard", config, "--listing", str(listing))
    dataset = Dataset.model_validate(plan.model_dump() | made)
    manifest = _show(dataset)
    if plan.fault is None:
        _announce(dataset, manifest)
    return dataset


def _show(dataset: Dataset) -> Manifest:
    """Show the size of each split and where the dataset is; returns its manifest."""
    manifest = read_manifest(dataset.folder)
    rows = [
        {"split": name, **manifest.splits[name].model_dump(include={"documents", "tokens"})}
        for name in SPLITS
    ]
    description = f"Documents and tokens of each split of {dataset.place}"
    artifacts.show("dataset", TableArtifact(table=rows, description=description))
    about = "The tokenised documents of all splits"
    artifacts.show_folder("dataset-folder", dataset.folder, about)
    return manifest


def _announce(dataset: Dataset, manifest: Manifest) -> None:
    """Emit the event of a new dataset, for Prefect's automations."""
    resource = {
        "prefect.resource.id": f"infini.dataset.{manifest.key}",
        "prefect.resource.name": manifest.folder_name,
    }
    payload = dataset.model_dump(mode="json", include={"folder", "address", "key"})
    payload |= {"documents": manifest.corpus.documents, "tokens": manifest.tokens}
    emit_event(NEW_DATASET, resource, payload=payload)
