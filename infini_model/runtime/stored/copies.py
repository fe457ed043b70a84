"""What of a run folder is copied to its store and back.

`<store>/runs/<run>/` mirrors the run folder. Checkpoints and the exported model are folders that
never change: their manifest, with the SHA-256 of all their files, is put last and deleted first,
so that what was copied in part is never taken for one. All other files are small and are
overwritten. What belongs to one machine stays there: locks, temporary files, heartbeats, and the
checkpoints of debug reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from infini_model.runtime.errors import ObjectDamagedError, ObjectMissingError
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.runtime.object_stores.object_store import ObjectStore, StoredObject
from infini_model.runtime.runs import CHECKPOINTS, MODEL, STEP, kept_steps, step_key
from infini_model.runtime.storage import MANIFEST, atomic_folder, dump_json, sha256
from infini_model.runtime.stored.lease import LEASE

log = logging.getLogger(__name__)

PINNED = ".upload-"
COMPLETE = re.compile(rf"{STEP.pattern}/{re.escape(MANIFEST)}")
OF_THIS_MACHINE = frozenset({CHECKPOINTS, "heartbeats", "waiting"})
# Larger files are sent in parts, and from the disk.
SMALL_BYTES = 8 << 20
OnBytes = Callable[[int], None]


def local_steps(run_dir: Path) -> set[int]:
    """The steps of the complete checkpoints in a run folder."""
    found = run_dir.glob(f"{CHECKPOINTS}/step-*/{MANIFEST}")
    return complete_steps(path.relative_to(run_dir).as_posix() for path in found)


def complete_steps(keys: Iterable[str]) -> set[int]:
    """The steps of the checkpoints whose manifests are among the keys of a run."""
    return {int(match[1]) for key in keys if (match := COMPLETE.fullmatch(key))}


def small_files(run_dir: Path) -> dict[str, Path]:
    """The files of a run that are copied one by one, by their keys; the report's record last."""
    found = {}
    for folder, folders, names in os.walk(run_dir):
        below = Path(folder).relative_to(run_dir)
        folders[:] = [name for name in folders if _is_shared((below / name).as_posix())]
        for name in names:
            key = (below / name).as_posix()
            if _is_shared(key) and not (run_dir / key).is_symlink():
                found[key] = run_dir / key
    return dict(sorted(found.items(), key=lambda each: (each[0] == "evaluation.json", each[0])))


def _is_shared(key: str) -> bool:
    """Whether a file or folder of a run is small, and of interest to other machines.

    Keys from a store are checked by this too: none of them leaves the run folder.
    """
    parts = key.split("/")
    hidden = any(not part or part.startswith(".") for part in parts)
    return not hidden and OF_THIS_MACHINE.isdisjoint(parts) and parts[0] not in (MODEL, LEASE)


def shared_objects(objects: Iterable[StoredObject]) -> dict[str, StoredObject]:
    """Those objects of a run's listing that are small files, by key."""
    return {each.key: each for each in objects if _is_shared(each.key)}


def put_file(store: ObjectStore, key: str, path: Path) -> None:
    """Copy one small file to the store; one that is gone meanwhile is left out."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size < SMALL_BYTES:
            # At once: the file may grow meanwhile.
            store.write(key, path.read_bytes())
        else:
            store.upload(key, path)


def put_folder(
    store: ObjectStore, key: str, folder: Path, on_bytes: OnBytes, may_write: Callable[[], bool]
) -> bool:
    """Copy a complete folder to the store unless it is there; returns whether it was completed now.

    A folder without a manifest gets one in the store. If `may_write` says no once all else is
    copied, the copy stays incomplete. Raises as `ObjectStore` does.
    """
    record = f"{key}/{MANIFEST}"
    content = _manifest_of(folder)
    try:
        if store.read(record)[0] == content:
            return False
        store.delete([record])
    except ObjectMissingError:
        pass
    for name in json.loads(content)["sha256"]:
        store.upload(f"{key}/{name}", folder / name)
        on_bytes((folder / name).stat().st_size)
    # The upload may have taken hours.
    if not may_write():
        return False
    store.write(record, content)
    return True


def _manifest_of(folder: Path) -> bytes:
    path = folder / MANIFEST
    if path.is_file():
        return path.read_bytes()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    return json.dumps({"sha256": sums}, indent=2, sort_keys=True).encode() + b"\n"


def get_folder(store: ObjectStore, key: str, folder: Path) -> None:
    """Copy a complete folder from the store; every file is compared with the manifest.

    Raises `ObjectMissingError`, `ObjectDamagedError` if a file is damaged, and `UserError` if the
    disk is full.
    """
    address = store.address_of(f"{key}/{MANIFEST}")
    manifest = store.read(f"{key}/{MANIFEST}")[0]
    try:
        sums = dict(json.loads(manifest)["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ObjectDamagedError(f"{address}: is damaged") from error
    with atomic_folder(folder) as temporary:
        for name, expected in sums.items():
            if {"", ".", ".."} & set(name.split("/")) or PurePosixPath(name).is_absolute():
                raise ObjectDamagedError(f"{address}: is damaged: it names the file {name!r}")
            store.download(f"{key}/{name}", temporary / name, expected)
        dump_json(temporary / MANIFEST, json.loads(manifest))


@contextlib.contextmanager
def pinned(run_dir: Path, step: int) -> Iterator[Path | None]:
    """A second name for a local checkpoint, so that retention cannot delete it meanwhile.

    None if it is already deleted. Where the disk knows no hard links it is the checkpoint itself.
    """
    checkpoint = run_dir / step_key(step)
    pin = run_dir / f"{PINNED}{checkpoint.name}"
    shutil.rmtree(pin, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, pin, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.rmtree(pin, ignore_errors=True)
        yield checkpoint if (checkpoint / MANIFEST).is_file() else None
        return
    try:
        yield pin if (pin / MANIFEST).is_file() else None
    finally:
        shutil.rmtree(pin, ignore_errors=True)


def remove_pins(run_dir: Path) -> None:
    """Delete what a killed upload has left. Call it while no other process copies the run."""
    for path in run_dir.glob(f"{PINNED}*"):
        shutil.rmtree(path, ignore_errors=True)


def apply_retention(store: ObjectStore, run_dir: Path, keep: int) -> None:
    """Delete the stored checkpoints that `kept_steps` does not keep, their manifests first.

    What an interrupted upload has left of an older checkpoint goes too.
    """
    keys = [each.key for each in store.list_below(CHECKPOINTS)]
    steps = complete_steps(keys)
    kept = kept_steps(steps, read_validation_losses(run_dir), keep)
    started = {int(match[1]) for key in keys if (match := re.match(rf"{STEP.pattern}/", key))}
    for step in sorted(started - kept):
        if steps and step < max(steps):
            old = [key for key in keys if key.startswith(f"{step_key(step)}/")]
            store.delete([key for key in old if COMPLETE.fullmatch(key)])
            store.delete(old)
