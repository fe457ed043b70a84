"""A lease on a stored run: at most one machine works in it.

`<store>/runs/<run>/lease.json` is written by compare-and-swap only. Its holder renews it in the
background; after it has expired, anyone may take it. A holder that was cut off keeps its lease as
long as nobody has taken it, and learns of the loss at its next renewal. Expiry is judged by the
clocks of the machines, which have to agree within seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

from infini_model.runtime.errors import (
    ObjectMissingError,
    StoreError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_stores.object_store import ObjectStore, Version
from infini_model.runtime.stored.record import (
    LOST,
    LeaseRecord,
    is_from_here,
    keep_copy,
    keep_token,
    loads,
    note_lost,
    this_machine,
)

log = logging.getLogger(__name__)

LEASE = "lease.json"
LEASE_SECONDS = 60.0
RENEWAL_SECONDS = 10.0


def read_lease(store: ObjectStore) -> tuple[LeaseRecord, Version] | None:
    """The lease of a run, given the store below its folder; None if it was never taken.

    Raises `StoreError` if it is damaged, and as `ObjectStore` does.
    """
    try:
        content, version = store.read(LEASE)
    except ObjectMissingError:
        return None
    try:
        return loads(content), version
    except (ValueError, TypeError, KeyError) as error:
        address = store.address_of(LEASE)
        raise StoreError(f"{address}: is damaged; delete it if no machine uses the run") from error


def take_lease(store: ObjectStore, run_dir: Path, holder: Holder) -> Lease | None:
    """Take the lease of a run for `holder`; None if another process holds it.

    Call it under the lock of `run_dir`: the lease of an earlier process in this folder, which
    could not release it, is taken at once. Afterwards `.lease` in `run_dir` says who holds it.
    Raises as `ObjectStore` does.
    """
    found = read_lease(store)
    if found is not None and found[0].is_held and not is_from_here(run_dir, found[0]):
        keep_copy(run_dir, found[0])
        return None
    epoch = 1 if found is None else found[0].epoch + 1
    record = LeaseRecord(epoch, uuid.uuid4().hex, 0, holder, this_machine(), _end())
    keep_token(run_dir, record)
    if found is None:
        version = store.create(LEASE, record.dumps())
    else:
        version = store.replace(LEASE, record.dumps(), found[1])
    if version is None:  # another process came first
        if (winner := read_lease(store)) is not None:
            keep_copy(run_dir, winner[0])
        return None
    return Lease(store, run_dir, record, version)


def await_sign_of_life(store: ObjectStore, run_dir: Path) -> None:
    """Return once a holder elsewhere has renewed its lease, released it, or let it expire.

    Raises as `ObjectStore` does.
    """
    first = read_lease(store)
    if first is not None and is_from_here(run_dir, first[0]):
        return
    while first is not None and first[0].is_held:
        time.sleep(min(1.0, RENEWAL_SECONDS / 4))
        now = read_lease(store)
        if now is None or now[1] != first[1]:
            return


def _end() -> float:
    return time.time() + LEASE_SECONDS


class Lease:
    """A lease that this process holds, renewed by a thread until it is closed or lost."""

    def __init__(
        self, store: ObjectStore, run_dir: Path, record: LeaseRecord, version: Version
    ) -> None:
        # The thread tries again by itself.
        self._store = ObjectStore(store.address, patience=0.0)
        self._run_dir, self._record, self._version = run_dir, record, version
        self._is_lost = False
        self._changing = threading.Lock()
        self._closed = threading.Event()
        (run_dir / LOST).unlink(missing_ok=True)
        keep_copy(run_dir, record)
        self._thread = threading.Thread(target=self._renew_often, name="lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """How often the run has been taken, this time included."""
        return self._record.epoch

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def confirm(self) -> bool:
        """Whether this process may write to the run in the store now; renews an expired lease.

        Raises `UnreachableError` or `StoreError` if the store cannot tell.
        """
        if not self._is_lost and time.time() >= self._record.until:
            self._renew()
        return not self._is_lost

    def _renew_often(self) -> None:
        warned = False
        while not self._is_lost and not self._closed.wait(RENEWAL_SECONDS):
            try:
                self._renew()
                warned = False
            except (UnreachableError, UserError) as error:
                if not warned:
                    log.warning("%s; the lease on %s is not renewed", error, self._run_dir.name)
                warned = True

    def _renew(self) -> None:
        with self._changing:
            record = replace(self._record, beat=self._record.beat + 1, until=_end())
            if not self._closed.is_set():
                self._write(record)

    def _write(self, record: LeaseRecord) -> None:
        """Write over our own record, or find out who has taken the lease."""
        version = self._store.replace(LEASE, record.dumps(), self._version)
        while version is None:
            found = read_lease(self._store)
            if found is None:
                version = self._store.create(LEASE, record.dumps())
            elif found[0].token == record.token:
                # The answer to an earlier renewal did not arrive.
                version = self._store.replace(LEASE, record.dumps(), found[1])
            else:
                self._lose(found[0])
                return
        self._record, self._version = record, version
        keep_copy(self._run_dir, record)

    def _lose(self, taken: LeaseRecord) -> None:
        keep_copy(self._run_dir, taken)
        by = "another process" if taken.holder is None else str(taken.holder)
        reason = (
            f"run.name: {self._run_dir.name} was taken over by {by}, since this machine could not"
            f" reach {self._store.address} for more than {LEASE_SECONDS:g} s"
        )
        note_lost(self._run_dir, reason)
        self._is_lost = True
        log.error("%s", reason)

    def close(self) -> None:
        """Release the run; if the store cannot be reached, the lease expires by itself."""
        self._closed.set()
        with self._changing, contextlib.suppress(UnreachableError, UserError):
            if not self._is_lost:
                released = replace(self._record, holder=None, beat=self._record.beat + 1, until=0.0)
                self._write(released)
