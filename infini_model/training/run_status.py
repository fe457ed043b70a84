"""What the files of a run folder say about a run: how far it is, and in which state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infini_model.runtime.errors import UserError
from infini_model.runtime.holders import Owner
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.runs import is_finished, last_step, owner_of, run_holder
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.launch.recovery import read_recovery
from infini_model.training.launch.reservation import waiting_note

# Both may be continued; a failed one ended with an error of its own.
RESUMABLE = ("interrupted", "failed")
State = Literal["running", "waiting", "finished", "interrupted", "failed", "empty", "damaged"]


@dataclass(frozen=True)
class RunStatus:
    """One run.

    Attributes:
        run_dir: Its folder.
        state: What it is doing, or how it ended.
        detail: Who holds it, what it waits for, how it failed, or what is damaged.
        step: Steps recorded so far.
        total: Optimizer steps in all, if they are known.
        train_loss: The last one; None before the first.
        validation_loss: The last one; None before the first.
        updated: When something was recorded last, in seconds since the epoch.
        owner: The flow run that claimed it last, if that is known.
        mlflow: Its record in MLflow: run_id and tracking_uri, empty if there is none.
    """

    run_dir: Path
    state: State
    detail: str = ""
    step: int = 0
    total: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    updated: float = 0.0
    owner: Owner | None = None
    mlflow: dict[str, str] | None = None


def list_runs(runs_dir: Path) -> list[RunStatus]:
    """Every run of an output folder, the one that recorded something last first."""
    # `latest` is one of the others.
    folders = [path for path in runs_dir.glob("*") if path.is_dir() and not path.is_symlink()]
    visible = [path for path in folders if not path.name.startswith(".")]
    return sorted(map(read_status, visible), key=lambda run: (-run.updated, run.run_dir.name))


def read_status(run_dir: Path) -> RunStatus:
    """What is known of a run; a folder whose files cannot be read is `damaged`."""
    try:
        return _read(run_dir)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return RunStatus(run_dir, "damaged", reason, updated=run_dir.stat().st_mtime)


def _read(run_dir: Path) -> RunStatus:
    record = run_dir / "run.json"
    if not record.is_file():
        holder = run_holder(run_dir)
        state: State = "empty" if holder is None else "running"
        detail = "" if holder is None else holder.process
        return RunStatus(run_dir, state, detail, updated=run_dir.stat().st_mtime)
    newest = read_newest(run_dir, "step", "time", "train/loss", "validation/loss")
    state, detail = _state(run_dir, newest.get("time", 0.0))
    mlflow = read_mlflow_record(run_dir)
    return RunStatus(
        run_dir,
        state,
        detail,
        int(newest.get("step", 0)),
        last_step(run_dir),
        newest.get("train/loss"),
        newest.get("validation/loss"),
        newest.get("time", record.stat().st_mtime),
        owner_of(run_dir),
        {key: str(mlflow[key]) for key in ("run_id", "tracking_uri") if key in mlflow},
    )


def _state(run_dir: Path, recorded: float) -> tuple[State, str]:
    """The state of a run that recorded something last at the time `recorded`, and its detail."""
    if holder := run_holder(run_dir):
        try:
            return "waiting", waiting_note(run_dir).read_text(encoding="utf-8")
        except FileNotFoundError:
            return "running", holder.process
    if is_finished(run_dir):
        return "finished", ""
    attempts = read_recovery(run_dir).attempts
    if attempts and attempts[-1].kind != "preempted" and attempts[-1].time >= recorded:
        return "failed", attempts[-1].kind
    return "interrupted", ""


def saved_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint, None if there is none; nothing of it is read."""
    steps = (path.name.removeprefix("step-") for path in run_dir.glob("checkpoints/step-*"))
    return max((int(step) for step in steps if step.isdecimal()), default=None)
