"""Claims on run folders: which interrupted run a command resumes, or where it starts a new one.

A process locks the folder it works in, and the kernel releases the lock when the process exits. A
run that is neither finished nor locked was interrupted: the same command resumes it. A flow run
gets its own folder back unless another owner has resumed it. With `run.store` the same holds for
all machines: `OWNER` in the store accompanies the lock, and the folder is a working copy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infini_model.config import Config, difference, dump_config, load_config
from infini_model.runtime.branches import begin_branch, find_step, parent_of, shared
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.holders import ANYBODY, Holder, Owner, flow_run_page
from infini_model.runtime.machine import package_versions
from infini_model.runtime.owner import LOOK_SECONDS
from infini_model.runtime.processes import wait_until
from infini_model.runtime.records import write_record
from infini_model.runtime.runs import (
    CHECKPOINTS,
    RUN,
    RunRecord,
    find_run,
    is_finished,
    is_started,
    name_prefix,
    read_run,
    read_run_config,
    run_holder,
    settings_of_run,
    weights_fingerprint,
)
from infini_model.runtime.storage import atomic_file, point_latest
from infini_model.runtime.stored_runs import (
    hold_run,
    refresh_run,
    refresh_runs,
    working_copy,
)

log = logging.getLogger(__name__)

# How long other machines wait for the first one to build the dataset and start the run.
JOIN_SECONDS = 3600.0
# How long to wait for an earlier process of the same flow run: the grace period of training, and
# some margin.
RELEASE_SECONDS = 90.0


def resume_config(run_dir: Path, overrides: Iterable[str | Mapping[str, Any]] = ()) -> Config:
    """Settings to resume a run with: those it recorded, its dataset, then `overrides`.

    Raises `DataError` if `run_dir` is not a run folder, `ConfigError` if an override is invalid,
    names another run folder, or changes a setting that decides the weights.
    """
    own = read_run_config(run_dir)
    config = load_config(overrides=[*settings_of_run(run_dir), *overrides])
    if (config.run.name, config.run.output_dir) != (run_dir.name, run_dir.parent.parent):
        raise ConfigError(f"run.name: {run_dir} can only be resumed under its own name and folder")
    if config.identity != own.identity:
        other = difference(config.identity, own.identity)
        branch = f"infini branch {run_dir.name}" if shared(config) == shared(own) else "infini run"
        raise ConfigError(
            f"{run_dir} cannot be resumed with different settings ({other}); {branch} begins a run "
            "with them"
        )
    return config


def identities(
    run_dir: Path, config: Config, weights: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The identity of `config` and that of a run, both with the initial weights by their content.

    `weights` is their fingerprint now; their names count only where one of the two is not known.
    Raises `DataError`, `ConfigError`.
    """
    asked, recorded = config.identity, read_run_config(run_dir).identity
    before = weights_fingerprint(run_dir)
    if weights is not None and before is not None:
        asked["model"]["initial_weights"] = weights
        recorded["model"]["initial_weights"] = before
    return asked, recorded


