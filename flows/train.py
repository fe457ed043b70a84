"""Training alone, on a finished dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed

from flows.form import form, settings
from infini_model.config import Config
from infini_model.runtime.claims import claim_run, run_to_resume
from infini_model.runtime.holders import Owner
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.runs import is_finished
from infini_model.runtime.stored.conditions import check_stores
from infini_model.runtime.stored.working_copy import has_checkpoint, refresh_runs
from infini_model.training.initial_weights import (
    InitialWeights,
    read_initial_weights,
    record_initial_weights,
)
from infini_model.training.run_status import is_trained, saved_step
from infini_model.training.sizing.fitting import Machine, check_kernels, check_memory
from infini_model.training.sizing.shape import (
    UnknownShapeError,
    known_shape,
    with_objective,
)
from tasks.ending import end_predecessors
from tasks.failures import report_failure
from tasks.flow_run import FLOW, current_owner, name_flow_run
from tasks.shard import plan_dataset
from tasks.stage import run_with_retries
from tasks.train import train_model
from tasks.weights import fetch_weights


def check_training_memory(config: Config, weights: InitialWeights | None = None) -> None:
    """Log what the training needs, unless only what is yet to be read says how large its model is.

    Raises `ConfigError` if that is more than this machine has, `DeviceError` as `choose_gpus` and
    `check_kernels` do.
    """
    log = get_run_logger()
    if config.launch.launcher == "ray":
        log.info("Memory of the training: checked on the nodes of the Ray cluster")
        return
    machine = Machine.of(config)
    check_kernels(config.model, machine.device, compiled=config.launch.compile)
    try:
        shaped = known_shape(config) if weights is None else weights.shaped(config)
    except UnknownShapeError as unknown:
        log.info("Memory of the training: %s", unknown)
        return
    need = check_memory(with_objective(shaped), machine, is_pretrained=weights is not None)
    log.info("Memory of the training: %s", need)


def prepare_weights(config: Config, owner: Owner | None, *, adopt: bool) -> InitialWeights | None:
    """The weights that `model.initial_weights` names; None without them.

    Those of a run that resumes from a checkpoint are as it recorded them: it needs neither the hub
    nor the folder, except with LoRA, whose checkpoints lack the frozen weights. With several
    machines only the first one reads them. Before and after, the memory is checked.
    """
    check_training_memory(config)
    if config.model.initial_weights is None or config.launch.node_rank > 0:
        return None
    run_dir = run_to_resume(config, owner=owner, adopt=adopt)
    if run_dir is not None and has_checkpoint(run_dir, config.run.store):
        recorded = read_initial_weights(run_dir)
        is_enough = config.training.lora is None
        if recorded is not None and (is_enough or recorded.folder.is_dir()):
            return recorded
    weights = _fetch(config)
    check_training_memory(config, weights)
    return weights


def _fetch(config: Config) -> InitialWeights:
    found = run_with_retries(fetch_weights, config.stages.weights, config)
    return InitialWeights.model_validate(found)


@contextlib.contextmanager
def trained_run(
    config: Config,
    dataset: Mapping[str, Any],
    weights: InitialWeights | None,
    owner: Owner | None,
    *,
    adopt: bool,
) -> Iterator[Path]:
    """Claim a run of these settings, train it, and hold it for the block; yields its folder.

    Raises as `claim_run` does, and what the train stage failed with.
    """
    folder = Path(dataset["folder"])
    with claim_run(
        config,
        dataset["key"],
        folder,
        weights=None if weights is None else weights.fingerprint,
        address=dataset["address"],
        owner=owner,
        adopt=adopt,
    ) as run_dir:
        _train(config, folder, run_dir, weights)
        yield run_dir


def _train(
    config: Config, dataset_dir: Path, run_dir: Path, weights: InitialWeights | None
) -> None:
    """Train in a run folder that this process has claimed, unless the run is already evaluated.

    A run with its last checkpoint is resumed too: its last scores may not have been written.
    """
    log = get_run_logger()
    tags = (f"preset:{config.run.preset or 'custom'}", f"run:{run_dir.name}")
    name_flow_run(run_dir.name, *tags, f"dataset:{dataset_dir.name}")
    if is_finished(run_dir):
        log.info("Run %s is already finished", run_dir)
        return
    if is_trained(run_dir):
        # All other flows go on to evaluate it.
        is_end = flow_run.get_flow_name() == train.name
        advice = f"; infini resume {run_dir.name} evaluates it, and another run.name or run.seed"
        log.info(
            "Run %s is already trained%s", run_dir, f"{advice} starts a new run" if is_end else ""
        )
    else:
        log.info("Training in %s", run_dir)
    if weights is not None:
        # The claim may have gone to a new run, not to the one whose record these are from.
        if saved_step(run_dir) is None and not weights.folder.is_dir():
            weights = _fetch(config)
        record_initial_weights(run_dir, weights)
    run_with_retries(train_model, config.stages.train, config, str(dataset_dir), str(run_dir))


def outcome(run_dir: Path) -> str:
    """What came out of a training, in short; of several machines only the first one has losses."""
    newest, said = read_newest(run_dir, "step", "validation/loss"), [f"run {run_dir.name}"]
    if "step" in newest:
        said.append(f"{newest['step']:,.0f} steps")
    if "validation/loss" in newest:
        said.append(f"validation loss {newest['validation/loss']:.3f}")
    return " · ".join(said)


@form
@flow(name="train", **FLOW)
@report_failure
@settings
def train(config: Config) -> State[dict[str, str]]:
    """Train on the dataset in `data.folder`, or the newest one. Returns the run folder."""
    refresh_runs(config.run.runs_dir, config.run.store)
    check_stores(config.run, builds_dataset=False)
    owner, adopt = current_owner()
    weights = prepare_weights(config, owner, adopt=adopt)
    dataset = run_with_retries(plan_dataset, config.stages.shard, config, None)
    with trained_run(config, dataset, weights, owner, adopt=adopt) as run_dir:
        done = outcome(run_dir)
        end_predecessors(run_dir, done)
        return Completed(message=done, data={"run_dir": str(run_dir)})
