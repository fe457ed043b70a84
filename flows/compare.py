"""Comparison of runs, after those of a sweep have been run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import TableArtifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.parameters import as_flow
from flows.pipeline import complete_run
from flows.presets import Invocation
from flows.print_comparison import comparison_rows, comparison_sentences, print_comparison
from flows.runs import named_runs
from flows.sweep import runs_of
from infini_model.config import Config, validate
from infini_model.config.tree import MODEL_SPEC
from infini_model.data.build import Dataset
from infini_model.evaluation.compare import compare as compare_runs
from infini_model.runtime.claims import free_name
from infini_model.runtime.errors import DataError, StageError
from infini_model.runtime.runs import is_finished, read_evaluation
from infini_model.runtime.storage import content_key
from tasks import artifacts
from tasks.checks import check_gpus_of_evaluation, refresh_and_check_stores
from tasks.download import download
from tasks.failures import FIRST
from tasks.flow_run import earlier_subflows, name_flow_run
from tasks.screen import screen
from tasks.shard import known_dataset, shard, use_dataset
from tasks.train import outcome
from tasks.weights import fetch_weights


@as_flow
def compare(asked: Invocation) -> State[dict[str, Any]]:
    """Run a sweep, if one is given, then compare its runs and those that are named.

    Finished runs of the sweep are reused, and an interrupted one is resumed. A run that fails does
    not keep the others from being run and compared. Returns the run folders.

    Raises `StageError` at the end if a run has failed.
    """
    named, config = named_runs(asked), asked.config
    if config.comparison.sweep:
        refresh_and_check_stores(config, builds_dataset=config.data.folder is None)
        check_gpus_of_evaluation(config)
    swept, failed = _run_sweep(asked)
    folders = [*named, *swept]
    failures = [f"{name}: {failure}" for name, failure in failed.items()]
    if not folders:
        raise StageError("; ".join(failures))
    comparison = compare_runs(folders, failures)
    print_comparison(comparison)
    found = "\n\n".join([f"{FIRST}: what came out", *comparison_sentences(comparison)])
    table = TableArtifact(table=comparison_rows(comparison), description=found)
    artifacts.show("comparison", table)
    if failed:
        count = f"{len(failed)} of {len(failed) + len(swept)} runs"
        raise StageError(f"{count} failed: {', '.join(failed)}; the comparison says why")
    return Completed(
        message=f"{len(folders)} runs compared", data={"run_dirs": list(map(str, folders))}
    )


def _run_sweep(asked: Invocation) -> tuple[list[Path], dict[str, str]]:
    """Run all combinations, one after another.

    Returns the folders of those that are finished, and why the others, by name, are not.
    """
    runs, log = runs_of(asked), get_run_logger()
    datasets, folders, failed = _earlier_datasets(), list[Path](), dict[str, str]()
    for number, run in enumerate(runs, 1):
        ready = _with_dataset(run, datasets)
        name = str(ready.run.name)
        log.info("Run %d of %d: %s", number, len(runs), name)
        state = swept_run(preset=None, advanced=ready.model_dump(mode="json"), return_state=True)
        if state.is_completed():
            folders.append(Path(state.result()["run_dir"]))
        else:
            failed[name] = state.message or state.name or "failed"
            log.error("Run %d of %d: %s: %s", number, len(runs), name, failed[name])
    return folders, failed


def _earlier_datasets() -> dict[str, Dataset]:
    """The newest datasets that an earlier attempt has made, unless they are damaged."""
    known = dict[str, Dataset]()
    for part in reversed(earlier_subflows(swept_run.name)):
        config = validate(part.parameters["advanced"])
        key = _dataset_key(config.updated(data={"folder": None}))
        try:
            known[key] = known.get(key) or use_dataset(config)
        except DataError as error:
            get_run_logger().warning("%s; rebuilding it", error)
    return known


def _with_dataset(config: Config, known: dict[str, Dataset]) -> Config:
    """The settings of a run with the name that it gets and the dataset that it is to use.

    The dataset is made once for all runs that share it, and then the same for all of them even if
    documents are added meanwhile, also before the sweep is retried.
    """
    key = _dataset_key(config)
    if key not in known:
        weights = fetch_weights(config) if config.data.tokenizer.spec == MODEL_SPEC else None
        known[key] = known_dataset(config) or shard(
            config, screen(config, download(config)), weights
        )
    name = free_name(config, known[key].key)
    return config.updated(data={"folder": known[key].place}, run={"name": name})


def _dataset_key(config: Config) -> str:
    return content_key(config.data_to_tokenize.model_dump(mode="json"))


@as_flow
def swept_run(config: Config) -> State[dict[str, str]]:
    """One run of a sweep, as by `pipeline`; a finished one with this evaluation is reused.

    Called for every run, since Prefect tells the parts of a flow run by their order when it is
    retried. Returns the run folder.
    """
    run_dir = config.run.runs_dir / str(config.run.name)
    evaluation = config.evaluation.model_dump(mode="json")
    if is_finished(run_dir) and read_evaluation(run_dir).get("settings") == evaluation:
        name_flow_run(run_dir.name, f"run:{run_dir.name}")
        get_run_logger().info("Run %s is already finished", run_dir)
    else:
        complete_run(config)
    return Completed(message=outcome(run_dir), data={"run_dir": str(run_dir)})
