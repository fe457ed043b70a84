"""Packing: each token is predicted once, and rows respect documents and resets.

A split of many shards is opened at once and mapped as needed, never more than a process may.
"""

import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import numbered_stream, stream_of, write_shard

from infini_model.config import PackingConfig
from infini_model.data.loading import stream as streams
from infini_model.data.loading.packing import DocumentPacking, documents_of_block, pack
from infini_model.data.loading.windows import Windows
from infini_model.model.loss import IGNORED
from infini_model.objectives.causal import CausalLM
from infini_model.runtime.errors import DataError

EOS = 0
SEGMENT = 3

# Documents by length, at least two tokens (one and end-of-text), in shards of any size.
shapes = st.lists(st.lists(st.integers(2, 40), max_size=6), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def shard_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def make_windows(shard_folder):
    """Windows over documents whose tokens are all distinct, so each can be identified."""

    def make(shape, mode, context_length=6, remainder="share"):
        stream = numbered_stream(shard_folder, shape)
        config = PackingConfig(mode=mode, context_length=context_length, remainder=remainder)
        return Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "test")

    return make


def gather_all(windows):
    """The causal LM inputs of all windows: inputs, labels, resets."""
    inputs = CausalLM().inputs(windows.gather(np.arange(len(windows))))
    return inputs.input_ids.numpy(), inputs.labels.numpy(), inputs.document_starts


