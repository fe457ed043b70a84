"""A run in a store is held by one machine at a time, whatever happens to it or to the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import eventually

from infini_model.runtime.errors import LeaseLostError, StoreError, UnreachableError
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stored import lease, record
from infini_model.runtime.stored.lease import (
    LEASE_SECONDS,
    Lease,
    await_sign_of_life,
    read_lease,
    take_lease,
)
from infini_model.runtime.stored.record import lease_lost, stored_holder

if TYPE_CHECKING:
    from conftest import Clock

ELSEWHERE = Holder(pid=7, started=1.0, host="elsewhere", run="/runs/mine")
HOLD = """
import sys, time
from pathlib import Path
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stored import lease
lease.LEASE_SECONDS = 1e9
run_dir = Path(sys.argv[2])
run_dir.mkdir()
for line in sys.stdin:
    holder = Holder.current(run_dir, None)
    held = lease.take_lease(ObjectStore(sys.argv[1] + line.strip()), run_dir, holder)
    print("refused" if held is None else "taken", flush=True)
"""


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return ObjectStore(f"{bucket}/team/runs/mine")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed twenty times a second."""
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def take(store: ObjectStore, run_dir: Path) -> Lease | None:
    return take_lease(store, run_dir, Holder.current(run_dir, None))


def taken(store: ObjectStore, run_dir: Path) -> Lease:
    held = take(store, run_dir)
    assert held is not None
    return held


@pytest.mark.usefixtures("clock")
def test_a_held_run_is_refused_and_its_holder_named(store: ObjectStore, folders: Path) -> None:
    first = taken(store, folders / "one")
    assert take(store, folders / "two") is None
    holder = stored_holder(folders / "two")
    assert holder is not None
    assert (holder.pid, holder.run) == (os.getpid(), str(folders / "one"))
    first.close()
    second = taken(store, folders / "two")
    assert second.epoch == first.epoch + 1
    second.close()
    assert stored_holder(folders / "two") is None


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


def test_a_dead_process_of_this_machine_holds_nothing(store: ObjectStore, folders: Path) -> None:
    dead = replace(Holder.current(folders, None), pid=2**22 + 1)
    left = record.LeaseRecord(1, "t", 0, dead, record.this_machine(), 4e9)
    store.create("lease.json", left.dumps())
    taken(store, folders / "one").close()


@pytest.mark.usefixtures("often")
def test_a_lease_survives_a_server_that_is_gone_if_nobody_takes_it(
    s3, store: ObjectStore, folders: Path, clock: Clock
) -> None:
    first = taken(store, folders / "one")
    with s3.line.gone():
        clock.now += 1.5 * LEASE_SECONDS
        with pytest.raises(UnreachableError):
            first.confirm()
    assert first.confirm()
    assert take(store, folders / "two") is None
    first.close()


@pytest.mark.usefixtures("often")
def test_a_lease_that_another_has_taken_meanwhile_is_lost(
    s3, store: ObjectStore, folders: Path, clock: Clock
) -> None:
    first = taken(store, folders / "one")
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


@pytest.mark.usefixtures("often")
def test_an_answer_that_was_cut_loses_no_lease(
    s3, store: ObjectStore, folders: Path, clock: Clock
) -> None:
    first = taken(store, folders / "one")
    for _ in range(8):
        # Only renewals use the line.
        s3.line.cut_after(10)
        eventually(lambda: s3.line.has_cut, "a renewal")
    clock.now += LEASE_SECONDS
    eventually(first.confirm, "a renewal whose answer arrives")
    assert not first.is_lost
    first.close()
    assert read_lease(store)[0].holder is None


def test_of_two_machines_that_claim_at_once_one_wins(
    s3, store: ObjectStore, tmp_path: Path
) -> None:
    """Processes, as each has its own connections; many times."""
    import subprocess

    rounds = 40
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, store.address, str(tmp_path / str(number))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | s3.environment(),
        )
        for number in range(2)
    ]
    try:
        for number in range(rounds):
            for each in contenders:
                each.stdin.write(f"/{number}\n")
                each.stdin.flush()
            answers = sorted(each.stdout.readline().strip() for each in contenders)
            assert answers == ["refused", "taken"]
    finally:
        for each in contenders:
            each.kill()
            each.communicate()


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
