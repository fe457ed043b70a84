"""Runs that an object store keeps for all machines, which work on them in folders of their own.

`<store>/runs/<run>/` is a copy of the run folder, made in the background after each save: metrics
and logs, then the files of the checkpoint, its manifest last. The highest step with a manifest
counts. Who is behind takes the store's files; who is ahead of it keeps its own. `OWNER` says who
writes (`infini_model.runtime.owner`). `.stored` in the run folder says in which version it and the
store have last agreed on each small file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from infini_model.config import Config
from infini_model.config.section import NAME
from infini_model.runtime.errors import (
    ObjectDamagedError,
    ObjectMissingError,
    RunLostError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.holders import ANYBODY, Holder, Owner, hold, holder_of
from infini_model.runtime.object_store import PATIENCE, ObjectStore, StoredObject
from infini_model.runtime.owner import OWNER, Ownership, look, lost, take, watch
from infini_model.runtime.runs import (
    CHECKPOINTS,
    LOCK,
    RECORDS,
    RUN,
    STEP,
    is_shared,
    kept_steps,
    local_steps,
    small_files,
    step_key,
)
from infini_model.runtime.storage import (
    MANIFEST,
    atomic_folder,
    point_latest,
    read_json_or_empty,
    write_json,
)

log = logging.getLogger(__name__)

# Of each small file: its entity tag in the store; its time of change and size here.
SYNCED = ".stored"
COMPLETE = re.compile(rf"{STEP.pattern}/{re.escape(MANIFEST)}")
AT_ONCE = 8
POLL_SECONDS = 0.5
RETRY_SECONDS = 60.0


class Held(NamedTuple):
    """A run that this process holds; `ownership` is None if it is in no store."""

    run_dir: Path
    ownership: Ownership | None = None


@contextlib.contextmanager
def hold_run(run_dir: Path, holder: Holder, store: str | None) -> Iterator[Held | None]:
    """Hold a run, on all machines if there is a store; yields None if another process holds it.

    The run's small files are then up to date. Raises `UserError` if the folder cannot be written,
    and as `ObjectStore` does.
    """
    with hold(run_dir / LOCK, holder) as locked, contextlib.ExitStack() as claims:
        held = Held(run_dir) if locked else None
        if locked and store is not None:
            stored = _store_of(run_dir, store)
            ownership = take(stored, run_dir, holder)
            held = None if ownership is None else Held(run_dir, ownership)
            if ownership is not None:
                claims.callback(ownership.release)
                if ownership.was_elsewhere:
                    _get_files(stored, run_dir, stored.list_below())
        yield held


@contextlib.contextmanager
def working_copy(held: Held, keep: int) -> Iterator[None]:
    """Bring the newest checkpoint of a held run here, and keep the store up to date in the block.

    `keep` is `checkpoint.save_total_limit`. Without a store it does nothing. Raises `RunLostError`
    at the end of the block if another machine has taken the run over; before it as `ObjectStore`.
    """
    run_dir, ownership = held
    if ownership is None:
        yield
        return
    if ownership.was_elsewhere:
        _get_checkpoint(ownership.store, run_dir)
    mirror = _Mirror(run_dir, ownership, keep)
    try:
        yield
    finally:
        mirror.close()
    if error := lost(run_dir):
        raise error


@contextlib.contextmanager
def attach_unclaimed(run_dir: Path, config: Config, owner: Owner = ANYBODY) -> Iterator[None]:
    """Use a run that is perhaps only in a store, without claiming it: evaluation writes a report.

    `owner` holds it, but it does not become their own.

    The report goes to the store at the end of the block, unless another process holds the run;
    then it stays on this machine. Raises as `hold_run` and `working_copy` do.
    """
    store = config.run.store
    if store is None or holder_of(run_dir / LOCK) is not None:
        yield
        return
    with hold_run(run_dir, Holder.current(run_dir, owner), store) as held:
        if held is not None:
            with working_copy(held, config.checkpoint.save_total_limit):
                yield
            return
        _get_checkpoint(_store_of(run_dir, store), run_dir)
        yield
        log.warning("%s is in use elsewhere: the report stays on this machine", run_dir.name)


def await_owner(run_dir: Path, store: str | None) -> None:
    """Wait until it is known whether the process elsewhere that has a run still works on it."""
    if store is not None and holder_of(run_dir / LOCK) is None:
        watch(_store_of(run_dir, store), run_dir)


def saved_steps(run_dir: Path, store: str | None) -> set[int]:
    """Return the steps of a run's complete checkpoints. Raises as `ObjectStore` does."""
    there = set[int]() if store is None else _stored_steps(_store_of(run_dir, store))
    return local_steps(run_dir) | there


