"""Batches of windows in a store are those of the folder, whatever happens to the connection."""

import functools
import sys
import threading
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from itertools import islice

import numpy as np
import pytest
import torch
from commands import PATIENCE, eventually
from streams import reading_threads, stored_stream

from infini_model.config import PackingConfig
from infini_model.data.loading import read_ahead
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.read_ahead import WINDOWS_AHEAD
from infini_model.data.loading.validation import validation_batches
from infini_model.data.loading.windows import Windows
from infini_model.data.shards.stored import objects
from infini_model.data.shards.stored.pool import THREADS, make_pool
from infini_model.runtime.errors import UnreachableError
from infini_model.runtime.object_stores.object_store import ObjectStore

SEGMENT = 8
RNG = np.random.default_rng(3)
SHAPE = [RNG.integers(2, 90, 40).tolist() for _ in range(6)]
ALL = range(len(SHAPE))


@pytest.fixture
def both(tmp_path, bucket):
    """Windows of a folder and of the same with some of its shards in a bucket."""

    def make(mode="packed", absent=ALL):
        *streams, _ = stored_stream(tmp_path, bucket, SHAPE, absent)
        if mode != "packed":
            streams[1].shards.keep_offsets()
        config = PackingConfig(mode=mode, context_length=32)
        return [
            Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "stored")
            for stream in streams
        ]

    return make


def same(one, other):
    """Whether two batches are equal bit for bit."""
    return all(
        (mine is None and theirs is None) or torch.equal(mine, theirs)
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("tokens_at_once", [1, 1 << 17])
def test_resuming_in_the_middle_gives_the_remaining_batches(both, tokens_at_once):
    local, stored = both()
    for consumed in (8, 10 * len(local) + 3):
        options = {"batch_size": 8, "seed": 1, "tokens_at_once": tokens_at_once}
        options["consumed"] = consumed
        with Loader(local, **options) as plain, Loader(stored, **options) as loader:
            for _ in range(3):
                mine, theirs = next(plain), next(loader)
                assert all(same(*pair) for pair in zip(mine, theirs, strict=True))
                assert plain.consumed == loader.consumed
                assert loader.wait_seconds > 0
        assert reading_threads() == 0


def test_validation_is_that_of_the_folder_and_ends_its_threads(both):
    local, stored = both("aligned", [0, 2, 3])
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


class Reads(Executor):
    """The threads of a loader, and what they were told to read.

    From read number `held` on they wait for `go_on`.
    """

    def __init__(self, held=sys.maxsize):
        self.begun, self.go_on = [], threading.Event()
        self._held, self._pool = held, make_pool()

    def submit(self, function, *arguments):
        is_held = len(self.begun) >= self._held
        self.begun.append(self._pool.submit(self._read, is_held, function, *arguments))
        return self.begun[-1]

    def _read(self, is_held, function, *arguments):
        if is_held:
            self.go_on.wait(PATIENCE)
        return function(*arguments)

    def shutdown(self, **options):
        self._pool.shutdown(**options)


def test_what_was_read_ahead_outlasts_an_outage(both, s3, monkeypatch):
    local, stored = both()
    reads = Reads()
    monkeypatch.setattr(read_ahead, "make_pool", lambda: reads)
    options = {"batch_size": 8, "seed": 2, "tokens_at_once": 1}
    with Loader(local, **options) as plain, Loader(stored, **options) as loader:
        assert same(next(plain)[0], next(loader)[0])
        wait([loader._prefetched])
        wait(reads.begun)
        with s3.line.gone():
            for _ in range(WINDOWS_AHEAD // 8 // 2):
                assert same(next(plain)[0], next(loader)[0])


def test_what_cannot_be_read_is_the_error_of_the_loader(both, s3, bucket, monkeypatch):
    monkeypatch.setattr(objects, "ObjectStore", functools.partial(ObjectStore, patience=0.3))
    _, stored = both()
    with Loader(stored, batch_size=8, tokens_at_once=1) as loader:
        next(loader)
        with s3.line.gone():
            with pytest.raises(UnreachableError, match=f"^{bucket}/.*: cannot be reached") as one:
                list(islice(loader, 2 * WINDOWS_AHEAD // 8))
            assert "\n" not in str(one.value)
            # Not the batch after it.
            consumed = loader.consumed
            with pytest.raises(UnreachableError):
                next(loader)
            assert loader.consumed == consumed
    assert reading_threads() == 0


def test_a_loader_is_closed_though_reads_are_under_way(both, monkeypatch):
    _, stored = both()
    reads = Reads(held=3 * len(SHAPE))
    monkeypatch.setattr(read_ahead, "make_pool", lambda: reads)
    loader = Loader(stored, batch_size=8, tokens_at_once=1)
    list(islice(loader, 3))
    eventually(
        lambda: sum(each.running() for each in reads.begun) == THREADS, "reads by all threads"
    )
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(loader.close)
        eventually(lambda: any(each.cancelled() for each in reads.begun), "what is not read")
        assert not closing.done()
        reads.go_on.set()
        closing.result()
    assert reading_threads() == 0
    loader.close()
