"""Spilled documents are read back by bucket, complete and once."""

import contextlib
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from corpora import write_files
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.data.sources.content import buckets_of, hash_documents, sort_order
from infini_model.data.sources.documents import parts_of
from infini_model.data.sources.formats import Reading
from infini_model.data.sources.spill import MIN_RUN_BYTES, Spill, UnusableSpillError, write_spill

characters = st.characters(codec="utf-8", exclude_characters="\0")
texts = st.lists(st.text(characters, min_size=1, max_size=30), max_size=40)


def spilled(folder, documents, wanted=None, min_run_bytes=MIN_RUN_BYTES):
    paths = sorted(write_files(folder / "raw", documents).iterdir())
    target = folder / "spill"
    target.mkdir()
    # One part per file, so that the threads share the work.
    parts = [part for path in paths for part in parts_of([path])]
    return target, write_spill(parts, Reading(), target, 2, lambda _: None, wanted, min_run_bytes)


@settings(max_examples=50, deadline=None)
@given(texts, st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 100, 4 << 20]))
def test_every_document_is_in_its_bucket_once(documents, count, run_bytes):
    with TemporaryDirectory() as name:
        folder, written = spilled(Path(name), documents, min_run_bytes=run_bytes)
        assert written.documents == len(documents)
        assert written.bytes == sum(len(text.encode()) for text in documents)
        if not documents:
            return
        found: Counter[str] = Counter()
        with Spill(folder) as spill:
            for bucket in range(count):
                chunks = spill.texts(bucket, count).chunks
                hashes, sizes = spill.entries(bucket, count)
                assert set(buckets_of(hashes, count)) <= {bucket}
                assert len(chunks) == bool(len(hashes))
                for chunk in chunks:
                    assert np.array_equal(hash_documents(chunk), hashes)
                    assert [len(text.as_py().encode()) for text in chunk] == sizes.tolist()
                    found.update(chunk.to_pylist())
        assert found == Counter(documents)


def test_only_wanted_buckets_are_written(tmp_path):
    documents = [f"document {number}" for number in range(100)]
    wanted = np.array([False, True, False, True])
    folder, written = spilled(tmp_path, documents, wanted=wanted)
    with Spill(folder) as spill:
        found = [spill.texts(bucket, 4).to_pylist() for bucket in range(4)]
    assert [bool(texts) for texts in found] == wanted.tolist()
    assert written.documents == len(found[1]) + len(found[3]) < 100
    assert set(found[1] + found[3]) < set(documents)


def test_a_bucket_too_large_for_one_array_becomes_several(tmp_path):
    documents = [f"document {number}" for number in range(100)]
    folder, _ = spilled(tmp_path, documents, min_run_bytes=1)
    with Spill(folder) as spill:
        texts = spill.texts(0, 1, array_bytes=200)
    assert texts.num_chunks > 1
    assert max(chunk.nbytes for chunk in texts.chunks) < 300
    assert sorted(texts.to_pylist()) == sorted(documents)


def test_it_stays_readable_when_its_folder_is_deleted(tmp_path):
    folder, _ = spilled(tmp_path, ["one", "two"])
    with Spill(folder) as spill:
        for path in folder.iterdir():
            path.unlink()
        assert sorted(spill.texts(0, 1).to_pylist()) == ["one", "two"]


def test_truncated_text_is_an_unusable_spill(tmp_path):
    folder, _ = spilled(tmp_path, ["one", "two"])
    with (folder / "texts").open("r+b") as file:
        file.truncate(4)
    with (
        Spill(folder) as spill,
        pytest.raises(UnusableSpillError, match="ends too early"),
    ):
        spill.texts(0, 1)
    with pytest.raises(UnusableSpillError, match="was not kept"):
        Spill(tmp_path / "gone")


@pytest.mark.parametrize("byte", [*range(0, 48, 5), 47])
def test_damaged_entries_raise_no_other_error(tmp_path, byte):
    folder, _ = spilled(tmp_path, ["one", "three"])
    data = bytearray((folder / "entries").read_bytes())
    assert len(data) == 48
    data[byte] ^= 0x40
    (folder / "entries").write_bytes(data)
    # Readers compare the hashes, so wrong documents are detected later.
    with contextlib.suppress(UnusableSpillError), Spill(folder) as spill:
        for bucket in range(2):
            for chunk in spill.texts(bucket, 2).chunks:
                hash_documents(chunk)


def test_hashes_are_sorted_by_their_bytes():
    hashes = np.array([[2, 1], [1, 2], [2, 0], [1, 2], [2**64 - 1, 0]], np.uint64)
    assert sort_order(hashes).tolist() == [1, 3, 2, 0, 4]
    assert buckets_of(hashes, 2).tolist() == [0, 0, 0, 0, 1]
    assert buckets_of(hashes, 1).tolist() == [0] * 5