@dataclass(frozen=True)
class _Request:
    """What a claim asks for; without the dataset's key, whatever the dataset is."""

    config: Config
    dataset_key: str | None
    weights: str | None = None
    owner: Owner = ANYBODY

    def mismatch(self, run_dir: Path) -> str:
        """What distinguishes these settings and data from those of a run; empty if nothing does.

        Raises `DataError`, `ConfigError` if the run's records cannot be read.
        """
        record = read_run(run_dir)
        asked, recorded = identities(run_dir, self.config, self.weights)
        if asked != recorded:
            return difference(asked, recorded)
        is_same_dataset = self.dataset_key in (None, record.dataset_key)
        return "" if is_same_dataset else "the dataset differs"

    def is_for(self, run_dir: Path) -> bool:
        """Whether a run has these settings and data."""
        try:
            return not self.mismatch(run_dir)
        except (DataError, ConfigError):
            return False

    def may_have(self, run_dir: Path) -> bool:
        """Whether a run may start in a folder, or resume there as an interrupted one."""
        if not is_started(run_dir):
            return True
        return self.owner.adopts and not is_finished(run_dir) and self.is_for(run_dir)

    def exact_folder(self) -> Path | None:
        """The folder that a claim gets or fails: that of `run.name`, or the owner's."""
        run, owner = self.config.run, self.owner
        if run.name is not None:
            return run.runs_dir / run.name
        return None if owner.id is None else find_run(run.runs_dir, owner.id)

    def candidates(self) -> Iterator[Path]:
        """Folders to try to lock: interrupted runs of this configuration, then new names."""
        runs_dir, prefix = self.config.run.runs_dir, name_prefix(self.config)
        existing = {
            int(match[1]): path
            for path in runs_dir.glob(f"{prefix}-*")
            if (match := re.fullmatch(rf"{re.escape(prefix)}-(\d+)", path.name))
        }
        yield from filter(self.may_have, (existing[n] for n in sorted(existing, reverse=True)))
        for number in itertools.count(max(existing, default=0) + 1):
            yield runs_dir / f"{prefix}-{number}"


def _start(run_dir: Path, config: Config, dataset_key: str, dataset_dir: Path) -> None:
    is_branch, settings = config.training.branch_of is not None, run_dir / "config.yaml"
    # A branch that was killed here before it was a run has left its parent's checkpoint.
    if is_branch or (settings.exists() and read_run_config(run_dir).training.branch_of):
        shutil.rmtree(run_dir / CHECKPOINTS, ignore_errors=True)
    named = config.updated(run={"name": run_dir.name})
    versions = package_versions("infini-llama")
    version = versions.get("infini-llama", "of a checkout that is not installed")
    with atomic_file(settings) as temporary:
        temporary.write_text(f"# infini-llama {version}\n{dump_config(named)}", encoding="utf-8")
    record = RunRecord(
        dataset=dataset_dir.resolve(),
        dataset_key=dataset_key,
        max_steps=config.training.max_steps,
        parent=parent_of(config)[0].name if is_branch else None,
        parent_step=begin_branch(run_dir, config) if is_branch else None,
    )
    write_record(run_dir / RUN, record)


def _check_claim(run_dir: Path, request: _Request) -> None:
    """Raise `ConfigError` if the folder holds a different run or was taken over from this owner.

    Raises `DataError` if its record is damaged.
    """
    if other := request.mismatch(run_dir):
        raise ConfigError(f"run.name: {run_dir} holds another run ({other})")
    record = read_run(run_dir)
    if request.owner.id in record.former_owners:
        now = record.owner
        by = f"flow run {flow_run_page(now) or now}" if now else "a process without a flow run"
        raise ConfigError(
            f"run.name: {run_dir} has since been resumed by {by}; "
            f"take it over with infini resume {run_dir.name}"
        )


def _record_claim(run_dir: Path, owner: Owner, dataset_dir: Path, address: str | None) -> None:
    record = read_run(run_dir)
    change: dict[str, Any] = {"owner": owner.id}
    if address is not None:
        change["dataset_address"] = address
    if not record.dataset.exists():
        # It was claimed on another machine, which has the same dataset elsewhere.
        change["dataset"] = dataset_dir.resolve()
    if record.owner not in (None, owner.id):
        change["former_owners"] = (*record.former_owners, record.owner)
    claimed = record.model_copy(update=change)
    if claimed != record:
        write_record(run_dir / RUN, claimed)


def free_name(config: Config, dataset_key: str) -> str:
    """`run.name`, or that with a number from 2 on: the first that no other run has taken.

    One with the same settings and data is no other run: it is reused or resumed.
    """
    request, first = _Request(config, dataset_key), config.run.runs_dir / str(config.run.name)
    numbered = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    folders = itertools.chain([first], numbered)
    return next(each.name for each in folders if not is_started(each) or request.is_for(each))


