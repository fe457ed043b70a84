"""Run folders: how they are named, who holds one, and which interrupted run a command goes on with.

A run folder belongs to one configuration and one dataset. The process that works in it holds its
lock, which the kernel drops when that process ends; a folder that is neither finished nor held was
interrupted, and the same command goes on with it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infini_model.config import Config, dump_config, load_config
from infini_model.errors import ConfigError, DataError
from infini_model.storage import atomic_file, lock, make_folder, point_latest, write_json

# What may differ between the two halves of one run: names, places, devices, records and logs.
_FREE_SECTIONS = frozenset({"evaluation", "stages", "tracking", "data"})
_FREE_KEYS = {
    "run": frozenset({"name", "preset", "output_dir", "data_dir", "log_level"}),
    "training": frozenset(
        {
            "gpus",
            "processes",
            "strategy",
            "deterministic",
            "gradient_checkpointing",
            "num_nodes",
            "node_rank",
            "rdzv_endpoint",
            "logging_steps",
            "save_steps",
            "save_total_limit",
            "tensorboard_dir",
            "hang_timeout_seconds",
            "skip_non_finite",
            "debug",
        }
    ),
}

# For the first machine to make the dataset and begin the run.
JOIN_SECONDS = 3600.0


def identity(config: Config) -> dict[str, Any]:
    """The settings that decide the weights: equal for two commands that continue one run.

    The data's share is not here but in the dataset's key, which depends on content alone.
    """
    tree = config.model_dump(mode="json", exclude=set(_FREE_SECTIONS))
    for section, keys in _FREE_KEYS.items():
        tree[section] = {k: v for k, v in tree[section].items() if k not in keys}
    return tree


def is_finished(run_dir: Path) -> bool:
    """Whether the run has been evaluated; `report.md` is the last thing that is written."""
    return (run_dir / "report.md").is_file()


def read_run_config(run_dir: Path) -> Config:
    """The configuration that a run was started with.

    Raises `DataError` if `run_dir` is no run folder.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise DataError(f"{run_dir}: is no run folder (it has no config.yaml)")
    return load_config(file=path)


def latest_run(config: Config) -> Path:
    """The folder of `run.name`, or of the newest run. Raises `DataError` where there is none."""
    run_dir = config.run.runs_dir / (config.run.name or "latest")
    if not run_dir.is_dir():
        raise DataError(f"{run_dir}: there is no such run; train one first")
    return run_dir.resolve()


def dataset_of(run_dir: Path) -> Path:
    """The dataset folder that a run was started with.

    Raises `DataError` if `run_dir` is no run folder.
    """
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        return Path(record["dataset"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{run_dir}: is no run folder (its run.json cannot be read)") from error


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    for section, keys in one.items():
        for key, value in keys.items():
            if other[section][key] != value:
                return f"{section}.{key} is {other[section][key]!r}, not {value!r}"
    return "the dataset is another"


def _belongs(run_dir: Path, config: Config, dataset_key: str) -> bool:
    try:
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        recorded = identity(read_run_config(run_dir))
    except (FileNotFoundError, DataError, ConfigError, json.JSONDecodeError):
        return False
    return record.get("dataset_key") == dataset_key and recorded == identity(config)


def _numbered(runs_dir: Path, prefix: str) -> list[Path]:
    """The folders `prefix-1`, `prefix-2`, …, newest first."""
    found = {
        int(match[1]): path
        for path in runs_dir.glob(f"{prefix}-*")
        if (match := re.fullmatch(rf"{re.escape(prefix)}-(\d+)", path.name))
    }
    return [found[number] for number in sorted(found, reverse=True)]


def _begin(run_dir: Path, config: Config, dataset_key: str, dataset_dir: Path) -> None:
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": run_dir.name})})
    with atomic_file(run_dir / "config.yaml") as temporary:
        temporary.write_text(dump_config(named), encoding="utf-8")
    record = {"dataset": str(dataset_dir.resolve()), "dataset_key": dataset_key}
    write_json(run_dir / "run.json", record)


def _candidates(config: Config, dataset_key: str) -> Iterator[Path]:
    """Folders to try for the lock: interrupted runs of this configuration, then new names."""
    runs_dir = config.run.runs_dir
    if config.run.name is not None:
        run_dir = runs_dir / config.run.name
        if (run_dir / "run.json").is_file() and not _belongs(run_dir, config, dataset_key):
            difference = _difference(identity(config), identity(read_run_config(run_dir)))
            raise ConfigError(f"run.name: {run_dir} holds another run ({difference})")
        yield run_dir
        raise ConfigError(f"run.name: {run_dir} is in use by another process")
    prefix = config.run.preset or "run"
    existing = _numbered(runs_dir, prefix)
    for run_dir in existing:
        begun = (run_dir / "run.json").is_file()
        if not begun or (not is_finished(run_dir) and _belongs(run_dir, config, dataset_key)):
            yield run_dir
    number = int(existing[0].name.rpartition("-")[2]) + 1 if existing else 1
    while True:
        yield runs_dir / f"{prefix}-{number}"
        number += 1


def _join(config: Config, dataset_key: str) -> Path:
    """The folder that the first machine holds, once it is begun; the others write only logs."""
    run_dir = config.run.runs_dir / str(config.run.name)
    deadline = time.monotonic() + JOIN_SECONDS
    while not _belongs(run_dir, config, dataset_key):
        if time.monotonic() > deadline:
            raise ConfigError(f"run.name: the first machine has not begun this run in {run_dir}")
        time.sleep(0.5)
    return run_dir


@contextlib.contextmanager
def claim_run(config: Config, dataset_key: str, dataset_dir: Path) -> Iterator[Path]:
    """Hold the folder of a run: an interrupted one of the same settings and data, or a new one.

    A run with `run.name` has that folder, also when it is finished already. Of several machines
    the first one holds it, the others join in.

    Raises `ConfigError` if the named folder holds a run of other settings or is in use, or the
    first machine does not come.
    """
    if config.training.node_rank > 0:
        yield _join(config, dataset_key)
        return
    for run_dir in _candidates(config, dataset_key):
        with lock(make_folder(run_dir) / ".lock", wait=False) as held:
            taken_meanwhile = config.run.name is None and is_finished(run_dir)
            if not held or taken_meanwhile:
                continue
            if not (run_dir / "run.json").is_file():
                _begin(run_dir, config, dataset_key, dataset_dir)
            elif not _belongs(run_dir, config, dataset_key):
                continue
            point_latest(run_dir)
            yield run_dir
            return
