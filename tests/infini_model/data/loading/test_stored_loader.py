"""Batches of windows in a store are those of the folder, whatever happens to the connection."""

import contextlib
import functools
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from itertools import islice

import numpy as np
import pytest
import torch
from commands import PATIENCE, eventually
from stored_datasets import without_shards
from streams import reading_threads, stored_stream

from infini_model.config import PackingConfig
from infini_model.data.loading import read_ahead
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.read_ahead import WINDOWS_AHEAD
from infini_model.data.loading.validation import validation_batches
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.shards.stored import objects
from infini_model.data.shards.stored.pool import THREADS, make_pool
from infini_model.runtime.errors import DataError, ObjectMissingError, UnreachableError
from infini_model.runtime.object_stores.object_store import ObjectStore

SEGMENT = 8
RNG = np.random.default_rng(3)
SHAPE = [RNG.integers(2, 90, 40).tolist() for _ in range(6)]
ALL = range(len(SHAPE))
STEPS = 12


def windows_of(stream, mode, context=32):
    config = PackingConfig(mode=mode, context_length=context)
    return Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "stored")


@pytest.fixture
def both(tmp_path, bucket):
    """Windows of a folder and of the same with some of its shards in a bucket."""

    def make(mode="packed", absent=ALL):
        local, stored, records = stored_stream(tmp_path, bucket, SHAPE, absent)
        if mode != "packed":
            stored.shards.keep_offsets()
        return windows_of(local, mode), windows_of(stored, mode), records

    return make


def same(one, other):
    """Whether two batches are equal bit for bit."""
    return all(
        (mine is None and theirs is None) or torch.equal(mine, theirs)
        for mine, theirs in zip(one, other, strict=True)
    )


def assert_same_batches(local, stored, steps=STEPS, **options):
    with Loader(local, **options) as plain, Loader(stored, **options) as loader:
        for _ in range(steps):
            mine, theirs = next(plain), next(loader)
            assert len(mine) == len(theirs)
            assert all(same(*pair) for pair in zip(mine, theirs, strict=True))
            assert plain.consumed == loader.consumed
            assert loader.wait_seconds > 0
    assert reading_threads() == 0


@pytest.mark.parametrize("tokens_at_once", [1, 1 << 17])
def test_resuming_in_the_middle_gives_the_remaining_batches(both, tokens_at_once):
    local, stored, _ = both()
    options = {"batch_size": 8, "seed": 1, "tokens_at_once": tokens_at_once}
    for consumed in (8, 10 * len(local) + 3):
        assert_same_batches(local, stored, 3, **options, consumed=consumed)


def test_validation_is_that_of_the_folder_and_ends_its_threads(both):
    local, stored, _ = both("aligned", [0, 2, 3])
    for rank in range(3):
        found = [list(validation_batches(w, 3, rank, 3, 20)) for w in (local, stored)]
        assert len(found[0]) == len(found[1]) > 1
        assert all(same(*pair) for pair in zip(*found, strict=True))
    assert reading_threads() == 0
    given_up = validation_batches(stored, 2)
    next(given_up)
    assert reading_threads() > 0
    given_up.close()
    assert reading_threads() == 0


