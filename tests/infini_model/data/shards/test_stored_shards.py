"""Shards in a store hold the same tokens and documents as those in a folder, and say what fails."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streams import reading_threads, stored_stream, write_shard

from infini_model.data.shards.stored import blocks
from infini_model.data.shards.stored import shards as stored_shards
from infini_model.data.shards.stored.blocks import GAP_BYTES
from infini_model.data.shards.stored.shards import StoredShards
from infini_model.data.shards.stream import TokenStream
from infini_model.runtime.errors import DataError, ObjectChangedError
from infini_model.runtime.object_stores.object_store import ObjectStore

SHAPE = [[5, 7], [9], [4, 4, 30], [], [6] * 8]
ALL = range(len(SHAPE))
INT32 = np.dtype(np.int32)
shapes = st.lists(st.lists(st.integers(1, 30), max_size=5), min_size=1, max_size=5).filter(any)


def assert_same(local, stored):
    """Their documents are the same, one by one, by their lengths, and by their spans."""
    assert np.array_equal(np.concatenate([*stored.lengths()]), np.concatenate([*local.lengths()]))
    for number in range(local.documents):
        assert np.array_equal(stored.document(number), local.document(number))
    spans = list(stored.spans(3, local.tokens - 3))
    assert spans == list(local.spans(3, local.tokens - 3))
    for span in spans:
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
def test_documents_are_those_of_the_folder(tmp_path, bucket, s3, monkeypatch, absent, keep):
    monkeypatch.setattr(stored_shards, "DOCUMENTS_AT_ONCE", 3)
    local, stored, records = stored_stream(tmp_path, bucket, SHAPE, absent)
    if keep:
        stored.shards.keep_offsets()
        path = next(tmp_path.rglob("offsets.bin"))
        path.write_bytes(path.read_bytes()[:-4])  # One of another size is written anew.
        elsewhere = np.isin(np.arange(len(SHAPE)), absent)
        again = StoredShards(path.parent, records, INT32, bucket, elsewhere)
        again.keep_offsets()
        assert_same(local, TokenStream(again, 0))
        with s3.line.gone():  # Those that are kept are not fetched.
            again = StoredShards(path.parent, records, INT32, bucket, elsewhere)
            again.keep_offsets()
            kept = np.concatenate([*again.lengths()])
        assert np.array_equal(kept, np.concatenate([*local.lengths()]))
    assert_same(local, stored)
    assert reading_threads() == 0


def damaged_offsets(content):
    """The shard with its second offset far behind its end."""
    offsets = np.array([0, 5, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    return content.replace(offsets, np.array([0, 500, 12], np.int32).tobytes())


def test_an_object_that_is_not_the_shard_is_named(tmp_path, bucket):
    store = ObjectStore(bucket)
    # Padding makes it as long as the one with two documents.
    write_shard(tmp_path / "other", np.arange(12, dtype=np.int32), [4, 4, 4])
    other = (tmp_path / "other").read_bytes()
    for change, message in (
        (lambda content: None, "not found"),
        (lambda content: content[:-8], "bytes, the manifest says"),
        (lambda content: b"\xab" * len(content), "is not a shard"),
        (damaged_offsets, "is damaged: its documents are not in order"),
        (lambda content: other, "has 3 documents, the manifest says 2"),
    ):
        _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
        key = records[0].path
        changed = change(store.read(key)[0])
        if changed is None:
            store.delete([key])
        else:
            store.write(key, changed)
        with pytest.raises(DataError, match=f"^{bucket}/{key}: .*{message}[^\n]*$"):
            stored.document(0)
    _, stored, records = stored_stream(tmp_path, bucket, SHAPE, ALL)
    stored.document(0)
    store.write(records[0].path, store.read(records[0].path)[0][:-1] + b"\x01")
    with pytest.raises(ObjectChangedError, match=f"{records[0].path}: changed"):
        stored.document(1)
