"""State and progress of a run, read from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.runs import (
    MODEL,
    RUN,
    is_finished,
    is_started,
    list_checkpoints,
    read_run,
    run_folders,
    run_holder,
)
from infini_model.training.launch.recovery import read_recovery
from infini_model.training.launch.reservation import waiting_note

# Either is to be resumed; a failed run ended with an error, an interrupted one was stopped. A
# trained one has taken its last step and is not evaluated.
RESUMABLE = ("interrupted", "failed")
State = Literal[
    "running", "waiting", "finished", "trained", "interrupted", "failed", "empty", "damaged"
]


@dataclass(frozen=True)
class RunStatus:
    """The status of one run.

    Attributes:
        detail: Who holds it, what it waits for, how it failed, or what is damaged.
        step: Optimizer steps recorded so far, of the `total` if that is known.
        updated: Time of the last record, in seconds since the epoch.
        parent: Of a branch, the run from which it began; `parent_step` is the step.
    """

    run_dir: Path
    state: State
    detail: str = ""
    step: int = 0
    total: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    updated: float = 0.0
    parent: str | None = None
    parent_step: int | None = None


def list_runs(runs_dir: Path) -> list[RunStatus]:
    """All runs in `runs_dir`, the most recently updated first."""
    runs = map(read_status, run_folders(runs_dir))
    return sorted(runs, key=lambda run: (-run.updated, run.run_dir.name))


def read_status(run_dir: Path) -> RunStatus:
    """The status of a run; `damaged` if its files cannot be read."""
    try:
        return _read(run_dir)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return RunStatus(run_dir, "damaged", reason, updated=run_dir.stat().st_mtime)


def _read(run_dir: Path) -> RunStatus:
    if not is_started(run_dir):
        holder = run_holder(run_dir)
        state: State = "empty" if holder is None else "running"
        detail = "" if holder is None else holder.process
        return RunStatus(run_dir, state, detail, updated=run_dir.stat().st_mtime)
    newest = read_newest(run_dir, "step", "time", "train/loss", "validation/loss")
    state, detail = _state(run_dir, newest.get("time", 0.0))
    record = read_run(run_dir)
    return RunStatus(
        run_dir,
        state,
        detail,
        int(newest.get("step", record.parent_step or 0)),
        record.max_steps,
        newest.get("train/loss"),
        newest.get("validation/loss"),
        newest.get("time", (run_dir / RUN).stat().st_mtime),
        record.parent,
        record.parent_step,
    )


def _state(run_dir: Path, recorded: float) -> tuple[State, str]:
    """The state and the detail of a run whose last record is of the time `recorded`."""
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
    if is_trained(run_dir):
        return "trained", ""
    return "interrupted", ""


def is_trained(run_dir: Path) -> bool:
    """Whether a training has ended: it writes the folder of its model last."""
    return (run_dir / MODEL).is_dir()


def saved_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint, by its name alone; None if there is none."""
    return max((step for step, _ in list_checkpoints(run_dir)), default=None)
