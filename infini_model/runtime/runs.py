"""Run folders: what they record, and which process works in one.

A run folder belongs to one configuration and one dataset: `config.yaml` holds the settings,
`run.json` names the dataset and the flow run that claimed the folder last. The process that works
in it holds its lock. `infini_model.runtime.claims` decides which folder a command gets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infini_model.config import Config, read_recorded, validate
from infini_model.config.locations import local_folder
from infini_model.runtime.errors import CheckpointError, DataError
from infini_model.runtime.holders import Holder, holder_of
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.runtime.owner import OWNER, last_seen
from infini_model.runtime.records import Record, parse_record, write_record
from infini_model.runtime.storage import (
    MANIFEST,
    read_json_or_empty,
    remove_leftovers,
    retire,
    sha256,
    write_json,
)

LOCK = ".lock"
RUN = "run.json"
EVALUATION = "evaluation.json"
REPORT, REPORT_PAGE = "report.md", "report.html"
INITIAL_WEIGHTS = "initial_weights.json"
# The metric by which runs are ranked and compared.
VALIDATION_LOSS = "evaluation/validation_loss"
# The same loss for runs whose tokenizers differ.
VALIDATION_BITS = "evaluation/validation_bits_per_byte"
CHECKPOINTS, MODEL = "checkpoints", "model"
STEP = re.compile(rf"{CHECKPOINTS}/step-(\d+)")
# The file of a checkpoint that says where in the training it was saved.
STATE = "state.json"
# What commands that list or choose runs read.
RECORDS = frozenset(
    {
        *("config.yaml", RUN, "metrics.jsonl", EVALUATION, "recovery.json"),
        *(INITIAL_WEIGHTS, "logs/mlflow.json", "logs/wandb.json", "logs/trackio.json"),
    }
)
OF_THIS_MACHINE = frozenset({CHECKPOINTS, "heartbeats", "waiting"})

log = logging.getLogger(__name__)


def step_key(step: int) -> str:
    """The folder of a checkpoint, below that of its run."""
    return f"{CHECKPOINTS}/step-{step}"


class RunRecord(Record):
    """What a run belongs to, in `run.json`.

    Attributes:
        dataset: Folder of the dataset, on the machine that claimed the run last without it.
        dataset_key: Content key of the dataset.
        dataset_address: The dataset in an object store, if the folder is a working copy of it.
        max_steps: Total optimizer steps; None with `training.epochs` until training starts.
        parent: Of a branch, the name of the run from whose checkpoint it began.
        parent_step: The step of that checkpoint.
        owner: Id of the flow run that claimed the run last; None if that was none.
        former_owners: Ids of the flow runs that claimed it before another did.
    """

    dataset: Path
    dataset_key: str
    dataset_address: str | None = None
    max_steps: int | None = None
    parent: str | None = None
    parent_step: int | None = None
    owner: str | None = None
    former_owners: tuple[str, ...] = ()


def read_run(run_dir: Path) -> RunRecord:
    """The record of a run. Raises `DataError` if there is none, or it is damaged."""
    try:
        content = (run_dir / RUN).read_bytes()
    except OSError as error:
        raise DataError(f"{run_dir}: not a run folder (its {RUN} cannot be read)") from error
    return parse_record(content, str(run_dir / RUN), RunRecord)


def is_started(run_dir: Path) -> bool:
    """Whether a run was started in this folder, which may be empty or absent."""
    return (run_dir / RUN).is_file()


def record_last_step(run_dir: Path, step: int) -> None:
    """Record the step with which a run ends, known later with `training.epochs` and early stopping.

    Do nothing in a folder that no command has claimed.
    """
    if is_started(run_dir) and (record := read_run(run_dir)).max_steps != step:
        write_record(run_dir / RUN, record.model_copy(update={"max_steps": step}))


def record_evaluation(
    run_dir: Path,
    step: int,
    dataset_key: str,
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Record that the checkpoint of `step` has been evaluated; call after writing the report.

    `intervals` are those of 95% that some of the metrics have, low and high; `settings` the section
    `evaluation` as JSON.
    """
    record = {"step": step, "dataset_key": dataset_key, "metrics": dict(metrics)}
    record |= {"intervals": dict(intervals or {}), "settings": dict(settings or {})}
    write_json(run_dir / EVALUATION, record)


def read_evaluation(run_dir: Path) -> dict[str, Any]:
    """Read the newest record of `record_evaluation`; empty if there is none, or it is damaged."""
    return read_json_or_empty(run_dir / EVALUATION)


def is_finished(run_dir: Path) -> bool:
    """Whether the run has reached its last step and has been evaluated there."""
    with contextlib.suppress(DataError, ValueError, KeyError, TypeError):
        last = read_run(run_dir).max_steps
        return last is not None and int(read_evaluation(run_dir)["step"]) >= last
    return False


def read_run_config(run_dir: Path) -> Config:
    """The configuration a run was started with.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    return validate(recorded_settings(run_dir))


def recorded_settings(run_dir: Path) -> dict[str, Any]:
    """`config.yaml` of a run, as `read_recorded` reads it.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run folder (it has no config.yaml)")
    return read_recorded(path)


