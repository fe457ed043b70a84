"""Shards in a store hold the same tokens and documents as those in a folder, and say what fails."""

import dataclasses
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import reading_threads, stored_stream, write_shard

from infini_model.data.shards.shard_files import DOCUMENTS_AT_ONCE
from infini_model.data.shards.stored.blocks import BLOCK_BYTES, GAP_BYTES, join, pieces_of_rows
from infini_model.data.shards.stored.shards import StoredShards
from infini_model.data.shards.stream import TokenStream
from infini_model.runtime.errors import DataError, ObjectChangedError
from infini_model.runtime.object_stores.object_store import ObjectStore, split_address

SHAPE = [[5, 7], [9], [4, 4, 30], [], [6] * 8]
ALL = range(len(SHAPE))
INT32 = np.dtype(np.int32)
EVERYWHERE = np.ones(len(SHAPE), bool)
shapes = st.lists(st.lists(st.integers(1, 30), max_size=5), min_size=1, max_size=5).filter(any)


@pytest.fixture
def requests(monkeypatch):
    """The ranges that are read from stores: (key, start, stop)."""
    seen = []
    for name in ("read_range", "read_beginning"):
        plain = getattr(ObjectStore, name)

        def counted(self, key, *rest, plain=plain):
            seen.append((key, *rest[:2]))
            return plain(self, key, *rest)

        monkeypatch.setattr(ObjectStore, name, counted)
    return seen


def assert_same(local, stored):
    """Their documents are the same, one by one, by their lengths, and by their spans."""
    assert np.array_equal(np.concatenate([*stored.lengths()]), np.concatenate([*local.lengths()]))
    for number in range(local.documents):
        assert np.array_equal(stored.document(number), local.document(number))
    for start, stop in itertools.combinations(range(0, local.tokens + 1, 7), 2):
        spans = list(stored.spans(start, stop))
        assert spans == list(local.spans(start, stop))
        for span in spans[:2]:
            assert np.array_equal(stored.tokens_of(span), local.tokens_of(span))


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(shapes, st.integers(1, 40), st.data())
def test_rows_are_those_of_the_folder(tmp_path, bucket, shape, length, data):
    absent = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    local, stored, _ = stored_stream(tmp_path, bucket, shape, absent)
    place = st.integers(0, local.tokens - 1)
    starts = np.array(data.draw(st.lists(place, max_size=9)), np.int64)
    rows = stored.gather(starts, length)
    assert rows.dtype == INT32
    assert np.array_equal(rows, local.gather(starts, length))


@pytest.mark.parametrize(("absent", "keep"), [(ALL, False), (ALL, True), ([0, 3, 4], True)])
def test_documents_are_those_of_the_folder(tmp_path, bucket, absent, keep):
    local, stored, _ = stored_stream(tmp_path, bucket, SHAPE, absent)
    if keep:
        stored.shards.keep_offsets()
    assert_same(local, stored)
    assert reading_threads() == 0


def test_a_shard_of_many_documents(tmp_path, bucket):
    shape = [[1] * (DOCUMENTS_AT_ONCE + 2), [2]]
    local, stored, _ = stored_stream(tmp_path, bucket, shape, [0])
    for _ in range(2):
        assert [len(part) for part in stored.lengths()] == [DOCUMENTS_AT_ONCE, 2, 1]
        lengths = np.concatenate(list(stored.lengths()))
        assert np.array_equal(lengths, np.concatenate(list(local.lengths())))
        stored.shards.keep_offsets()


def test_offsets_are_fetched_once_by_all_processes_and_for_the_next_start(
    tmp_path, bucket, requests
):
    """Here threads: the lock does not tell them apart from processes."""
    _, _, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    folder, flat = tmp_path / "ranks", [length for lengths in SHAPE for length in lengths]

    def keep(_):
        shards = StoredShards(folder, records, INT32, bucket, EVERYWHERE)
        shards.keep_offsets()
        return np.concatenate(list(shards.lengths())).tolist()

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(keep, range(4)))
    assert [*found, keep(4)] == [flat] * 5
    assert {path.name for path in folder.iterdir()} == {"offsets.bin", ".offsets.bin.lock"}
    assert len(requests) == 2 * len(SHAPE)


def test_ten_million_documents_take_less_than_a_byte_each(tmp_path, bucket):
    """Offsets wait in memory only until they are written, a few megabytes at a time."""
    lengths = np.random.default_rng(0).integers(1, 4, 1_000_000)
    shard = write_shard(tmp_path / "0", np.zeros(lengths.sum(), np.uint8), lengths)
    shard = dataclasses.replace(shard, path="part/0")
    ObjectStore(bucket).upload("part/0", tmp_path / "0")
    shards = [dataclasses.replace(shard, file=f"{number}.arrow") for number in range(10)]
    tracemalloc.start()
    stored = StoredShards(tmp_path, shards, np.dtype(np.uint8), bucket, np.ones(10, bool))
    stored.keep_offsets()
    held, fetching = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(each.documents for each in shards) == 10_000_000
    assert fetching < 4 * 10_000_000
    assert held < 10_000_000
    assert sum(map(len, stored.lengths())) == 10_000_000


