"""A run in a store has one owner at a time, whatever happens to it or to the network."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commands import eventually

from infini_model.runtime import owner
from infini_model.runtime.errors import DataError, RunLostError, UnreachableError
from infini_model.runtime.holders import Holder
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.owner import (
    SILENCE_SECONDS,
    Claim,
    Ownership,
    last_seen,
    look,
    lost,
    take,
)

ELSEWHERE = Holder(pid=7, started=1.0, host="elsewhere", run="/runs/mine")
OF_ANOTHER = Claim(id="another", counter=3, holder=ELSEWHERE)
RELEASED = OF_ANOTHER.model_copy(update={"holder": None})


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
    """The clock of whoever watches; how often an owner renews its claim is another matter."""
    clock = Clock()
    monkeypatch.setattr(owner, "time", clock)
    return clock


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners renew their claims twenty times a second, and nobody is silent for too long."""
    for name, seconds in (("RENEWAL", 0.05), ("SILENCE", 1e6), ("LOOK", 0.01)):
        monkeypatch.setattr(owner, f"{name}_SECONDS", seconds)


@pytest.fixture
def store(bucket: str) -> ObjectStore:
    return ObjectStore(f"{bucket}/team/runs/mine")


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def write(store: ObjectStore, claim: Claim) -> None:
    store.write("OWNER", claim.model_dump_json().encode())


def read(store: ObjectStore) -> Claim:
    return Claim.model_validate_json(store.read("OWNER")[0])


def attempt(store: ObjectStore, run_dir: Path) -> Ownership | None:
    return take(store, run_dir, Holder.current(run_dir))


def taken(store: ObjectStore, run_dir: Path) -> Ownership:
    held = attempt(store, run_dir)
    assert held is not None
    return held


def expect_refused(store: ObjectStore, run_dir: Path, owner: Path) -> None:
    """A claim fails, and it is known who has the run."""
    assert attempt(store, run_dir) is None
    holder = last_seen(run_dir).holder
    assert holder is not None
    assert holder.run == str(owner)


@pytest.mark.usefixtures("often")
def test_an_owner_that_gives_signs_of_life_keeps_the_run(store: ObjectStore, folders: Path) -> None:
    first = taken(store, folders / "one")
    for _ in range(3):
        expect_refused(store, folders / "two", folders / "one")
    first.check()
    first.release()
    counter = read(store).counter
    second = taken(store, folders / "two")
    assert read(store).counter > counter >= 4
    second.release()


def test_a_silent_owner_is_watched_and_replaced(
    store: ObjectStore, folders: Path, clock: Clock
) -> None:
    write(store, OF_ANOTHER)
    begun = clock.now
    assert look(store, folders / "one").holder == ELSEWHERE
    second = taken(store, folders / "two")
    assert clock.now - begun >= SILENCE_SECONDS
    # A change begins the watch anew, and what was watched by an earlier command counts.
    assert look(store, folders / "one").holder == read(store).holder
    write(store, OF_ANOTHER)
    assert look(store, folders / "one").holder == ELSEWHERE
    clock.now += SILENCE_SECONDS
    begun = clock.now
    taken(store, folders / "one").release()
    assert clock.now == begun
    second.release()


def test_a_folder_takes_back_what_it_has_not_released(
    store: ObjectStore, folders: Path, clock: Clock
) -> None:
    begun = clock.now
    first = taken(store, folders / "one")
    again = taken(store, folders / "one")
    assert (first.was_elsewhere, again.was_elsewhere) == (True, False)
    assert clock.now == begun
    again.release()
    first.release()


@pytest.mark.usefixtures("often")
def test_an_owner_survives_a_server_that_is_gone_unless_another_has_taken_the_run_meanwhile(
    s3, store: ObjectStore, folders: Path
) -> None:
    store = ObjectStore(store.address, patience=0.0)
    first = taken(store, folders / "one")
    with s3.line.gone(), pytest.raises(UnreachableError):
        first.check()
    before = read(store).counter
    eventually(lambda: read(store).counter > before, "a renewal")
    with s3.line.gone():
        # The other machine has its own way to the server.
        bucket, _, key = store.address[5:].partition("/")
        content = OF_ANOTHER.model_dump_json().encode()
        s3.client().put_object(Bucket=bucket, Key=f"{key}/OWNER", Body=content)
    eventually(lambda: lost(folders / "one") is not None, "the loss")
    message = r"^run.name: one was taken over by process 7 on elsewhere, since s3://.* for 1e\+06 s"
    with pytest.raises(RunLostError, match=message):
        first.check()
    first.release()
    assert read(store) == OF_ANOTHER


@pytest.mark.parametrize("left", [None, RELEASED])
def test_of_two_machines_that_claim_at_once_one_wins(
    store: ObjectStore, folders: Path, monkeypatch: pytest.MonkeyPatch, left: Claim | None
) -> None:
    """Both find that the run is free."""
    if left is not None:
        write(store, left)
    overtaken, watch = list[Ownership](), owner.watch

    def watch_and_be_overtaken(store: ObjectStore, run_dir: Path) -> object:
        found = watch(store, run_dir)
        monkeypatch.setattr(owner, "watch", watch)
        overtaken.append(taken(store, folders / "one"))
        return found

    monkeypatch.setattr(owner, "watch", watch_and_be_overtaken)
    expect_refused(store, folders / "two", folders / "one")
    overtaken[0].release()


def test_a_damaged_owner_is_named(store: ObjectStore, folders: Path) -> None:
    store.write("OWNER", b"{")
    with pytest.raises(DataError, match=r"mine/OWNER: is damaged"):
        attempt(store, folders / "one")
