"""The checkpoint folders of a run: their names, their checksums, and which are superseded."""

from __future__ import annotations

import json
from pathlib import Path

from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.runtime.runs import CHECKPOINTS, STEP, kept_steps, step_key
from infini_model.runtime.storage import MANIFEST, sha256

# The file of a checkpoint that says where in the training it was saved.
STATE = "state.json"


def checkpoints_dir(run_dir: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run_dir / CHECKPOINTS


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return run_dir / step_key(step)


def listed(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, newest first, unverified."""
    found = [
        (int(match[1]), path)
        for path in checkpoints_dir(run_dir).glob("step-*")
        if (match := STEP.fullmatch(path.relative_to(run_dir).as_posix()))
    ]
    return sorted(found, reverse=True)


def superseded(run_dir: Path, keep: int) -> list[Path]:
    """All checkpoints but the `keep` newest and the one with the lowest validation loss."""
    found = listed(run_dir)
    kept = kept_steps((step for step, _ in found), read_validation_losses(run_dir), keep)
    return [path for step, path in found if step not in kept]


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