def joined(sizes, row_length, block):
    """Lengths of the documents of a shard, where those that share rows are one.

    A document shares the rows of those before it if they need no more of them for it.
    """

    def rows(length):
        return -(-(length - 1) // row_length)

    lengths = []
    for number, length in enumerate(sizes):
        if number % block and 0 < rows(lengths[-1]) == rows(lengths[-1] + length):
            lengths[-1] += length
        else:
            lengths.append(length)
    return lengths


def plain_rows(shape, row_length, remainder):
    """Start, valid positions and whether it is the first, for every row of documents in a row."""
    if remainder == "share":
        documents = sum(map(len, shape))
        block = documents_of_block(sum(map(sum, shape)), documents, row_length)
        shape = [joined(sizes, row_length, block) for sizes in shape]
    rows, start = [], 0
    for length in itertools.chain(*shape):
        for before in range(0, length - 1, row_length):
            valid = min(length - 1 - before, row_length)
            if remainder != "drop" or valid == row_length:
                rows.append((start + before, valid, before == 0))
        start += length
    return rows


remainders = st.sampled_from(["share", "pad", "drop"])

# Documents of one token upwards, mostly short, in enough of them for several blocks.
many = st.lists(st.lists(st.integers(1, 4) | st.integers(1, 60), max_size=48), max_size=4)


@given(
    many,
    st.integers(1, 20) | st.integers(1, 400),
    remainders,
    st.integers(1, 3),
    st.sampled_from([1, 2, 1 << 12]),
    st.data(),
)
def test_rows_are_as_plainly_defined(
    shard_folder, shape, row_length, remainder, together, blocks_at_once, data
):
    stream = numbered_stream(shard_folder, shape, max_mapped=2)
    at_once = blocks_at_once * documents_of_block(stream.tokens, stream.documents, row_length)
    expected = plain_rows(shape, row_length, remainder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "DOCUMENTS_AT_ONCE", at_once)
        packing = DocumentPacking(
            stream, slice(0, len(shape)), row_length, remainder, rows_per_window=together
        )
    assert packing.windows == len(expected) // together
    if packing.windows:
        number = st.integers(0, packing.windows - 1)
        chosen = data.draw(st.lists(number, max_size=20) | st.just(range(packing.windows)))
        found = packing.locate(np.array(chosen, np.int64))
        rows = [expected[each * together + k] for each in chosen for k in range(together)]
        assert list(zip(*(part.tolist() for part in found[:3]), strict=True)) == rows


@given(shapes, st.integers(1, 12))
def test_packed_predicts_every_token_but_the_first_once(make_windows, shape, context):
    windows = make_windows(shape, "packed", context)
    tokens = sum(map(sum, shape))
    assert len(windows) == max(0, tokens - 1) // context
    inputs, labels, reset = gather_all(windows)
    stream = np.arange(1, tokens + 1)
    whole = len(windows) * context
    assert np.array_equal(inputs.reshape(-1), stream[:whole])
    assert np.array_equal(labels.reshape(-1), stream[1 : whole + 1])
    assert reset is None


@given(
    shapes,
    st.integers(1, 12),
    st.sampled_from(["document", "aligned"]),
    remainders,
)
def test_windows_hold_the_rows_of_the_plain_definition(
    make_windows, shape, context, mode, remainder
):
    """Aligned documents start on segments, and reset there."""
    aligned = mode == "aligned"
    length, together = (SEGMENT, 2) if aligned else (context, 1)
    windows = make_windows(shape, mode, length * together, remainder)
    inputs, labels, reset = gather_all(windows)
    rows = plain_rows(shape, length, remainder)
    rows = rows[: len(rows) // together * together]
    stream = np.arange(1, sum(map(sum, shape)) + 1).tolist()
    expected_inputs, expected_labels = [], []
    for start, valid, _ in rows:
        missing = length - valid
        expected_inputs += [*stream[start : start + valid + 1], *[EOS] * missing][:length]
        expected_labels += [*stream[start + 1 : start + valid + 1], *[IGNORED] * missing]
    assert len(windows) == len(rows) // together
    assert inputs.reshape(-1).tolist() == expected_inputs
    assert labels.reshape(-1).tolist() == expected_labels
    if aligned:
        assert reset.reshape(-1).tolist() == [first for _, _, first in rows]
    else:
        assert reset is None


@given(shapes, st.integers(1, 4), st.sampled_from(["packed", "document", "aligned"]), remainders)
def test_the_documents_of_windows_are_those_of_their_tokens(
    make_windows, shape, segments, mode, remainder
):
    windows = make_windows(shape, mode, segments * SEGMENT, remainder)
    inputs, labels, _ = gather_all(windows)
    documents = [
        (shard, row)
        for shard, lengths in enumerate(shape)
        for row, length in enumerate(lengths)
        for _ in range(length)
    ]
    expected = []
    for index in range(len(windows)):
        tokens = {t for t in inputs[index].tolist() if t != EOS}
        tokens |= {t for t in labels[index].tolist() if t != IGNORED}
        expected.append({documents[token - 1] for token in tokens})
        assert windows.documents(np.array([index])) == set(expected[-1])
    assert windows.documents(np.arange(len(windows))) == set().union(*expected)


MANY = 3000


def mapped(folder):
    """How many files in `folder` this process has mapped, and how many it has open."""
    links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    opened = sum(link.startswith(f"{folder}/") for link in links)
    return Path("/proc/self/maps").read_text().count(f"{folder}/"), opened


def test_many_shards_are_mapped_up_to_a_bound_and_none_stays_open(tmp_path):
    """Links to one shard of ten documents."""
    first = write_shard(tmp_path / "00000", np.arange(30, dtype=np.int32), [3] * 10)
    shards = [dataclasses.replace(first, file=f"{number:05d}") for number in range(MANY)]
    for shard in shards[1:]:
        os.link(tmp_path / "00000", tmp_path / shard.file)
    stream = stream_of(tmp_path, shards, max_mapped=1000)
    packing = pack(stream, PackingConfig(mode="document", context_length=2), 2)
    assert packing.windows == MANY * 10
    assert mapped(tmp_path) == (0, 0)
    rows = stream.gather(np.arange(MANY) * 30, 30)
    assert np.array_equal(rows, np.tile(np.arange(30), (MANY, 1)))
    assert mapped(tmp_path) == (1000, 0)
    del stream, packing
    assert mapped(tmp_path) == (0, 0)


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
