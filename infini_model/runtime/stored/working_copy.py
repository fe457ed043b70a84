"""The working copy of a stored run: who may use it, and bringing it up to date.

The epoch of a run's lease says who wrote last. A folder that was the working copy in the last epoch
has everything and perhaps more than the store. Any other folder takes the store's files, unless its
own checkpoint is of a later step: then the work of another machine, though later, was less.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infini_model.runtime.errors import ObjectDamagedError, ObjectMissingError
from infini_model.runtime.holders import Holder, hold, holder_of
from infini_model.runtime.object_stores.object_store import PATIENCE, ObjectStore, StoredObject
from infini_model.runtime.runs import CHECKPOINTS, EVALUATION, INITIAL_WEIGHTS, LOCK, RUN, step_key
from infini_model.runtime.storage import make_folder, point_latest, write_json
from infini_model.runtime.stored.copies import (
    complete_steps,
    get_folder,
    local_steps,
    remove_pins,
    shared_objects,
)
from infini_model.runtime.stored.lease import (
    LEASE,
    Lease,
    await_sign_of_life,
    read_lease,
    take_lease,
)
from infini_model.runtime.stored.mirror import Mirror
from infini_model.runtime.stored.record import (
    keep_copy,
    keep_epoch,
    lease_lost,
    own_epoch,
)

log = logging.getLogger(__name__)

# What commands that list or choose runs read.
RECORDS = frozenset(
    {
        *("config.yaml", RUN, "metrics.jsonl", EVALUATION, "recovery.json"),
        *(INITIAL_WEIGHTS, "logs/mlflow.json"),
    }
)
# Versions of the objects that `refresh_runs` has copied; void once the run is claimed here.
SEEN = ".stored"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
AT_ONCE = 8


@dataclass(frozen=True)
class Held:
    """A run that this process holds; `lease` and `store` are None if it is in no store."""

    run_dir: Path
    store: ObjectStore | None = None
    lease: Lease | None = None


def run_store(store: str, name: str) -> ObjectStore:
    return ObjectStore(f"{store}/runs/{name}", PATIENCE)


def has_checkpoint(run_dir: Path, store: str | None) -> bool:
    """Whether a run has a complete checkpoint, on this machine or in the store.

    Raises as `ObjectStore` does.
    """
    if local_steps(run_dir) or store is None:
        return bool(local_steps(run_dir))
    below = run_store(store, run_dir.name).list_below(CHECKPOINTS)
    return bool(complete_steps(each.key for each in below))


@contextlib.contextmanager
def hold_run(
    run_dir: Path, holder: Holder, store: str | None, *, patiently: bool = False
) -> Iterator[Held | None]:
    """Hold a run, on all machines if there is a store; yields None if another process holds it.

    The run's small files are then up to date. With `patiently`, a holder elsewhere that shows no
    sign of life is waited for, until its lease expires.

    Raises `UserError` if the folder cannot be written, and as `ObjectStore` does.
    """
    with hold(run_dir / LOCK, holder) as locked:
        if not locked or store is None:
            yield Held(run_dir) if locked else None
            return
        stored = run_store(store, run_dir.name)
        if patiently:
            await_sign_of_life(stored, run_dir)
        lease = take_lease(stored, run_dir, holder)
        if lease is None:
            yield None
            return
        try:
            if _is_behind(run_dir, lease):
                _get_files(stored, run_dir, stored.list_below())
            yield Held(run_dir, stored, lease)
        finally:
            lease.close()


def _is_behind(run_dir: Path, lease: Lease) -> bool:
    """Whether another machine may have written to the run since this one did."""
    return own_epoch(run_dir) != lease.epoch - 1


@contextlib.contextmanager
def working_copy(held: Held, keep: int) -> Iterator[None]:
    """Bring the newest checkpoint of a held run here, and keep the store up to date in the block.

    `keep` is `checkpoint.save_total_limit`. Without a store it does nothing.

    Raises `LeaseLostError` at the end of the block if another machine has taken the run over, and
    as `ObjectStore` does before the block.
    """
    if held.store is None or held.lease is None:
        yield
        return
    run_dir = held.run_dir
    if _is_behind(run_dir, held.lease):
        _get_checkpoint(held.store, run_dir)
    (run_dir / SEEN).unlink(missing_ok=True)
    remove_pins(run_dir)
    keep_epoch(run_dir, held.lease.epoch)
    mirror = Mirror(run_dir, held.store, held.lease, keep)
    try:
        yield
    finally:
        mirror.close()
    if lost := lease_lost(run_dir):
        raise lost


def _is_ahead(run_dir: Path, keys: Collection[str]) -> bool:
    """Whether this machine has a checkpoint of a later step than a store with these keys."""
    return max(local_steps(run_dir), default=-1) > max(complete_steps(keys), default=-1)


def _get_files(store: ObjectStore, run_dir: Path, objects: Collection[StoredObject]) -> None:
    """Copy the small files of a run from the store, those that are of its later state."""
    there = shared_objects(objects)
    if _is_ahead(run_dir, [each.key for each in objects]):
        # Who has owned the run is not a matter of steps.
        there = {key: there[key] for key in (RUN,) if key in there}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda key: store.download(key, run_dir / key), there))


def _get_checkpoint(store: ObjectStore, run_dir: Path) -> None:
    """Copy the newest intact checkpoint from the store if it is newer than those here."""
    here = max(local_steps(run_dir), default=-1)
    stored = complete_steps(each.key for each in store.list_below(CHECKPOINTS))
    for step in sorted(stored, reverse=True):
        if step <= here:
            return
        log.info("Copying step %d of %s from %s", step, run_dir.name, store.address)
        try:
            get_folder(store, step_key(step), run_dir / step_key(step))
        except (ObjectDamagedError, ObjectMissingError) as error:
            log.warning("%s; falling back to the previous checkpoint", error)
        else:
            return


def refresh_runs(runs_dir: Path, store: str | None) -> None:
    """Bring the records of all stored runs into `runs_dir`, and who holds them.

    Takes one request per thousand objects and one per file that has changed since the last time.
    Without a store it does nothing. Raises as `ObjectStore` does.
    """
    if store is None:
        return
    runs: dict[str, list[StoredObject]] = defaultdict(list)
    for each in ObjectStore(f"{store}/runs", PATIENCE).list_below():
        name, _, key = each.key.partition("/")
        if key and NAME.fullmatch(name):
            runs[name].append(_within_run(each, key))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: _refresh(runs_dir / name, store, runs[name]), runs))
    if runs and not (runs_dir / "latest").exists():
        newest = max(runs, key=lambda name: max(each.modified for each in runs[name]))
        point_latest(runs_dir / newest)


def refresh_run(run_dir: Path, store: str | None) -> bool:
    """Bring the records of one run here; returns whether the store has any of it.

    Without a store it does nothing and returns True. Raises as `ObjectStore` does.
    """
    if store is None:
        return True
    there = run_store(store, run_dir.name).list_below()
    if there:
        _refresh(run_dir, store, there)
    return bool(there)


def refresh_logs(run_dir: Path, store: str | None) -> None:
    """Bring all small files of one run here unless it is worked on here. Raises as above."""
    stored = _newer_store(run_dir, store)
    if stored is not None:
        _get_files(stored, run_dir, stored.list_below())


def refresh_checkpoint(run_dir: Path, store: str | None) -> None:
    """Bring the newest checkpoint of one run here unless it is worked on here. Raises as above."""
    stored = _newer_store(run_dir, store)
    if stored is not None:
        _get_checkpoint(stored, run_dir)


def _newer_store(run_dir: Path, store: str | None) -> ObjectStore | None:
    """The place of a run in a store that another machine may have written to since this one."""
    if store is None or holder_of(run_dir / LOCK) is not None:
        return None
    stored = run_store(store, run_dir.name)
    found = read_lease(stored)
    return None if found is None or found[0].epoch == own_epoch(run_dir) else stored


def _within_run(listed: StoredObject, key: str) -> StoredObject:
    return StoredObject(listed.address, key, listed.bytes, listed.version, listed.modified)


def _refresh(run_dir: Path, store: str, objects: Collection[StoredObject]) -> None:
    if holder_of(make_folder(run_dir) / LOCK) is not None:
        return
    stored = run_store(store, run_dir.name)
    epoch, seen = own_epoch(run_dir), _read_seen(run_dir)
    versions = {each.key: str(each.version.etag) for each in objects}
    if versions.get(LEASE) != seen.get(LEASE) and (found := read_lease(stored)):
        keep_copy(run_dir, found[0])
        seen["epoch"] = str(found[0].epoch)
    if LEASE in versions and seen.get("epoch") == str(epoch):
        return  # Nobody has written since this machine did.
    changed = [
        each
        for each in objects
        if each.key in RECORDS
        and not (seen.get(each.key) == versions[each.key] and (run_dir / each.key).is_file())
    ]
    if not _is_ahead(run_dir, versions):
        for each in changed:
            with contextlib.suppress(ObjectMissingError):
                stored.download(each.key, run_dir / each.key)
    kept = {key: version for key, version in versions.items() if key in RECORDS or key == LEASE}
    write_json(run_dir / SEEN, kept | {"epoch": seen.get("epoch", "")})


def _read_seen(run_dir: Path) -> dict[str, str]:
    try:
        return dict(json.loads((run_dir / SEEN).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


@contextlib.contextmanager
def attach_unclaimed(run_dir: Path, holder: Holder, store: str | None, keep: int) -> Iterator[None]:
    """Use a run that is perhaps only in a store, without claiming it: evaluation writes a report.

    The report goes to the store at the end of the block, unless another process holds the run;
    then it stays on this machine. Raises as `hold_run` and `working_copy` do.
    """
    if store is None or holder_of(run_dir / LOCK) is not None:
        yield
        return
    with hold_run(run_dir, holder, store) as held:
        if held is not None:
            with working_copy(held, keep):
                yield
            return
        _get_checkpoint(run_store(store, run_dir.name), run_dir)
        yield
        log.warning("%s is in use elsewhere: the report stays on this machine", run_dir.name)
