"""Who works on a run in a store: one object, `OWNER`, that is only ever replaced by If-Match.

The owner of a run writes `<store>/runs/<run>/OWNER` anew every 20 seconds with a higher counter,
and releases it at the end. Who wants the run takes it over at once if it was released, otherwise
when it has watched `OWNER` stay the same for 90 seconds: no two clocks are compared. Of several
that try one succeeds. An owner that was taken for dead reads so before it completes or deletes
anything, keeps what it has on its disk, and stops.

`.owner` in the run folder is what this machine has seen of it; it is not copied to the store.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from pathlib import Path

from infini_model.runtime.errors import (
    DataError,
    ObjectMissingError,
    RunLostError,
    UnreachableError,
    UserError,
)
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_store import ObjectStore, Version
from infini_model.runtime.records import Record, parse_record, read_record, write_record

log = logging.getLogger(__name__)

OWNER, SEEN = "OWNER", ".owner"
# Between two renewals, without one before a takeover, and between two looks at another's run.
RENEWAL_SECONDS, SILENCE_SECONDS, LOOK_SECONDS = 20.0, 90.0, 1.0
# Why this process must not go on with a run, by its folder.
_lost: dict[Path, RunLostError] = {}


class Claim(Record):
    """The content of `OWNER`, different at every write; `holder` is None once it is released."""

    id: str
    counter: int
    holder: Holder | None


class Seen(Record):
    """What a folder of a run knows of `OWNER`, seen unchanged `since` and `until`, by its clock.

    `own` is the id of this folder's last claim, empty if it never had the run.
    """

    own: str = ""
    claim: Claim | None = None
    version: Version | None = None
    since: float = 0.0
    until: float = 0.0

    @property
    def is_own(self) -> bool:
        """Whether nobody has claimed the run since this folder did."""
        return self.claim is not None and self.claim.id == self.own

    @property
    def holder(self) -> Holder | None:
        """The process elsewhere that works on the run, unless it has been silent for too long."""
        is_silent = self.until - self.since >= SILENCE_SECONDS
        return None if self.claim is None or self.is_own or is_silent else self.claim.holder


def last_seen(run_dir: Path) -> Seen:
    """What this machine knew of a run's owner when it asked the store last."""
    try:
        return read_record(run_dir / SEEN, Seen)
    except DataError:
        return Seen()


def look(store: ObjectStore, run_dir: Path, listed: Version | None = None) -> Seen:
    """What `OWNER` says now, given the store below the run; not read if it is as `listed`.

    Raises `DataError` if it is damaged, and as `ObjectStore` does.
    """
    before, now = last_seen(run_dir), time.time()
    claim, version = before.claim, before.version
    if listed is None or version is None or listed.etag != version.etag:
        claim, version = _read(store)
    since = min(before.since, now) if version == before.version else now
    seen = Seen(own=before.own, claim=claim, version=version, since=since, until=now)
    write_record(run_dir / SEEN, seen)
    return seen


def watch(store: ObjectStore, run_dir: Path) -> Seen:
    """Look until it is known whether the owner elsewhere, if there is one, still works on the run.

    Raises as `look` does.
    """
    first = seen = look(store, run_dir)
    while (holder := seen.holder) is not None and seen.version == first.version:
        if seen is first:
            log.info("%s: waiting for a sign of life of %s", store.address, holder)
        time.sleep(LOOK_SECONDS)
        seen = look(store, run_dir)
    return seen


def take(store: ObjectStore, run_dir: Path, holder: Holder) -> Ownership | None:
    """Claim a run for `holder`; None if another process works on it, which `.owner` then names.

    Call it under the lock of `run_dir`: what an earlier process in this folder could not release is
    taken at once. Raises as `look` does.
    """
    seen = watch(store, run_dir)
    if seen.holder is not None:
        return None
    counter = 0 if seen.claim is None else seen.claim.counter + 1
    claim = Claim(id=uuid.uuid4().hex, counter=counter, holder=holder)
    version = _write(store, claim, seen.version)
    if version is None:  # Another was faster.
        look(store, run_dir)
        return None
    write_record(run_dir / SEEN, Seen(own=claim.id, claim=claim, version=version))
    return Ownership(store, run_dir, claim, version, was_elsewhere=not seen.is_own)


def lost(run_dir: Path) -> RunLostError | None:
    """Why this process must not go on with a run; None if it may."""
    return _lost.get(run_dir.resolve())


class Ownership:
    """A claim of this process, renewed by a thread until it is released or lost."""

    def __init__(
        self, store: ObjectStore, run_dir: Path, claim: Claim, version: Version, was_elsewhere: bool
    ) -> None:
        """`was_elsewhere` says whether another folder may have had the run since this one."""
        self.store, self.was_elsewhere = store, was_elsewhere
        self._run_dir = run_dir.resolve()
        # The thread tries again by itself.
        self._once = ObjectStore(store.address, patience=0.0)
        self._claim, self._version = claim, version
        self._ended = threading.Event()
        _lost.pop(self._run_dir, None)
        self._thread = threading.Thread(target=self._renew, name="owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RunLostError` if another process owns the run, and as `ObjectStore` does."""
        claim, _ = _read(self.store)
        if claim is not None and claim.id != self._claim.id:
            self._lose(claim)
        if (error := lost(self._run_dir)) is not None:
            raise error

    def _renew(self) -> None:
        warned = False
        while not self._ended.wait(RENEWAL_SECONDS):
            try:
                self._rewrite(self._claim.holder)
                warned = False
            except (UnreachableError, UserError) as error:
                if not warned:
                    log.warning("%s; training goes on, unless another machine takes it over", error)
                warned = True

    def _rewrite(self, holder: Holder | None) -> None:
        """Write over our own claim, or find out who has taken the run."""
        change = {"counter": self._claim.counter + 1, "holder": holder}
        claim = self._claim.model_copy(update=change)
        version = _write(self._once, claim, self._version)
        while version is None:
            found, known = _read(self._once)
            if found is not None and found.id != claim.id:
                self._lose(found)
                return
            # The answer to an earlier write has not arrived, or somebody has deleted it.
            version = _write(self._once, claim, known)
        self._claim, self._version = claim, version

    def _lose(self, taken: Claim) -> None:
        self._ended.set()
        _lost[self._run_dir] = RunLostError(
            f"run.name: {self._run_dir.name} was taken over by {taken.holder or 'another process'},"
            f" since {self.store.address} had not heard of this machine for {SILENCE_SECONDS:g} s"
        )

    def release(self) -> None:
        """End the claim; if the store cannot be reached, others take the run after a while."""
        self._ended.set()
        self._thread.join()
        if lost(self._run_dir) is None:
            with contextlib.suppress(UnreachableError, UserError):
                self._rewrite(None)


def _read(store: ObjectStore) -> tuple[Claim | None, Version | None]:
    try:
        content, version = store.read(OWNER)
    except ObjectMissingError:
        return None, None
    return parse_record(content, store.address_of(OWNER), Claim), version


def _write(store: ObjectStore, claim: Claim, expected: Version | None) -> Version | None:
    """Write `OWNER` if it is of the expected version, or there is none; None if it is not so."""
    return store.write_if(OWNER, claim.model_dump_json(indent=2).encode() + b"\n", expected)
