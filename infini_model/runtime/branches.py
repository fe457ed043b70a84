"""Branches: runs that begin from a checkpoint of another run, their parent.

A branch has settings, a folder and records of its own. Its folder begins with hard links to the
files of the checkpoint, and from there it trains as an interrupted run does: `training.branch` says
what of the parent's position in the data still holds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infini_model.config import Config, ModelConfig, difference, load_config, merge
from infini_model.config.training import BRANCH
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.runs import (
    INITIAL_WEIGHTS,
    is_started,
    read_run_config,
    settings_of_run,
    step_key,
    verify_checkpoint,
)
from infini_model.runtime.storage import (
    MANIFEST,
    atomic_folder,
    link,
    read_json_or_empty,
    write_json,
)
from infini_model.runtime.stored_runs import fetch_checkpoint, saved_steps

# What a branch has in common with its parent: to another model, or optimizer, its tensors mean
# nothing.
SHARED = {"model": {*ModelConfig.model_fields}, "training": {"objective", "lora", "optimizer"}}


def branch_config(
    run_dir: Path, step: int | None, overrides: Sequence[Mapping[str, Any]] = ()
) -> Config:
    """Return the settings of a branch of a run: the run's own with its dataset, then `overrides`.

    It begins from the checkpoint of `step`, or the newest. Documents among the overrides replace
    the dataset. Raises `DataError` if `run_dir` is not a run folder, `ConfigError` if an override
    is invalid or changes the model or the optimizer.
    """
    at = "" if step is None else f"@{step}"
    parent = f"{run_dir.name}{at}"
    branch: dict[str, Any] = {"run": {"name": None}, "training": {"branch_of": parent}}
    data = functools.reduce(merge, overrides, dict[str, Any]()).get("data")
    if isinstance(data, Mapping) and not data.keys().isdisjoint({"source", "sources"}):
        branch["data"] = {"folder": None}
    config = load_config(overrides=[*settings_of_run(run_dir), branch, *overrides])
    own = read_run_config(run_dir)
    now, then = shared(config), shared(own)
    if now != then:
        raise ConfigError(
            f"a branch has the model and the optimizer of its parent ({difference(now, then)})"
        )
    return config


def shared(config: Config) -> dict[str, Any]:
    """Return the settings that a branch has in common with its parent."""
    return config.model_dump(mode="json", include=SHARED)


def parent_of(config: Config) -> tuple[Path, int | None]:
    """Return the folder of the run in `training.branch_of`, and the step if one is named."""
    match = BRANCH.fullmatch(str(config.training.branch_of))
    assert match is not None  # noqa: S101 - it was validated
    return config.run.runs_dir / match[1], None if match[2] is None else int(match[2])


def is_of_parent(saved: Mapping[str, Any], config: Config) -> bool:
    """Return whether a checkpoint in a run's folder, saved with these settings, is its parent's."""
    return bool(saved["training"].get("branch_of") != config.training.branch_of)


def find_step(config: Config) -> int:
    """Return the step from which a branch of these settings would begin.

    Raises `ConfigError` if there is no such run, or if the branch would end before it begins;
    `CheckpointError` if the run has no such checkpoint.
    """
    parent, wanted = parent_of(config)
    if not is_started(parent):
        raise ConfigError(f"training.branch_of: there is no run {parent}; infini runs lists them")
    steps = saved_steps(parent, config.run.store)
    if not steps:
        raise CheckpointError(f"training.branch_of: {parent} has no checkpoint yet")
    if wanted not in (None, *steps):
        has = ", ".join(map(str, sorted(steps)))
        raise CheckpointError(
            f"training.branch_of: {parent.name} has no checkpoint of step {wanted}; it has: {has}"
        )
    step, total = max(steps) if wanted is None else wanted, config.training.max_steps
    if total is not None and total <= step:
        raise ConfigError(
            f"training.max_steps: is {total}, and the branch begins at step {step}; set a larger "
            "total"
        )
    return step


def begin_branch(run_dir: Path, config: Config) -> int:
    """Link the parent's checkpoint into the folder of a new branch; return its step.

    Raises as `find_step` does, and `CheckpointError` if the checkpoint is damaged.
    """
    while True:
        step, (parent, _) = find_step(config), parent_of(config)
        source = parent / step_key(step)
        try:
            fetch_checkpoint(parent, config.run.store, step)
            verify_checkpoint(source)
            with atomic_folder(run_dir / step_key(step)) as folder:
                for name in [*json.loads((source / MANIFEST).read_bytes())["sha256"], MANIFEST]:
                    (folder / name).parent.mkdir(exist_ok=True)
                    link(source / name, folder / name)
        except (CheckpointError, FileNotFoundError):
            if source.exists():
                raise
            continue  # The parent is training, and has just deleted it.
        if weights := read_json_or_empty(parent / INITIAL_WEIGHTS):
            write_json(run_dir / INITIAL_WEIGHTS, weights)
        return step
