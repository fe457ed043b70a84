"""A split of many shards: opened at once, mapped as needed, and never more than a process may."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import numbered_stream, stream_of, write_shard

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import pack
from infini_model.runtime.errors import DataError

MANY = 3000


def mapped(folder):
    """How many mappings of files in `folder` this process has."""
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def opened(folder):
    """How many of its file descriptors are of files in `folder`."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(f"{folder}/") for link in links)


def test_many_shards_are_mapped_up_to_a_bound_and_none_stays_open(tmp_path):
    """Links to one shard of ten documents."""
    first = write_shard(tmp_path / "00000", np.arange(30, dtype=np.int32), [3] * 10)
    shards = [dataclasses.replace(first, file=f"{number:05d}") for number in range(MANY)]
    for shard in shards[1:]:
        os.link(tmp_path / "00000", tmp_path / shard.file)
    stream = stream_of(tmp_path, shards, max_mapped=1000)
    packing = pack(stream, PackingConfig(mode="document", context_length=2), 2)
    assert packing.windows == MANY * 10
    assert mapped(tmp_path) == opened(tmp_path) == 0
    rows = stream.gather(np.arange(MANY) * 30, 30)
    assert np.array_equal(rows, np.tile(np.arange(30), (MANY, 1)))
    assert mapped(tmp_path) == 1000
    assert opened(tmp_path) == 0
    del stream, packing
    assert mapped(tmp_path) == 0


def test_documents_are_found_by_number_and_outlive_the_mapping_of_their_shard(tmp_path):
    stream = numbered_stream(tmp_path, [[3], [], [2], [4]], max_mapped=1)
    documents = [stream.document(number) for number in range(3)]
    assert [document.tolist() for document in documents] == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=9), min_size=1, max_size=9).filter(any),
    st.integers(1, 3),
    st.integers(1, 40),
    st.data(),
)
def test_gathering_reads_the_concatenated_tokens(tmp_path_factory, shape, bound, length, data):
    stream = numbered_stream(tmp_path_factory.getbasetemp(), shape, max_mapped=bound)
    flat = [size for sizes in shape for size in sizes]
    assert np.concatenate(list(stream.lengths())).tolist() == flat
    starts = np.array(data.draw(st.lists(st.integers(0, stream.tokens - 1), max_size=9)), np.int64)
    expected = np.minimum(starts[:, None] + np.arange(length), stream.tokens - 1) + 1
    assert np.array_equal(stream.gather(starts, length), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes": 9}, "has .* bytes, the manifest says 9"),
        ({"file": "gone"}, "is missing"),
        ({"documents": 2}, "is not the shard in the manifest"),
        ({"tokens": 7}, "is not the shard in the manifest"),
        ({"start": 4000}, "is not the shard in the manifest"),
    ],
)
def test_a_shard_that_differs_from_the_manifest_is_named(tmp_path, changed, message):
    shard = write_shard(tmp_path / "shard", np.arange(6, dtype=np.int32), [1, 2, 3])
    changed_shard = dataclasses.replace(shard, **changed)
    with pytest.raises(DataError, match=rf"^{tmp_path}[^\n]* {message}[^\n]*$"):
        stream_of(tmp_path, [changed_shard]).document(0)
    if "documents" in changed:
        with pytest.raises(DataError, match=message):
            list(stream_of(tmp_path, [changed_shard]).lengths())


def test_a_file_that_is_no_shard_is_named(tmp_path):
    path = tmp_path / "shard"
    shard = write_shard(path, np.arange(400, dtype=np.int32), [4] * 100)
    path.write_bytes(b"\xab" * shard.bytes)
    stream = stream_of(tmp_path, [shard])
    for read in (lambda: stream.document(0), lambda: list(stream.lengths())):
        with pytest.raises(DataError, match=f"^{path}: is not the shard in the manifest[^\n]*$"):
            read()
