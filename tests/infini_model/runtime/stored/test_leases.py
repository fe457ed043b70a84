"""A run in a store is held by one machine at a time, whatever happens to it or to the network.

That rests on conditional writes: a store that ignores them is found out before it is used.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commands import eventually

from infini_model.config import load_config
from infini_model.runtime.errors import LeaseLostError, StoreError, UnreachableError
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stored import conditions, lease, record
from infini_model.runtime.stored.conditions import check_stores
from infini_model.runtime.stored.copies import put_folder
from infini_model.runtime.stored.lease import (
    LEASE_SECONDS,
    Lease,
    await_sign_of_life,
    read_lease,
    take_lease,
)
from infini_model.runtime.stored.record import lease_lost, stored_holder

ELSEWHERE = Holder(pid=7, started=1.0, host="elsewhere", run="/runs/mine")


class Clock:
    """Time that passes only when a test, or somebody who waits, says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which leases end, so that no delay of this machine lets one expire.

    How often they are renewed is another matter.
    """
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(record, "time", clock)
    return clock


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return ObjectStore(f"{bucket}/team/runs/mine")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed twenty times a second."""
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def take(store: ObjectStore, run_dir: Path) -> Lease | None:
    return take_lease(store, run_dir, Holder.current(run_dir))


def taken(store: ObjectStore, run_dir: Path) -> Lease:
    held = take(store, run_dir)
    assert held is not None
    return held


@pytest.mark.usefixtures("often")
def test_a_lease_is_renewed_while_it_is_held(
    store: ObjectStore, folders: Path, clock: Clock
) -> None:
    first = taken(store, folders / "one")
    for _ in range(3):
        clock.now += 0.9 * LEASE_SECONDS
        until = clock.now + LEASE_SECONDS
        eventually(lambda: read_lease(store)[0].until == until, "the renewal")  # noqa: B023
        assert take(store, folders / "two") is None
    await_sign_of_life(store, folders / "two")
    first.close()


def test_a_lease_of_a_dead_machine_expires(store: ObjectStore, folders: Path, clock: Clock) -> None:
    until = clock.now + 5.0
    dead = record.LeaseRecord(3, "t", 0, ELSEWHERE, "another machine", until)
    store.create("lease.json", dead.dumps())
    assert take(store, folders / "one") is None
    assert str(stored_holder(folders / "one")) == "process 7 on elsewhere"
    await_sign_of_life(store, folders / "two")
    assert clock.now >= until
    second = taken(store, folders / "one")
    assert second.epoch == 4
    second.close()


@pytest.mark.usefixtures("often")
def test_a_lease_survives_a_server_that_is_gone_unless_another_has_taken_it_meanwhile(
    s3, store: ObjectStore, folders: Path, clock: Clock
) -> None:
    first = taken(store, folders / "one")
    with s3.line.gone():
        clock.now += 1.5 * LEASE_SECONDS
        with pytest.raises(UnreachableError):
            first.confirm()
    assert first.confirm()
    assert take(store, folders / "two") is None
    with s3.line.gone():
        clock.now += 1.2 * LEASE_SECONDS
        # The other machine has its own way to the server.
        current = record.LeaseRecord(2, "t", 0, ELSEWHERE, "another machine", clock.now + 60)
        key = "team/runs/mine/lease.json"
        s3.client().put_object(
            Bucket=store.address[5:].split("/")[0], Key=key, Body=current.dumps()
        )
    eventually(lambda: first.is_lost, "the loss")
    assert not first.confirm()
    lost = lease_lost(folders / "one")
    assert isinstance(lost, LeaseLostError)
    assert str(lost).startswith("run.name: one was taken over by process 7 on elsewhere, since")
    first.close()
    assert read_lease(store)[0] == current


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("left", [None, record.LeaseRecord(1, "t", 0, ELSEWHERE, "another", 0.0)])
def test_of_two_machines_that_claim_at_once_one_wins(
    store: ObjectStore,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: record.LeaseRecord | None,
) -> None:
    """Both find that the run is free: it has no lease, or one that has expired."""
    if left is not None:
        store.create("lease.json", left.dumps())
    overtaken = []

    def read_and_be_overtaken(store: ObjectStore) -> object:
        found = read_lease(store)
        if not overtaken:
            overtaken.append(True)
            overtaken.append(taken(store, folders / "one"))
        return found

    monkeypatch.setattr(lease, "read_lease", read_and_be_overtaken)
    assert take(store, folders / "two") is None
    holder = stored_holder(folders / "two")
    assert holder is not None
    assert holder.run == str(folders / "one")
    overtaken[1].close()


def test_a_folder_takes_back_a_lease_that_it_could_not_release(
    store: ObjectStore, folders: Path
) -> None:
    """As after a restart of the machine: nobody can tell whether that process is alive."""
    (folders / "one" / ".token").write_text("t")
    left = record.LeaseRecord(1, "t", 0, ELSEWHERE, "before the restart", 4e9)
    store.create("lease.json", left.dumps())
    await_sign_of_life(store, folders / "one")
    assert take(store, folders / "two") is None
    taken(store, folders / "one").close()


def test_a_damaged_lease_is_named(store: ObjectStore, folders: Path) -> None:
    store.write("lease.json", b"{")
    with pytest.raises(StoreError, match=r"mine/lease\.json: is damaged; delete it"):
        take(store, folders / "one")


def test_a_checkpoint_does_not_count_if_the_run_was_lost_during_its_upload(
    store: ObjectStore, folders: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 1e6)
    checkpoint, manifest = folders / "checkpoint", "checkpoints/step-4/manifest.json"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"weights")
    first = taken(store, folders / "one")
    others: list[Lease] = []

    def stall(_bytes: int) -> None:
        """As a machine that is suspended for longer than its lease, once."""
        if not others:
            clock.now += LEASE_SECONDS + 0.1
            others.append(taken(store, folders / "two"))

    assert not put_folder(store, "checkpoints/step-4", checkpoint, stall, first.confirm)
    assert (first.is_lost, store.find(manifest)) == (True, None)
    assert put_folder(store, "checkpoints/step-4", checkpoint, stall, others[0].confirm)
    assert store.find(manifest) is not None
    first.close()
    others[0].close()


@pytest.mark.parametrize(
    ("ignored", "setting"), [("create", "run.output_dir"), ("replace", "run.data_dir")]
)
def test_a_store_is_asked_once_and_refused_in_one_line_if_it_ignores_a_condition(
    ignored: str, setting: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path))
    address = f"{bucket}/team"
    run = load_config(overrides=[f"run.output_dir={tmp_path}", f"{setting}={address}"]).run
    check_stores(run, builds_dataset=True)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "create", pytest.fail)
        check_stores(run, builds_dataset=True)
    # Another server, whatever this machine remembers of that one.
    monkeypatch.setattr(conditions, "endpoint_of", lambda _: "another")
    monkeypatch.setattr(
        ObjectStore, ignored, lambda store, key, content, *_: store.write(key, content)
    )
    message = f"^{setting}: {address}: the store ignores conditional writes, .*If-Match$"
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            check_stores(run, builds_dataset=True)
    assert ObjectStore(bucket).list_below() == []
