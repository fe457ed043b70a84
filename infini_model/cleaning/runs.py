"""What runs refer to, and which of their own checkpoints they no longer need."""

from __future__ import annotations

from pathlib import Path

from infini_model.cleaning.unneeded import (
    RECENT_SECONDS,
    Findings,
    Kind,
    Scope,
    leftovers,
    visible,
)
from infini_model.runtime.errors import CheckpointError, DataError
from infini_model.runtime.runs import (
    LOCK,
    dataset_of,
    is_finished,
    is_started,
    noted_runs,
)
from infini_model.runtime.storage import TEMPORARY, is_locked, sha256
from infini_model.training.checkpoints.folders import (
    checkpoints_dir,
    listed,
    superseded,
    verify_checkpoint,
)


def run_folders(runs_dir: Path) -> list[Path]:
    """The folders of all runs; `latest` is a link to one of them."""
    return [path for path in visible(runs_dir) if path.is_dir() and not path.is_symlink()]


def run_locks(run_dir: Path) -> tuple[Path, Path]:
    """The locks of whoever works in a run folder, or writes its checkpoints."""
    return run_dir / LOCK, checkpoints_dir(run_dir) / ".lock"


def needed_datasets(scope: Scope) -> tuple[set[str], list[Path]]:
    """The names of the dataset folders that runs refer to; and the runs that cannot be read.

    A name ends in the dataset's key, so that it is enough to know a dataset by, even if the output
    folder was moved since.
    """
    noted = [note for note in noted_runs(scope.datasets_dir) if not note.is_gone]
    names = {note.dataset for note in noted}
    places = dict.fromkeys((scope.output_dir, scope.datasets_dir.parent))
    folders = [path for place in places for path in run_folders(place / "runs")]
    unreadable = []
    for run_dir in [*folders, *(note.run_dir for note in noted)]:
        try:
            if is_started(run_dir):
                names.add(dataset_of(run_dir).name)
        except (DataError, TypeError):
            unreadable.append(run_dir)
    return names, unreadable


def unneeded_notes(scope: Scope) -> Findings:
    """The notes of runs that were deleted.

    Where the folder of all runs is missing too, a disk may only be out of sight.
    """
    found = Findings()
    for note in noted_runs(scope.datasets_dir):
        is_deleted = note.is_gone and note.run_dir.parent.is_dir()
        if is_deleted and scope.is_older(note.file, RECENT_SECONDS):
            found.add(Kind.RECORD, note.file)
    return found


def unneeded_pictures(scope: Scope) -> Findings:
    """The copies that Prefect's servers show of what no run and no comparison has any more."""
    found = Findings()
    copies = list[Path]()
    for place in sorted(scope.output_dir.glob("prefect*/pictures")):
        found.add(Kind.LEFTOVER, *leftovers(place, scope))
        copies += [path for path in visible(place) if scope.is_older(path, RECENT_SECONDS)]
    if copies:
        drawn = ("runs/*/plots/*.png", "comparisons/*/*.png")
        kept = {sha256(path) for each in drawn for path in scope.output_dir.glob(each)}
        found.add(Kind.PICTURE, *(path for path in copies if path.stem not in kept))
    return found


def unneeded_checkpoints(scope: Scope) -> Findings:
    """The checkpoints of finished runs but the newest and the one with the lowest validation loss.

    A run that is at work or was interrupted is left alone.
    """
    found = Findings()
    for run_dir in run_folders(scope.output_dir / "runs"):
        folder = checkpoints_dir(run_dir)
        if not is_finished(run_dir) or any(map(is_locked, run_locks(run_dir))):
            continue
        found.add(Kind.LEFTOVER, *sorted(folder.glob(f"{TEMPORARY}*")))
        old = [*superseded(run_dir, keep=1), *sorted(folder.glob("damaged-step-*"))]
        if not old:
            continue
        try:
            for _, newest in listed(run_dir)[:1]:
                verify_checkpoint(newest)
        except CheckpointError as error:
            found.notes.append(f"{error}; the checkpoints before it are kept")
        else:
            found.add(Kind.CHECKPOINT, *old)
    return found
