"""Run folders: what they record, and which process works in one.

A run folder belongs to one configuration and one dataset: `config.yaml` holds the settings,
`run.json` names the dataset and the flow run that claimed the folder last. The process that works
in it holds its lock. `infini_model.runtime.claims` decides which folder a command gets.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infini_model.config import Config, read_tree, validate
from infini_model.config.moved import with_keys_moved
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.holders import Holder, Owner, holder_of
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.storage import write_json

LOCK = ".lock"
EVALUATION = "evaluation.json"


def record_evaluation(
    run_dir: Path, step: int, dataset_key: str, metrics: Mapping[str, float]
) -> None:
    """Record that the checkpoint of `step` has been evaluated; call after writing `report.md`."""
    record = {"step": step, "dataset_key": dataset_key, "metrics": dict(metrics)}
    write_json(run_dir / EVALUATION, record)


def is_finished(run_dir: Path) -> bool:
    """Whether the run has reached its last step and has been evaluated there."""
    try:
        evaluated, last = _evaluated_step(run_dir), last_step(run_dir)
    except (DataError, ConfigError, ValueError, KeyError, TypeError):
        return False
    return evaluated is not None and last is not None and evaluated >= last


def _evaluated_step(run_dir: Path) -> int | None:
    """Step of the last evaluation, None if there is none. Raises `ValueError`, `KeyError`."""
    with contextlib.suppress(FileNotFoundError):
        record = json.loads((run_dir / EVALUATION).read_text(encoding="utf-8"))
        return int(record["step"])
    # Older versions wrote only the report. It covers the last step if no later step is recorded.
    with contextlib.suppress(FileNotFoundError):
        written = (run_dir / "report.md").stat().st_mtime
        newest = read_newest(run_dir, "step", "time")
        if newest and newest["time"] <= written:
            return int(newest["step"])
    return None


def last_step(run_dir: Path) -> int | None:
    """Total optimizer steps of a run; None with `training.epochs` until training starts.

    Raises `DataError` or `ConfigError` if it cannot be read.
    """
    steps = read_record(run_dir).get("max_steps")
    # Older versions wrote it to config.yaml only, which is slower to read.
    return read_run_config(run_dir).training.max_steps if steps is None else int(steps)


def record_last_step(run_dir: Path, step: int) -> None:
    """Record the total steps of a run that is configured by `training.epochs`."""
    if is_started(run_dir) and last_step(run_dir) is None:
        write_json(run_dir / "run.json", read_record(run_dir) | {"max_steps": step})


def read_run_config(run_dir: Path) -> Config:
    """The configuration a run was started with.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    return validate(recorded_settings(run_dir))


def recorded_settings(run_dir: Path) -> dict[str, Any]:
    """`config.yaml` of a run, also of one that an earlier version started. Raises `DataError`."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise DataError(f"{run_dir}: not a run folder (it has no config.yaml)")
    return with_keys_moved(read_tree(path))


def latest_run(config: Config) -> Path:
    """The folder of `run.name`, or of the newest run. Raises `DataError` if there is none."""
    run_dir = config.run.runs_dir / (config.run.name or "latest")
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: no such run; train one first")
    return run_dir.resolve()


def read_record(run_dir: Path) -> dict[str, Any]:
    """Contents of `run.json`. Raises `DataError` if `run_dir` is not a run folder."""
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{run_dir}: not a run folder (its run.json cannot be read)") from error
    if not isinstance(record, dict) or "dataset" not in record:
        raise DataError(f"{run_dir}: not a run folder (its run.json names no dataset)")
    return record


def is_started(run_dir: Path) -> bool:
    """Whether a run was started in this folder, which may be empty or absent."""
    return (run_dir / "run.json").is_file()


def dataset_of(run_dir: Path) -> Path:
    """The dataset folder a run was started with.

    Raises `DataError` if `run_dir` is not a run folder.
    """
    return Path(read_record(run_dir)["dataset"])


def owner_of(run_dir: Path) -> Owner | None:
    """Owner of the last claim on a run, if known. Raises `DataError` as `dataset_of` does."""
    record = read_record(run_dir).get("owner")
    return None if record is None else Owner(record["id"], record["url"])


def run_holder(run_dir: Path) -> Holder | None:
    """The process that works in a run folder now, if any."""
    return holder_of(run_dir / LOCK)


def find_run(runs_dir: Path, owner_id: str) -> Path | None:
    """The folder that the owner claimed, even if another owner has resumed it since."""
    former = None
    for path in sorted(runs_dir.glob("*/run.json")):
        # `latest` points to one of the other folders.
        if path.parent.is_symlink():
            continue
        try:
            record = read_record(path.parent)
        except DataError:
            continue
        if (record.get("owner") or {}).get("id") == owner_id:
            return path.parent
        if owner_id in record.get("former_owners", []):
            former = path.parent
    return former