def run_to_resume(config: Config, owner: Owner) -> Path | None:
    """The run that a claim of these settings would resume; None if it would start a new one.

    That is if the dataset is still the same. Which it gets is decided by `claim_run`, later.
    """
    request = _Request(config, dataset_key=None, owner=owner)
    exact = request.exact_folder()
    if exact is not None:
        return exact if request.is_for(exact) else None
    run_dir = next(each for each in request.candidates() if run_holder(each) is None)
    return run_dir if is_started(run_dir) else None


def check_branch(config: Config, owner: Owner = ANYBODY) -> None:
    """Raise as `find_step` does if these settings are of a branch that could not begin."""
    if config.training.branch_of is not None and run_to_resume(config, owner) is None:
        find_step(config)


def _until_released(run_dir: Path, owner: Owner) -> Iterator[Path]:
    """Yield `run_dir` repeatedly while an earlier process of the same flow run still holds it.

    Raises `ConfigError` that names the holder if it is another one, or does not release in time.
    """
    deadline, logged = time.monotonic() + RELEASE_SECONDS, False
    while True:
        yield run_dir
        if holder := run_holder(run_dir):
            is_same = owner.id is not None and holder.flow_run == owner.id
            if not is_same or time.monotonic() > deadline:
                raise ConfigError(f"run.name: {run_dir} is in use by {holder}")
            if not logged:
                log.warning("Waiting for %s to release %s", holder, run_dir)
                logged = True
        time.sleep(LOOK_SECONDS)


def _wait_for_first_machine(config: Config, dataset_key: str) -> Path:
    """Wait for the first machine to start the run; the other machines write only logs there.

    They share its output folder, or have one each and a store. Raises `ConfigError` if the run is
    another one, which the first machine would refuse as well.
    """
    run_dir, store = config.run.runs_dir / str(config.run.name), config.run.store
    place = store or run_dir

    def has_started() -> bool:
        return refresh_run(run_dir, store) and is_started(run_dir)

    if not has_started():
        log.warning(
            "Waiting for the first machine (launch.node_rank=0) to start this run in %s; the "
            "machines must share run.output_dir or run.store",
            place,
        )
        if not wait_until(has_started, every_seconds=LOOK_SECONDS, timeout_seconds=JOIN_SECONDS):
            raise ConfigError(f"run.name: the first machine has not started this run in {place}")
    _check_claim(run_dir, _Request(config, dataset_key))
    return run_dir


@contextlib.contextmanager
def claim_run(
    config: Config,
    dataset_key: str,
    dataset_dir: Path,
    *,
    weights: str | None = None,
    address: str | None = None,
    owner: Owner = ANYBODY,
) -> Iterator[Path]:
    """Hold a run folder: that of `run.name`, the owner's, an interrupted run's, or a new one.

    The first two are claimed even if their run is finished; without `run.name` an owner gets back
    the folder it claimed before. With several machines the first one holds the folder and the
    others join it. `weights` is the fingerprint of the initial weights, which count by their name
    without it; `address` is the dataset in an object store of which the folder is a working copy.

    Raises:
        StoreError, UnreachableError: The store refuses access or cannot be reached.
        RunLostError: At the end of the block: another machine has taken over the run.
        ConfigError: The folder is in use, holds a run with different settings or data, or has been
            resumed by another owner; or the first machine has not started the run in time.
    """
    if config.launch.node_rank > 0:
        yield _wait_for_first_machine(config, dataset_key)
        return
    runs_dir = config.run.runs_dir
    refresh_runs(runs_dir, config.run.store)
    request = _Request(config, dataset_key, weights, owner)
    exact = request.exact_folder()
    for run_dir in request.candidates() if exact is None else _until_released(exact, owner):
        with hold_run(run_dir, Holder.current(run_dir, owner), config.run.store) as held:
            # Check again: it may have been started or finished just before it was held.
            if held is None or (exact is None and not request.may_have(run_dir)):
                continue
            if is_started(run_dir):
                _check_claim(run_dir, request)
            else:
                _start(run_dir, config, dataset_key, dataset_dir)
            _record_claim(run_dir, owner, dataset_dir, address)
            point_latest(run_dir)
            with working_copy(held, config.checkpoint.save_total_limit):
                yield run_dir
            return