def settings_of_run(run_dir: Path) -> list[dict[str, Any]]:
    """Return the settings of a run as trees, each laid over the last: recorded, its places here.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    own = read_run_config(run_dir).run
    run = {"name": run_dir.name, "output_dir": str(run_dir.parent.parent)}
    if data_dir := local_folder(own.data_dir, own.data_store):
        run["data_dir"] = str(data_dir)
    places = {"run": run, "data": {"folder": str(dataset_here(run_dir))}}
    return [recorded_settings(run_dir), places]


def name_prefix(config: Config) -> str:
    """Return the beginning of the name of a run that the user does not name."""
    if (branch_of := config.training.branch_of) is not None:
        return f"{branch_of.partition('@')[0]}-branch"
    return config.run.preset or "run"


def latest_run(config: Config) -> Path:
    """The folder of `run.name`, or of the newest run. Raises `DataError` if there is none."""
    run_dir = config.run.runs_dir / (config.run.name or "latest")
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such run; train one first")
    return run_dir.resolve()


def weights_fingerprint(run_dir: Path) -> str | None:
    """Fingerprint of the pretrained weights that a run began from; None if none are recorded."""
    return read_json_or_empty(run_dir / INITIAL_WEIGHTS).get("fingerprint")


def dataset_here(run_dir: Path) -> Path | str:
    """The dataset of a run, for this machine: a folder, or an address if no folder is here.

    Of a run that another machine has started, it is the folder of that name in this output folder.
    A dataset in the run's own store is found there by the name of its folder.

    Raises `DataError` or `ConfigError` if `run_dir` is not a run folder.
    """
    record = read_run(run_dir)
    here = run_dir.parent.parent / "datasets" / record.dataset.name
    for folder in (record.dataset, here):
        if folder.exists():
            return folder
    store = read_run_config(run_dir).run.datasets_store
    if record.dataset_address in (None, f"{store}/{record.dataset.name}"):
        return record.dataset
    return str(record.dataset_address)


def run_holder(run_dir: Path) -> Holder | None:
    """The process that works in a run now, if any, perhaps on another machine.

    What other machines do with a stored run is as `refresh_runs` found it last.
    """
    return holder_of(run_dir / LOCK) or last_seen(run_dir).holder


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint of a run, newest first, unverified."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / CHECKPOINTS).glob("step-*")
        if (match := STEP.fullmatch(path.relative_to(run_dir).as_posix()))
    ]
    return sorted(found, reverse=True)


def local_steps(run_dir: Path) -> set[int]:
    """The steps of the complete checkpoints in a run folder."""
    return {step for step, path in list_checkpoints(run_dir) if (path / MANIFEST).exists()}


def superseded_checkpoints(run_dir: Path, keep: int) -> list[Path]:
    """All checkpoints but the `keep` newest and the one with the lowest validation loss."""
    found = list_checkpoints(run_dir)
    kept = kept_steps(run_dir, (step for step, _ in found), keep)
    return [path for step, path in found if step not in kept]


def prune_checkpoints(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints but the `keep` newest and the one with the lowest validation loss."""
    for old in superseded_checkpoints(run_dir, keep):
        shutil.rmtree(retire(old), ignore_errors=True)


def verify_checkpoint(checkpoint: Path) -> None:
    """Verify every file against the manifest, reading the whole checkpoint.

    Raises `CheckpointError` that names the first file that is missing or damaged.
    """
    manifest = checkpoint / MANIFEST
    try:
        sums: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest}: is missing or damaged") from error
    for name, expected in sums.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing")
        if sha256(path) != expected:
            raise CheckpointError(f"{path}: is damaged: its checksum does not match the manifest")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that passes verification, or None.

    Warns about a damaged one and falls back to the one before it. Changes nothing on disk.
    """
    for _, path in list_checkpoints(run_dir):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s; falling back to the previous checkpoint", error)
        else:
            return path
    return None


def clear_for_resume(run_dir: Path, checkpoint: Path | None) -> None:
    """Rename checkpoints newer than `checkpoint`, which are damaged; delete temporary files.

    Call it only while no other process writes to the run. A damaged `step-N` becomes
    `damaged-step-N`, which pruning ignores and which can still be inspected.
    """
    for place, _, _ in os.walk(run_dir):  # which follows no links
        remove_leftovers(Path(place))
    for _, path in list_checkpoints(run_dir):
        if path == checkpoint:
            break
        damaged = path.with_name(f"damaged-{path.name}")
        if damaged.exists():
            shutil.rmtree(retire(damaged), ignore_errors=True)
        os.rename(path, damaged)


def kept_steps(run_dir: Path, steps: Iterable[int], keep: int) -> set[int]:
    """The checkpoints to keep: the `keep` newest and the one with the lowest validation loss."""
    found, losses = sorted(steps, reverse=True), read_validation_losses(run_dir)
    best = min((step for step in found if step in losses), key=losses.__getitem__, default=None)
    return {*found[:keep], *([] if best is None else [best])}


def run_folders(runs_dir: Path) -> list[Path]:
    """The folders of all runs, in alphabetical order; `latest` is a link to one of them."""
    visible = runs_dir.glob("[!.]*")
    return sorted(path for path in visible if path.is_dir() and not path.is_symlink())


def find_run(runs_dir: Path, owner_id: str) -> Path | None:
    """The folder that the owner claimed, even if another owner has resumed it since."""
    former = None
    for run_dir in run_folders(runs_dir):
        with contextlib.suppress(DataError):  # It is empty, damaged or another user's.
            record = read_run(run_dir)
            if record.owner == owner_id:
                return run_dir
            if owner_id in record.former_owners:
                former = run_dir
    return former


def is_shared(key: str) -> bool:
    """Return True if a file of a run is small, and of interest to other machines.

    Keys from a store are checked by this too: none of them leaves the run folder.
    """
    parts = key.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    return not hidden and OF_THIS_MACHINE.isdisjoint(parts) and parts[0] not in (MODEL, OWNER)


def small_files(run_dir: Path) -> list[str]:
    """The files of a run that are copied one by one; the report's record last."""
    paths = (Path(folder, name) for folder, _, names in os.walk(run_dir) for name in names)
    keys = (path.relative_to(run_dir).as_posix() for path in paths if not path.is_symlink())
    return sorted(filter(is_shared, keys), key=lambda key: (key == EVALUATION, key))
