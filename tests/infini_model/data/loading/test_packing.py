"""Packing: each token is predicted once, and rows respect documents and resets."""

import dataclasses
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import numbered_stream, write_shard

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import BLOCK, DocumentPacking, OffsetsInMemory, pack
from infini_model.data.loading.windows import Windows
from infini_model.data.shards import shard_files
from infini_model.data.shards.shard_files import ShardFiles
from infini_model.data.shards.stream import TokenStream
from infini_model.model.loss import IGNORED
from infini_model.objectives.causal import CausalLM

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

    def make(shape, mode, context_length=6, remainder="drop"):
        stream = numbered_stream(shard_folder, shape, EOS)
        config = PackingConfig(mode=mode, context_length=context_length, remainder=remainder)
        return Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "test")

    return make


def gather_all(windows):
    return read(windows.gather(np.arange(len(windows))))


def read(batch):
    """The causal LM inputs of windows: inputs, labels, resets."""
    inputs = CausalLM().inputs(batch)
    return inputs.input_ids.numpy(), inputs.labels.numpy(), inputs.reset


def documents_of(windows):
    return [windows.stream.document(index) for index in range(windows.stream.documents)]


def plain_rows(lengths, row_length, pad):
    """Start, valid positions and whether it is the first, for every row of documents in a row."""
    rows, start = [], 0
    for length in lengths:
        positions = length - 1
        count = -(-positions // row_length) if pad else positions // row_length
        for row in range(count):
            left = positions - row * row_length
            rows.append((start + row * row_length, min(left, row_length), row == 0))
        start += length
    return rows


# Documents of one token upwards, mostly short, in enough of them for several blocks.
many = st.lists(st.lists(st.integers(1, 4) | st.integers(1, 60), max_size=3 * BLOCK), max_size=4)


@given(
    many,
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([BLOCK, 2 * BLOCK, 1 << 16]),
    st.data(),
)
def test_rows_are_those_of_the_plain_definition(
    shard_folder, shape, row_length, pad, together, at_once, data
):
    stream = numbered_stream(shard_folder, shape, max_mapped=2)
    flat = [length for lengths in shape for length in lengths]
    in_memory = OffsetsInMemory(np.cumsum([0, *flat]))
    expected = plain_rows(flat, row_length, pad)
    for documents in (stream, in_memory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_files, "DOCUMENTS_AT_ONCE", at_once)
            packing = DocumentPacking(documents, row_length, pad=pad, rows_per_window=together)
        assert packing.windows == len(expected) // together
        if packing.windows:
            number = st.integers(0, packing.windows - 1)
            chosen = data.draw(st.lists(number, max_size=20) | st.just(range(packing.windows)))
            found = packing.locate(np.array(chosen, np.int64))
            rows = [expected[each * together + k] for each in chosen for k in range(together)]
            assert list(zip(*(part.tolist() for part in found), strict=True)) == rows


def test_ten_million_documents_take_a_byte_each(tmp_path):
    """Opening and reading, in arrays that belong to the process; shards themselves are mapped."""
    lengths = np.random.default_rng(0).integers(1, 4, 1_000_000)
    shard = write_shard(tmp_path / "0", np.zeros(lengths.sum(), np.uint8), lengths)
    shards = [dataclasses.replace(shard, file=str(number)) for number in range(10)]
    for each in shards[1:]:
        os.link(tmp_path / "0", tmp_path / each.file)
    config = PackingConfig(mode="aligned", context_length=4)
    tracemalloc.start()
    stream = TokenStream(ShardFiles(tmp_path, shards, np.dtype(np.uint8)), EOS)
    windows = Windows(stream, pack(stream, config, 2), aligned=True, name="test")
    windows.gather(np.arange(0, len(windows), len(windows) // 100))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stream.documents == 10_000_000
    assert peak < stream.documents + 8_000_000


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


@given(shapes, st.integers(1, 12), st.sampled_from(["drop", "pad"]))
def test_document_windows_stay_in_their_document(make_windows, shape, context, remainder):
    windows = make_windows(shape, "document", context, remainder)
    inputs, labels, reset = gather_all(windows)
    expected_inputs, expected_labels = [], []
    for document in documents_of(windows):
        positions = len(document) - 1
        count = positions // context if remainder == "drop" else -(-positions // context)
        for start in range(0, count * context, context):
            row = document[start : start + context + 1]
            missing = context + 1 - len(row)
            expected_inputs.append([*row, *[EOS] * missing][:context])
            expected_labels.append([*row[1:], *[IGNORED] * missing])
    assert len(windows) == len(expected_inputs)
    assert inputs.tolist() == expected_inputs
    assert labels.tolist() == expected_labels
    assert reset is None


@given(shapes)
def test_aligned_documents_start_on_segments_and_reset_there(make_windows, shape):
    windows = make_windows(shape, "aligned", 2 * SEGMENT)
    inputs, labels, reset = gather_all(windows)
    expected_inputs, expected_labels, starts = [], [], []
    for document in documents_of(windows):
        padding = -(len(document) - 1) % SEGMENT
        expected_inputs += [*document, *[EOS] * padding][:-1]
        expected_labels += [*document[1:], *[IGNORED] * padding]
        segments = (len(document) - 1 + padding) // SEGMENT
        starts += [True, *[False] * (segments - 1)]
    assert len(windows) == len(expected_inputs) // (2 * SEGMENT)
    whole = len(windows) * 2 * SEGMENT
    assert inputs.reshape(-1).tolist() == expected_inputs[:whole]
    assert labels.reshape(-1).tolist() == expected_labels[:whole]
    assert reset.reshape(-1).tolist() == starts[: whole // SEGMENT]


@given(
    shapes,
    st.integers(1, 4),
    st.sampled_from([("packed", "drop"), ("document", "drop"), ("document", "pad")])
    | st.just(("aligned", "drop")),
)
def test_the_spans_of_a_window_are_its_tokens_by_shard_and_document(
    make_windows, shape, segments, mode
):
    windows = make_windows(shape, mode[0], segments * SEGMENT, mode[1])
    inputs, labels, _ = gather_all(windows)
    stream = windows.stream
    for index in range(len(windows)):
        tokens = {t for t in inputs[index].tolist() if t != EOS}
        tokens |= {t for t in labels[index].tolist() if t != IGNORED}
        spans = windows.spans(index)
        found = [stream.shards[s.shard].values[s.first : s.last].tolist() for s in spans]
        assert [token for part in found for token in part] == sorted(tokens)
        for span, part in zip(spans, found, strict=True):
            begin, end = stream.shards[span.shard].offsets[span.row :][:2]
            assert begin <= span.first < span.last <= end
            assert set(part) <= set(stream.document(span.document).tolist())
        places = [(span.document, span.first) for span in spans]
        assert places == sorted(set(places))