def test_an_offsets_file_of_another_size_is_written_anew(tmp_path, bucket):
    local, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    stored.shards.keep_offsets()
    path = next(tmp_path.rglob("offsets.bin"))
    path.write_bytes(path.read_bytes()[:-4])
    again = StoredShards(path.parent, records, INT32, bucket, EVERYWHERE)
    again.keep_offsets()
    assert_same(local, TokenStream(again, 0))


def test_no_offsets_are_fetched_beyond_what_is_asked_for(tmp_path, bucket, requests):
    _, stored, _ = stored_stream(tmp_path, bucket, [[3, 4]] * 150, range(150))
    next(stored.lengths())
    assert len(requests) <= 2 * 2 * 64
    assert reading_threads() == 0


def test_a_later_read_of_a_shard_is_one_request_and_neighbours_are_read_together(
    tmp_path, bucket, requests
):
    far = GAP_BYTES
    _, stored, _ = stored_stream(tmp_path, bucket, [[4 * far]], [0])
    stored.gather(np.array([0]), 3)
    assert len(requests) == 2
    stored.gather(np.array([4]), 3)
    assert len(requests) == 3
    starts = np.array([3 * far, 0, 10, 20])
    rows = stored.gather(starts, 11)
    assert np.array_equal(rows, starts[:, None] + np.arange(11) + 1)
    assert sorted(stop - start for _, start, stop in requests[3:]) == [4 * 11, 4 * 31]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(0, 10**6), max_size=20),
    st.integers(1, 50),
    st.sampled_from([1, GAP_BYTES // 4, BLOCK_BYTES // 10]),
)
def test_the_last_block_that_begins_before_a_piece_covers_it(sizes, starts, length, itemsize):
    token_starts = np.concatenate([[0], np.cumsum(sizes)])
    total = int(token_starts[-1])
    firsts = np.array([start % total for start in starts], np.int64)
    pieces = pieces_of_rows(firsts, length, token_starts)
    blocks = list(join(pieces, itemsize))
    assert blocks == sorted(blocks)
    positions = set()
    for shard, first, last in zip(*(each.tolist() for each in pieces), strict=True):
        assert 0 <= first < last <= sizes[shard]
        block = [b for b in blocks if b.shard == shard and b.first <= first][-1]
        assert last <= block.last
        positions |= {int(token_starts[shard]) + place for place in range(first, last)}
    wanted = {p for start in firsts.tolist() for p in range(start, min(start + length, total))}
    assert positions == wanted
    for block in blocks:
        assert (block.last - block.first) * itemsize <= max(BLOCK_BYTES, length * itemsize)


def put(s3, bucket, key, content):
    s3.client().put_object(Bucket=split_address(bucket)[0][5:], Key=key, Body=content)


def damaged_offsets(content):
    """The shard with its second offset far behind its end."""
    offsets = np.array([0, 5, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    return content.replace(offsets, np.array([0, 500, 12], np.int32).tobytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: None, "not found"),
        (lambda content: b"", "refuses the request .HTTP 416"),
        (lambda content: content[:-8], "bytes, the manifest says"),
        (lambda content: b"\xab" * len(content), "is not a shard"),
        (damaged_offsets, "is damaged: its documents are not in order"),
    ],
)
def test_an_object_that_is_not_the_shard_is_named(tmp_path, bucket, s3, change, message):
    _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    key = records[0].path
    changed = change(ObjectStore(bucket).read(key)[0])
    if changed is None:
        ObjectStore(bucket).delete([key])
    else:
        put(s3, bucket, key, changed)
    with pytest.raises(DataError, match=message) as caught:
        stored.document(0)
    assert f"{bucket}/{key}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shard_of_other_documents_or_tokens_is_named(tmp_path, bucket):
    _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    narrow = StoredShards(tmp_path, records, np.dtype(np.uint16), bucket, EVERYWHERE)
    with pytest.raises(DataError, match="holds int32 tokens, the manifest says uint16"):
        narrow.values(0, 0, 1)
    # Padding makes it as long as the one with two documents.
    other = write_shard(tmp_path / "other", np.arange(12, dtype=np.int32), [4, 4, 4])
    ObjectStore(bucket).upload(records[0].path, tmp_path / "other")
    assert other.bytes == records[0].bytes
    with pytest.raises(DataError, match="has 3 documents, the manifest says 2"):
        stored.document(0)


def test_an_object_that_changes_is_named(tmp_path, bucket, s3):
    _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    stored.document(0)
    content = ObjectStore(bucket).read(records[0].path)[0]
    put(s3, bucket, records[0].path, content[:-1] + b"\x01")
    with pytest.raises(ObjectChangedError, match=f"{records[0].path}: changed"):
        stored.document(1)