def fetch_checkpoint(run_dir: Path, store: str | None, step: int) -> None:
    """Copy the checkpoint of a step from the store, unless it is here. Raises as `ObjectStore`."""
    if store is not None and step not in local_steps(run_dir):
        _get_folder(_store_of(run_dir, store), step_key(step), run_dir / step_key(step))


def refresh_runs(runs_dir: Path, store: str | None) -> None:
    """Bring the records of all stored runs into `runs_dir`, and who works on them.

    Takes one request per thousand objects and one per file that has changed since the last time.
    Without a store it does nothing. Raises as `ObjectStore` does.
    """
    if store is None:
        return
    runs: dict[str, list[StoredObject]] = defaultdict(list)
    for each in ObjectStore(f"{store}/runs", PATIENCE).list_below():
        name, _, key = each.key.partition("/")
        if key and NAME.fullmatch(name):
            runs[name].append(each._replace(key=key))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: _refresh(runs_dir / name, store, runs[name]), runs))
    if runs and not (runs_dir / "latest").exists():
        newest = max(runs, key=lambda name: max(each.modified for each in runs[name]))
        point_latest(runs_dir / newest)


def refresh_run(
    run_dir: Path, store: str | None, *, logs: bool = False, checkpoint: bool = False
) -> bool:
    """Bring the records of one run here, with all its small files or its newest checkpoint.

    Returns whether the store has any of it; True without a store. Raises as `ObjectStore` does.
    """
    if store is None:
        return True
    there = _store_of(run_dir, store).list_below()
    if there and _refresh(run_dir, store, there, None if logs else RECORDS) and checkpoint:
        _get_checkpoint(_store_of(run_dir, store), run_dir)
    return bool(there)


def _refresh(
    run_dir: Path,
    store: str,
    objects: Collection[StoredObject],
    only: Collection[str] | None = RECORDS,
) -> bool:
    """Bring files here; does nothing and returns False if this folder has or had the run last."""
    stored = _store_of(run_dir, store)
    listed = next((each.version for each in objects if each.key == OWNER), None)
    if holder_of(run_dir / LOCK) is not None or look(stored, run_dir, listed).is_own:
        return False
    _get_files(stored, run_dir, objects, only)
    return True


def _store_of(run_dir: Path, store: str) -> ObjectStore:
    return ObjectStore(f"{store}/runs/{run_dir.name}", PATIENCE)


def complete_steps(keys: Iterable[str]) -> set[int]:
    """The steps of the checkpoints whose manifests are among the keys of a run."""
    return {int(match[1]) for key in keys if (match := COMPLETE.fullmatch(key))}


def _stored_steps(store: ObjectStore) -> set[int]:
    return complete_steps(each.key for each in store.list_below(CHECKPOINTS))


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_mtime_ns, status.st_size]


def _get_files(
    store: ObjectStore,
    run_dir: Path,
    objects: Collection[StoredObject],
    only: Collection[str] | None = None,
) -> None:
    """Bring the small files here that have changed in the store, unless this folder is ahead."""
    synced = read_json_or_empty(run_dir / SYNCED)
    steps = complete_steps(each.key for each in objects)
    if max(local_steps(run_dir), default=-1) > max(steps, default=-1):
        only = {RUN}  # Who has owned the run is not a matter of steps.

    def get(each: StoredObject) -> None:
        with contextlib.suppress(ObjectMissingError):
            store.download(each.key, run_dir / each.key)
            synced[each.key] = [each.version.etag, *_state(run_dir / each.key)]

    def is_wanted(each: StoredObject) -> bool:
        is_same = synced.get(each.key, [None])[0] == each.version.etag
        is_new = not (is_same and (run_dir / each.key).is_file())
        return is_new and is_shared(each.key) and (not only or each.key in only)

    if wanted := list(filter(is_wanted, objects)):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(get, wanted))
        write_json(run_dir / SYNCED, synced)


def _get_checkpoint(store: ObjectStore, run_dir: Path) -> None:
    """Copy the newest intact checkpoint from the store if it is newer than those here."""
    here = max(local_steps(run_dir), default=-1)
    for step in sorted(_stored_steps(store), reverse=True):
        if step <= here:
            return
        log.info("Copying step %d of %s from %s", step, run_dir.name, store.address)
        try:
            _get_folder(store, step_key(step), run_dir / step_key(step))
        except (ObjectDamagedError, ObjectMissingError) as error:
            log.warning("%s; falling back to the previous checkpoint", error)
        else:
            return


