"""Claims on run folders: which interrupted run a command resumes, or where it starts a new one.

A process locks the folder it works in, and the kernel releases the lock when the process exits. A
run that is neither finished nor locked was interrupted: the same command resumes it. A flow run
gets its own folder back unless another owner has resumed it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from infini_model.config import Config, dump_config, load_config
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.holders import Holder, Owner, hold
from infini_model.runtime.runs import (
    LOCK,
    dataset_of,
    find_run,
    is_finished,
    is_started,
    read_record,
    read_run_config,
    recorded_settings,
    run_holder,
)
from infini_model.runtime.storage import atomic_file, make_folder, point_latest, write_json

log = logging.getLogger(__name__)

# How long other machines wait for the first one to build the dataset and start the run.
JOIN_SECONDS = 3600.0
# How long to wait for an earlier process of the same flow run: the grace period of training, and
# some margin.
RELEASE_SECONDS = 90.0
RELEASE_POLL_SECONDS = 0.2


def resume_config(run_dir: Path, overrides: Iterable[str | Mapping[str, Any]] = ()) -> Config:
    """Settings to resume a run with: those it recorded, its dataset, then `overrides`.

    Raises `DataError` if `run_dir` is not a run folder, `ConfigError` if an override is invalid,
    names another run folder, or changes a setting that decides the weights.
    """
    where = {"name": run_dir.name, "output_dir": str(run_dir.parent.parent)}
    settings = {"run": where, "data": {"folder": str(dataset_of(run_dir))}}
    own = read_run_config(run_dir)
    config = load_config(overrides=[recorded_settings(run_dir), settings, *overrides])
    if (config.run.name, str(config.run.output_dir)) != (where["name"], where["output_dir"]):
        raise ConfigError(f"run.name: {run_dir} can only be resumed under its own name and folder")
    if config.identity != own.identity:
        difference = _difference(config.identity, own.identity)
        raise ConfigError(f"{run_dir} cannot be resumed with different settings ({difference})")
    return config


def _difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    for section in one:
        for key in {**one[section], **other[section]}:
            value, recorded = one[section].get(key), other[section].get(key)
            if value != recorded:
                return f"{section}.{key} is {recorded!r}, not {value!r}"
    return "the dataset differs"


def _is_same_run(run_dir: Path, config: Config, dataset_key: str) -> bool:
    try:
        record = read_record(run_dir)
        recorded = read_run_config(run_dir).identity
    except (DataError, ConfigError):
        return False
    return record.get("dataset_key") == dataset_key and recorded == config.identity


def _numbered_folders(runs_dir: Path, prefix: str) -> list[Path]:
    """The folders `prefix-1`, `prefix-2`, …, highest number first."""
    found = {
        int(match[1]): path
        for path in runs_dir.glob(f"{prefix}-*")
        if (match := re.fullmatch(rf"{re.escape(prefix)}-(\d+)", path.name))
    }
    return [found[number] for number in sorted(found, reverse=True)]


def _start(run_dir: Path, config: Config, dataset_key: str, dataset_dir: Path) -> None:
    named = config.model_copy(update={"run": config.run.model_copy(update={"name": run_dir.name})})
    with atomic_file(run_dir / "config.yaml") as temporary:
        temporary.write_text(dump_config(named), encoding="utf-8")
    record = {
        "dataset": str(dataset_dir.resolve()),
        "dataset_key": dataset_key,
        "max_steps": config.training.max_steps,
    }
    write_json(run_dir / "run.json", record)


def _check_claim(run_dir: Path, config: Config, dataset_key: str, owner: Owner | None) -> None:
    """Raise `ConfigError` if the folder holds a different run or was taken over from this owner."""
    if not _is_same_run(run_dir, config, dataset_key):
        difference = _difference(config.identity, read_run_config(run_dir).identity)
        raise ConfigError(f"run.name: {run_dir} holds another run ({difference})")
    record = read_record(run_dir)
    if owner is not None and owner.id in record.get("former_owners", []):
        now = record["owner"]
        by = (
            "a process without a flow run" if now is None else f"flow run {now['url'] or now['id']}"
        )
        raise ConfigError(
            f"run.name: {run_dir} has since been resumed by {by}; "
            f"take it over with infini resume {run_dir.name}"
        )


def _record_owner(run_dir: Path, owner: Owner | None) -> None:
    record = read_record(run_dir)
    before, now = record.get("owner"), None if owner is None else asdict(owner)
    if before == now:
        return
    if before is not None and (now is None or before["id"] != now["id"]):
        record["former_owners"] = [*record.get("former_owners", []), before["id"]]
    write_json(run_dir / "run.json", record | {"owner": now})


def _candidates(config: Config, dataset_key: str, *, adopt: bool) -> Iterator[Path]:
    """Folders to try to lock: interrupted runs of this configuration, then new names."""
    runs_dir = config.run.runs_dir
    prefix = (config.run.preset or "run").replace("+", "-")  # arxiv+stable: a name has no plus sign
    existing = _numbered_folders(runs_dir, prefix)
    for run_dir in existing:
        if _is_available(run_dir, config, dataset_key, adopt=adopt):
            yield run_dir
    number = int(existing[0].name.rpartition("-")[2]) + 1 if existing else 1
    while True:
        yield runs_dir / f"{prefix}-{number}"
        number += 1


def _is_available(run_dir: Path, config: Config, dataset_key: str, *, adopt: bool) -> bool:
    """Whether a run with these settings may start or resume in this folder."""
    if not is_started(run_dir):
        return True
    return adopt and not is_finished(run_dir) and _is_same_run(run_dir, config, dataset_key)


def _until_released(run_dir: Path, owner: Owner | None, seconds: float) -> Iterator[Path]:
    """Yield `run_dir` repeatedly while an earlier process of the same flow run still holds it.

    Raises `ConfigError` that names the holder if it is another one, or does not release in time.
    """
    deadline, logged = time.monotonic() + seconds, False
    while True:
        yield run_dir
        if holder := run_holder(run_dir):
            is_same = owner is not None and holder.flow_run == owner.id
            if not is_same or time.monotonic() > deadline:
                raise ConfigError(f"run.name: {run_dir} is in use by {holder}")
            if not logged:
                log.warning("Waiting for %s to release %s", holder, run_dir)
                logged = True
        time.sleep(RELEASE_POLL_SECONDS)


def _wait_for_first_machine(config: Config, dataset_key: str) -> Path:
    """Wait for the first machine to start the run; the other machines write only logs there."""
    run_dir = config.run.runs_dir / str(config.run.name)
    deadline = time.monotonic() + JOIN_SECONDS
    while not _is_same_run(run_dir, config, dataset_key):
        if time.monotonic() > deadline:
            raise ConfigError(f"run.name: the first machine has not started this run in {run_dir}")
        time.sleep(0.5)
    return run_dir


@contextlib.contextmanager
def claim_run(
    config: Config,
    dataset_key: str,
    dataset_dir: Path,
    *,
    owner: Owner | None = None,
    adopt: bool = True,
    release_seconds: float = RELEASE_SECONDS,
) -> Iterator[Path]:
    """Hold a run folder: that of `run.name`, the owner's, an interrupted run's, or a new one.

    The first two are claimed even if their run is finished. With several machines the first one
    holds the folder and the others join it.

    Args:
        config: The whole configuration.
        dataset_key: Content key of the dataset.
        dataset_dir: Folder of the dataset.
        owner: Who claims the run; without `run.name` it gets back the folder it claimed before.
        adopt: Whether to resume an interrupted run of the same settings and data that another owner
            started.
        release_seconds: How long to wait for an earlier process of the same owner to exit.

    Raises:
        ConfigError: The folder is in use, holds a run with different settings or data, or has been
            resumed by another owner; or the first machine has not started the run in time.
    """
    if config.launch.node_rank > 0:
        yield _wait_for_first_machine(config, dataset_key)
        return
    runs_dir = config.run.runs_dir
    if config.run.name is not None:
        exact: Path | None = runs_dir / config.run.name
    else:
        exact = None if owner is None else find_run(runs_dir, owner.id)
    if exact is not None:
        candidates = _until_released(exact, owner, release_seconds)
    else:
        candidates = _candidates(config, dataset_key, adopt=adopt)
    for run_dir in candidates:
        make_folder(run_dir)
        holder = Holder.current(run_dir, owner)
        with hold(run_dir / LOCK, holder) as held:
            # Check again: it may have been started or finished just before it was locked.
            if not held or (
                exact is None and not _is_available(run_dir, config, dataset_key, adopt=adopt)
            ):
                continue
            if is_started(run_dir):
                _check_claim(run_dir, config, dataset_key, owner)
            else:
                _start(run_dir, config, dataset_key, dataset_dir)
            _record_owner(run_dir, owner)
            point_latest(run_dir)
            yield run_dir
            return
