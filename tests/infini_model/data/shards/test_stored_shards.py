"""Shards in a store hold the same tokens and documents as those in a folder, and say what fails."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import reading_threads, stored_stream, write_shard

from infini_model.data.shards.shard_files import DOCUMENTS_AT_ONCE
from infini_model.data.shards.stored import blocks
from infini_model.data.shards.stored.blocks import GAP_BYTES
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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes, st.integers(1, 40), st.data())
def test_rows_are_those_of_the_folder(tmp_path, bucket, shape, length, data):
    absent = data.draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    local, stored, _ = stored_stream(tmp_path, bucket, shape, absent)
    place = st.integers(0, local.tokens - 1)
    borders = np.cumsum([sum(lengths) for lengths in shape])
    # Rows that begin with a shard meet the ends of those that begin before it.
    edges = [edge for border in borders for edge in (border - 1, border) if edge < local.tokens]
    starts = np.array([*data.draw(st.lists(place, max_size=9)), *edges], np.int64)
    starts = starts[starts >= 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "GAP_BYTES", data.draw(st.sampled_from([0, 16, GAP_BYTES])))
        patch.setattr(blocks, "BLOCK_BYTES", data.draw(st.sampled_from([4, 100, 1 << 20])))
        rows = stored.gather(starts, length)
    assert rows.dtype == INT32
    assert np.array_equal(rows, local.gather(starts, length))


@pytest.mark.parametrize(("absent", "keep"), [(ALL, False), (ALL, True), ([0, 3, 4], True)])
def test_documents_are_those_of_the_folder(tmp_path, bucket, absent, keep):
    local, stored, records = stored_stream(tmp_path, bucket, SHAPE, absent)
    if keep:
        stored.shards.keep_offsets()
        path = next(tmp_path.rglob("offsets.bin"))
        path.write_bytes(path.read_bytes()[:-4])  # One of another size is written anew.
        elsewhere = np.isin(np.arange(len(SHAPE)), absent)
        again = StoredShards(path.parent, records, INT32, bucket, elsewhere)
        again.keep_offsets()
        assert_same(local, TokenStream(again, 0))
    assert_same(local, stored)
    assert reading_threads() == 0


def test_offsets_are_read_some_at_a_time_and_no_more_than_are_asked_for(tmp_path, bucket, requests):
    _, stored, _ = stored_stream(tmp_path, bucket, [[3, 4]] * 150, range(150))
    next(stored.lengths())
    assert len(requests) <= 2 * 2 * 64
    assert reading_threads() == 0
    shape = [[1] * (DOCUMENTS_AT_ONCE + 2), [2]]
    _, stored, _ = stored_stream(tmp_path, bucket, shape, [0])
    for _ in range(2):
        parts = list(stored.lengths())
        assert [len(part) for part in parts] == [DOCUMENTS_AT_ONCE, 2, 1]
        assert np.concatenate(parts).tolist() == shape[0] + shape[1]
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


def damaged_offsets(content):
    """The shard with its second offset far behind its end."""
    offsets = np.array([0, 5, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    return content.replace(offsets, np.array([0, 500, 12], np.int32).tobytes())


def test_an_object_that_is_not_the_shard_is_named(tmp_path, bucket, s3):
    client, name = s3.client(), split_address(bucket)[0][5:]
    # Padding makes it as long as the one with two documents.
    write_shard(tmp_path / "other", np.arange(12, dtype=np.int32), [4, 4, 4])
    other = (tmp_path / "other").read_bytes()
    for change, message in (
        (lambda content: None, "not found"),
        (lambda content: b"", "refuses the request .HTTP 416"),
        (lambda content: content[:-8], "bytes, the manifest says"),
        (lambda content: b"\xab" * len(content), "is not a shard"),
        (damaged_offsets, "is damaged: its documents are not in order"),
        (lambda content: other, "has 3 documents, the manifest says 2"),
    ):
        _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
        key = records[0].path
        changed = change(ObjectStore(bucket).read(key)[0])
        if changed is None:
            client.delete_object(Bucket=name, Key=key)
        else:
            client.put_object(Bucket=name, Key=key, Body=changed)
        with pytest.raises(DataError, match=message) as caught:
            stored.document(0)
        assert f"{bucket}/{key}" in str(caught.value)
        assert "\n" not in str(caught.value)
    _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    narrow = StoredShards(tmp_path, records, np.dtype(np.uint16), bucket, EVERYWHERE)
    with pytest.raises(DataError, match="holds int32 tokens, the manifest says uint16"):
        narrow.values(0, 0, 1)
    stored.document(0)
    content = ObjectStore(bucket).read(records[0].path)[0]
    client.put_object(Bucket=name, Key=records[0].path, Body=content[:-1] + b"\x01")
    with pytest.raises(ObjectChangedError, match=f"{records[0].path}: changed"):
        stored.document(1)