def test_a_dataset_folder_may_lack_its_shards(byte_dataset, tmp_path, bucket):
    """As `open_windows` finds it: the training split in the store, the others in the folder."""
    folder = without_shards(byte_dataset, tmp_path / "dataset", f"{bucket}/data", ["train"])
    packing = PackingConfig(mode="aligned", context_length=64)
    for split in ("train", "validation"):
        local, stored = (open_windows(at, split, packing, 16) for at in (byte_dataset, folder))
        assert stored.stream.shards.distant == (split == "train")
        assert_same_batches(local, stored, 3, batch_size=4)
        assert local.spans(len(local) // 2) == stored.spans(len(local) // 2)


class Reads(Executor):
    """The threads of a loader, and what they were told to read.

    From read number `held` on they wait for `go_on`. `most` is how many were under way at once.
    """

    def __init__(self, held):
        self.begun, self.go_on = [], threading.Event()
        self.now = self.most = 0
        self._held, self._pool, self._lock = held, make_pool(), threading.Lock()

    def submit(self, function, *arguments):
        is_held = len(self.begun) >= self._held
        self.begun.append(self._pool.submit(self._read, is_held, function, *arguments))
        return self.begun[-1]

    def _read(self, is_held, function, *arguments):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if is_held:
            self.go_on.wait(PATIENCE)
        try:
            return function(*arguments)
        finally:
            with self._lock:
                self.now -= 1

    def shutdown(self, **options):
        self._pool.shutdown(**options)

    def settle(self, loader):
        """Wait until nothing more is read."""
        wait([loader._prefetched])
        wait(self.begun)


@pytest.fixture
def watched(monkeypatch):
    """Makes the next loader's `Reads`, of which those from `held` on wait."""
    made = []

    def make(held=sys.maxsize):
        reads = Reads(held)
        made.append(reads)
        monkeypatch.setattr(read_ahead, "make_pool", lambda: reads)
        return reads

    yield make
    for each in made:
        each.go_on.set()


def test_what_was_read_ahead_outlasts_an_outage(both, s3, watched):
    local, stored, _ = both()
    reads = watched()
    options = {"batch_size": 8, "seed": 2, "tokens_at_once": 1}
    with Loader(local, **options) as plain, Loader(stored, **options) as loader:
        assert same(next(plain)[0], next(loader)[0])
        reads.settle(loader)
        with s3.line.gone():
            for _ in range(WINDOWS_AHEAD // 8 // 2):
                assert same(next(plain)[0], next(loader)[0])


@pytest.mark.parametrize("lost", ["store", "object"])
def test_what_cannot_be_read_is_the_error_of_the_loader(both, s3, bucket, monkeypatch, lost):
    monkeypatch.setattr(objects, "ObjectStore", functools.partial(ObjectStore, patience=0.3))
    _, stored, records = both()
    if lost == "object":
        ObjectStore(bucket).delete([records[2].path])
        complaint, missing = f"{records[2].path}: not found", contextlib.nullcontext()
    else:
        complaint, missing = f"^{bucket}/.*: cannot be reached", s3.line.gone()
    with Loader(stored, batch_size=8, tokens_at_once=1) as loader:
        if lost == "store":
            next(loader)
        with missing:
            with pytest.raises((ObjectMissingError, UnreachableError), match=complaint) as one:
                list(islice(loader, 2 * WINDOWS_AHEAD // 8))
            assert "\n" not in str(one.value)
            # Not the batch after it.
            consumed = loader.consumed
            with pytest.raises((DataError, UnreachableError)):
                next(loader)
            assert loader.consumed == consumed
    assert reading_threads() == 0


def test_as_much_is_read_ahead_as_is_said_and_no_more(both, watched, monkeypatch):
    monkeypatch.setattr(read_ahead, "WINDOWS_AHEAD", 40)
    local, stored, _ = both()
    # The shards are so small that a batch takes one read of each at most.
    reads = watched(held=len(SHAPE))
    with Loader(stored, batch_size=8, tokens_at_once=1) as loader:
        next(loader)
        eventually(lambda: reads.now > 8, "reads at the same time")
        reads.go_on.set()
        for step in range(1, 6):
            reads.settle(loader)
            # The batches that were returned, the next one, and those that were begun.
            assert len(reads.begun) <= len(SHAPE) * (step + 5)
            next(loader)
        assert reads.most <= THREADS
        assert 0 < reading_threads() <= THREADS
    assert reading_threads() == 0
    # Tokens that wait are bounded in bytes, too, but for the next batch.
    monkeypatch.setattr(read_ahead, "BYTES_AHEAD", 10 * 32 * 4)
    reads = watched()
    with Loader(stored, batch_size=8, tokens_at_once=1) as loader:
        next(loader)
        reads.settle(loader)
        # Of the batch that was returned, of the next one, and of the one after it.
        assert len(reads.begun) <= 3 * len(SHAPE)
    # Those of a folder never wait.
    with Loader(local, batch_size=8) as loader:
        list(islice(loader, 3))
        assert reading_threads() == 0


def test_a_loader_is_closed_though_reads_are_under_way(both, watched):
    _, stored, _ = both()
    reads = watched(held=3 * len(SHAPE))
    loader = Loader(stored, batch_size=8, tokens_at_once=1)
    list(islice(loader, 3))
    eventually(lambda: reads.now == THREADS, "reads by all threads")
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(loader.close)
        eventually(lambda: any(each.cancelled() for each in reads.begun), "what is not read")
        assert not closing.done()
        reads.go_on.set()
        closing.result()
    assert reading_threads() == 0
    loader.close()
