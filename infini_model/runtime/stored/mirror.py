"""Copying a run folder to its store while a training works in it.

A thread of the process that holds the run does it, not a rank: no step waits for it, a rank that is
killed does not end it, and what retention deletes meanwhile is pinned first. A store that is gone
is told once and tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from infini_model.runtime.errors import UnreachableError, UserError
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.runs import CHECKPOINTS, MODEL, kept_steps, step_key
from infini_model.runtime.stored.copies import (
    apply_retention,
    complete_steps,
    local_steps,
    pinned,
    put_file,
    put_folder,
    small_files,
)
from infini_model.runtime.stored.lease import Lease

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
RETRY_SECONDS = 60.0
TELL_SECONDS = 5.0
MEGABYTE = 1e6


class Mirror:
    """Keeps the copy of a run in its store up to date until it is closed.

    After each checkpoint, and at the end: first the small files, so that the metrics are never
    behind a checkpoint; then the checkpoints, the newest first; then what retention deletes.
    """

    def __init__(self, run_dir: Path, store: ObjectStore, lease: Lease, keep: int) -> None:
        """`keep` is `checkpoint.save_total_limit`."""
        self._run_dir, self._store, self._lease, self._keep = run_dir, store, lease, keep
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time of change and size
        self._steps: set[int] = set()  # known to be stored
        self._seen: set[int] | None = None  # checkpoints that a copy has been tried for
        self._failure: Exception | None = None
        self._tried_at = 0.0
        self._bytes_left = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            if self._is_due():
                self._try()
            if self._closing.wait(POLL_SECONDS):
                break
        self._try(is_last=True)

    def _is_due(self) -> bool:
        """Whether there is a new checkpoint, or a failed copy is to be tried again."""
        if self._failure is not None and time.monotonic() > self._tried_at + RETRY_SECONDS:
            return True
        return self._seen is None or not local_steps(self._run_dir) <= self._seen

    def _try(self, *, is_last: bool = False) -> None:
        self._seen = local_steps(self._run_dir)
        try:
            self._copy(is_last=is_last)
        except (UnreachableError, UserError, OSError) as error:
            if self._failure is None and not is_last:
                log.warning("%s; training goes on, and %s is copied later", error, self._name)
            self._failure, self._tried_at = error, time.monotonic()
        else:
            self._failure = None

    @property
    def _name(self) -> str:
        return self._run_dir.name

    def _copy(self, *, is_last: bool) -> None:
        if not self._lease.confirm():
            return
        for key, path in small_files(self._run_dir).items():
            self._put_file(key, path)
        self._steps = complete_steps(each.key for each in self._store.list_below(CHECKPOINTS))
        for step in sorted(self._missing_steps(), reverse=True):
            self._put_checkpoint(step)
        if is_last and (self._run_dir / MODEL).is_dir():
            self._put_folder(MODEL, self._run_dir / MODEL)
        if self._lease.confirm():
            apply_retention(self._store, self._run_dir, self._keep)

    def _missing_steps(self) -> set[int]:
        """Local checkpoints that retention keeps and that the store is not known to have."""
        local = local_steps(self._run_dir)
        losses = read_validation_losses(self._run_dir)
        return (local & kept_steps(local | self._steps, losses, self._keep)) - self._steps

    def _put_file(self, key: str, path: Path) -> None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return
        state = (status.st_mtime_ns, status.st_size)
        if self._sent.get(key) != state and self._lease.confirm():
            put_file(self._store, key, path)
            self._sent[key] = state

    def _put_checkpoint(self, step: int) -> None:
        with pinned(self._run_dir, step) as folder:
            if folder is not None and self._put_folder(step_key(step), folder):
                self._steps.add(step)

    def _put_folder(self, key: str, folder: Path) -> bool:
        if not self._lease.confirm():
            return False
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        self._bytes_left = sum(sizes)
        if put_folder(self._store, key, folder, self._count, self._lease.confirm):
            log.info("Copied %s of %s to %s", key.rpartition("/")[2], self._name, self._address)
        self._bytes_left = 0
        return not self._lease.is_lost

    def _count(self, size: int) -> None:
        self._bytes_left -= size

    @property
    def _address(self) -> str:
        return self._store.address.rpartition("/runs/")[0]

    def close(self) -> None:
        """Copy what is new, telling the progress; whatever cannot be copied is named in one line.

        Raises nothing of its own: everything is on this machine's disk.
        """
        self._closing.set()
        try:
            while self._thread.is_alive():
                self._thread.join(TELL_SECONDS)
                if self._thread.is_alive():
                    left = self._bytes_left / MEGABYTE
                    log.info("Copying %s to %s: %.0f MB left", self._name, self._address, left)
        finally:
            self._tell_what_is_missing()

    def _tell_what_is_missing(self) -> None:
        if self._lease.is_lost or (self._failure is None and not self._thread.is_alive()):
            return
        steps = [f"step {step}" for step in sorted(self._missing_steps())]
        log.warning(
            "%s: %s are not in %s yet (%s); infini resume %s copies them from this machine",
            *(self._name, " and ".join([*steps, "the newest files"]), self._address),
            *(self._failure or "interrupted", self._name),
        )
