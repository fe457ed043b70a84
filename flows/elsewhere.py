"""The stages that `pipeline` and `compare` run as flow runs of deployments: `stages.X.deployment`.

A stage elsewhere is the flow of that stage with the same settings. What it made is opened here by
the code that opens any dataset and any run, and thereby checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prefect import get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.flows import Flow

from flows.evaluate import evaluate
from flows.parameters import Tree, parameters_of, settings_of
from flows.preprocess import prepare_dataset, preprocess
from flows.train import train
from infini_model.config import Config, merge
from infini_model.config.places import output_place
from infini_model.config.tree import RunConfig
from infini_model.runtime.claims import run_to_resume
from infini_model.runtime.errors import ConfigError, DataError, DeviceError, StageError
from infini_model.runtime.runs import REPORT, REPORT_PAGE, is_finished, is_started
from infini_model.runtime.stored.working_copy import refresh_logs, refresh_runs
from infini_model.training.launch.devices import choose_gpus
from tasks.elsewhere import Elsewhere, describe, find_deployment
from tasks.flow_run import current_owner, name_flow_run, tagged

FLOWS: dict[str, Flow[..., Any]] = {"shard": preprocess, "train": train, "evaluate": evaluate}

T = TypeVar("T")


def check_elsewhere(config: Config) -> None:
    """Check before any work that the deployments exist, and what the rest here needs.

    Raises `ConfigError` in one line that names the key; `DeviceError` if the evaluation, unlike the
    training, is here and has not the GPUs that `launch.gpus` asks for.
    """
    if config.deployments and config.launch.num_nodes > 1:
        raise ConfigError(
            f"stages.{next(iter(config.deployments))}.deployment: is not for launch.num_nodes over "
            "1; the machines of one training start by themselves"
        )
    if "shard" in config.deployments and config.data.share is not None:
        raise ConfigError("data.share: is not for stages.shard.deployment; run infini preprocess")
    for name in config.deployments:
        _elsewhere(config, name)
    trains_here = "train" not in config.deployments and config.launch.launcher == "local"
    if not trains_here and "evaluate" not in config.deployments:
        _check_gpus(config)


def _check_gpus(config: Config) -> None:
    try:
        choose_gpus(config.launch.gpus)
    except DeviceError as error:
        remedy = "name a stages.evaluate.deployment, or set launch.gpus=auto"
        raise DeviceError(f"{error}, where the run is evaluated; {remedy}") from error


def _elsewhere(config: Config, name: str) -> Elsewhere:
    """A stage of this flow run; the runs of a sweep, which have names, have their own."""
    key, flow, context = f"stages.{name}.deployment", FLOWS[name].name, FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise StageError(f"{key}: there is no flow run to be a subflow of")
    deployment = find_deployment(key, config.deployments[name], flow)
    identity = " ".join(filter(None, (str(context.flow_run.id), name, config.run.name)))
    return Elsewhere(key, f"{flow} {config.run.preset or 'custom'}", deployment, identity)


def parameters_elsewhere(config: Config, name: str, **data: Any) -> Tree:
    """The parameters for the flow of a stage on another machine; `data` changes that section.

    No stage of it is elsewhere again.
    """
    flow, section = FLOWS[name], config.data.model_copy(update={"keep": None, **data})
    alone = config.model_copy(update={"data": section, "stages": config.stages.in_place})
    given = parameters_of(alone, flow)
    advanced = merge(given["advanced"] or {}, {"run": _places(config.run)})
    # A setting that is null here is not to be the deployment's own.
    return {**dict.fromkeys(settings_of(flow.name)), **given, "advanced": advanced}


def _places(run: RunConfig) -> Tree:
    """The folders by which another machine has the same places."""
    places = {"output_dir": output_place(run.output_dir, run.store)}
    if run.data_dir is not None:
        places["data_dir"] = output_place(run.data_dir, run.data_store)
    return places


def make_dataset(config: Config) -> dict[str, Any]:
    """What `prepare_dataset` does and returns, in place or elsewhere."""
    if "shard" not in config.deployments:
        return prepare_dataset(config)
    stage = _elsewhere(config, "shard")

    def opened(flow_run: FlowRun) -> dict[str, Any]:
        folder = config.run.datasets_dir / _made(stage, flow_run, "dataset")
        data = config.data.model_copy(update={"folder": folder})
        try:
            return prepare_dataset(config.model_copy(update={"data": data}))
        except DataError as error:
            if folder.exists() or config.run.datasets_store is not None:
                raise
            raise _unseen(stage, flow_run, "dataset", folder, "run.data_dir") from error

    return _opened(stage, parameters_elsewhere(config, "shard"), opened)


def known_dataset(config: Config) -> str | None:
    """The dataset that the training elsewhere was started with, if it was."""
    known = _elsewhere(config, "train").known()
    return None if known is None else known.parameters.get("dataset")


def train_elsewhere(config: Config, dataset: dict[str, Any]) -> Path:
    """Train by the deployment of the stage, which claims the run; returns the run's folder.

    A command in a terminal resumes the interrupted run that it would resume in place.
    """
    stage, run = _elsewhere(config, "train"), config.run
    if run.name is None and current_owner()[1]:
        found = run_to_resume(config, dataset_key=dataset["key"])
        name = None if found is None else found.name
        config = config.model_copy(update={"run": run.model_copy(update={"name": name})})
    place = dataset["address"] or Path(dataset["folder"])

    def opened(flow_run: FlowRun) -> Path:
        run_dir = run.runs_dir / _made(stage, flow_run, "run")
        refresh_runs(run.runs_dir, run.store)
        if not is_started(run_dir):
            raise _unseen(stage, flow_run, "run", run_dir, "run.output_dir")
        return run_dir

    run_dir = _opened(stage, parameters_elsewhere(config, "train", folder=place), opened)
    tags = (f"preset:{run.preset or 'custom'}", f"run:{run_dir.name}")
    name_flow_run(run_dir.name, *tags, f"dataset:{Path(dataset['folder']).name}")
    return run_dir


def evaluate_elsewhere(config: Config, dataset: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Evaluate by the deployment of the stage; returns the paths of the report."""
    stage = _elsewhere(config, "evaluate")
    named = config.run.model_copy(update={"name": run_dir.name})
    place = dataset["address"] or Path(dataset["folder"])
    config = config.model_copy(update={"run": named})

    def opened(flow_run: FlowRun) -> dict[str, Any]:
        refresh_logs(run_dir, config.run.store)
        if not is_finished(run_dir):
            raise _unseen(stage, flow_run, "report", run_dir / REPORT, "run.output_dir")
        return {"report": str(run_dir / REPORT), "html": str(run_dir / REPORT_PAGE)}

    return _opened(stage, parameters_elsewhere(config, "evaluate", folder=place), opened)


def _opened(stage: Elsewhere, parameters: Tree, opened: Callable[[FlowRun], T]) -> T:
    """What a stage made, opened here; made again if it was there earlier and is not any more."""
    outcome = stage.run(parameters)
    try:
        return opened(outcome.flow_run)
    except DataError as error:
        if outcome.is_new:
            raise
        get_run_logger().warning("%s; making it again", error)
    return opened(stage.run(parameters, again=True).flow_run)


def _made(stage: Elsewhere, flow_run: FlowRun, kind: str) -> str:
    """The name of the dataset or the run that a flow run made."""
    name = tagged(flow_run, kind)
    if name is None:
        raise DataError(f"{stage.key}: {describe(flow_run)} has no tag {kind}:… that names it")
    return name


def _unseen(stage: Elsewhere, flow_run: FlowRun, kind: str, path: Path, shared: str) -> DataError:
    return DataError(
        f"{stage.key}: {kind} {path.name} of {describe(flow_run)} is not in {path.parent}; the "
        f"machines must share {shared} or use an object store"
    )