def _get_folder(store: ObjectStore, key: str, folder: Path) -> None:
    """Copy a complete folder from the store; every file is compared with the manifest."""
    place = store.address_of(f"{key}/{MANIFEST}")
    manifest = store.read(f"{key}/{MANIFEST}")[0]
    try:
        sums = dict(json.loads(manifest)["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ObjectDamagedError(f"{place}: is damaged") from error
    with atomic_folder(folder) as temporary:
        for name, expected in sums.items():
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise ObjectDamagedError(f"{place}: is damaged: it names the file {name!r}")
            store.download(f"{key}/{name}", temporary / name, expected)
        (temporary / MANIFEST).write_bytes(manifest)


class _Mirror:
    """A thread that keeps the copy of a run in its store up to date until it is closed.

    It is in the process that holds the run, which is no rank: no step waits for it, and a rank that
    is killed does not end it. A store that is gone is told once and tried again.
    """

    def __init__(self, run_dir: Path, ownership: Ownership, keep: int) -> None:
        self._run_dir, self._ownership, self._keep = run_dir, ownership, keep
        self._store = ownership.store
        self._stored: set[int] = set()  # steps
        self._failure: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        """Copy after each checkpoint, once more at the end, and sooner again what has failed."""
        tried: set[int] = set()
        is_last, again_at = False, -math.inf
        while not is_last:
            is_last = self._closing.wait(POLL_SECONDS)
            steps = local_steps(self._run_dir)
            if not is_last and steps <= tried and time.monotonic() < again_at:
                continue
            tried = steps
            try:
                self._copy()
                self._failure, again_at = None, math.inf
            except RunLostError:
                return  # `working_copy` raises it.
            except (UnreachableError, UserError, OSError) as error:
                if self._failure is None and not is_last:
                    name = self._run_dir.name
                    log.warning("%s; training goes on, and %s is copied later", error, name)
                self._failure, again_at = error, time.monotonic() + RETRY_SECONDS

    def _copy(self) -> None:
        """Copy what is new, then delete the stored checkpoints that retention does not keep."""
        self._ownership.check()
        self._put_files()
        keys = [each.key for each in self._store.list_below(CHECKPOINTS)]
        self._stored = complete_steps(keys)
        for step in sorted(self._missing_steps(), reverse=True):
            self._put_checkpoint(step)
        # What an interrupted upload has left of an older checkpoint goes too.
        started = {int(match[1]) for key in keys if (match := re.match(rf"{STEP.pattern}/", key))}
        for step in sorted(started - kept_steps(self._run_dir, self._stored, self._keep)):
            if step < max(self._stored, default=0):
                self._ownership.check()
                old = [key for key in keys if key.startswith(f"{step_key(step)}/")]
                self._store.delete(filter(COMPLETE.fullmatch, old))
                self._store.delete(old)

    def _missing_steps(self) -> set[int]:
        """Local checkpoints that retention keeps and that the store is not known to have."""
        local = local_steps(self._run_dir)
        kept = kept_steps(self._run_dir, local | self._stored, self._keep)
        return (local & kept) - self._stored

    def _put_files(self) -> None:
        synced = read_json_or_empty(self._run_dir / SYNCED)
        try:
            for key in small_files(self._run_dir):
                path = self._run_dir / key
                with contextlib.suppress(FileNotFoundError):
                    state = _state(path)
                    if synced.get(key, [None])[1:] != state:
                        version = self._store.write(key, path.read_bytes())
                        synced[key] = [version.etag, *state]
        finally:
            write_json(self._run_dir / SYNCED, synced)

    def _put_checkpoint(self, step: int) -> None:
        """Copy a checkpoint, unless retention has just deleted it here.

        Its files are opened before the first is sent: what is deleted meanwhile can still be read.
        """
        key, folder = step_key(step), self._run_dir / step_key(step)
        with contextlib.ExitStack() as opened:
            try:
                manifest = (folder / MANIFEST).read_bytes()
                names = json.loads(manifest)["sha256"]
                files = [(name, opened.enter_context((folder / name).open("rb"))) for name in names]
            except FileNotFoundError:
                return
            for name, file in files:
                self._store.upload(f"{key}/{name}", Path(f"/proc/self/fd/{file.fileno()}"))
        # The upload may have taken hours.
        self._ownership.check()
        self._store.write(f"{key}/{MANIFEST}", manifest)
        self._stored.add(step)
        log.info("Copied step %d of %s to %s", step, self._run_dir.name, self._store.address)

    def close(self) -> None:
        """Copy what is new; name in one line what cannot be copied and is only on this machine."""
        self._closing.set()
        name, address = self._run_dir.name, self._store.address
        log.info("Copying what is new of %s to %s", name, address)
        try:
            self._thread.join()
        finally:
            if lost(self._run_dir) is None and (self._failure or self._thread.is_alive()):
                steps = [f"step {step}" for step in sorted(self._missing_steps())]
                log.warning(
                    "%s: %s are not in %s yet (%s); infini resume %s copies them from this machine",
                    *(name, " and ".join([*steps, "the newest files"]), address),
                    *(self._failure or "interrupted", name),
                )
