"""Packing: each token is predicted once, and rows respect documents and resets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import numbered_stream

from infini_model.config import PackingConfig
from infini_model.data.loading import stream as streams
from infini_model.data.loading.packing import BLOCK, DocumentPacking, pack
from infini_model.data.loading.windows import Windows
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
        stream = numbered_stream(shard_folder, shape)
        config = PackingConfig(mode=mode, context_length=context_length, remainder=remainder)
        return Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "test")

    return make


def gather_all(windows):
    """The causal LM inputs of all windows: inputs, labels, resets."""
    inputs = CausalLM().inputs(windows.gather(np.arange(len(windows))))
    return inputs.input_ids.numpy(), inputs.labels.numpy(), inputs.reset


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
    expected = plain_rows(flat, row_length, pad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "DOCUMENTS_AT_ONCE", at_once)
        packing = DocumentPacking(stream, row_length, pad=pad, rows_per_window=together)
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
    st.sampled_from([("document", "drop"), ("document", "pad"), ("aligned", "drop")]),
)
def test_windows_hold_the_rows_of_the_plain_definition(make_windows, shape, context, mode):
    """Aligned documents start on segments, and reset there."""
    aligned = mode[0] == "aligned"
    length, together = (SEGMENT, 2) if aligned else (context, 1)
    windows = make_windows(shape, mode[0], length * together, mode[1])
    inputs, labels, reset = gather_all(windows)
    flat = [size for sizes in shape for size in sizes]
    rows = plain_rows(flat, length, pad=mode != ("document", "drop"))
    rows = rows[: len(rows) // together * together]
    stream = np.arange(1, sum(flat) + 1).tolist()
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
        found = [stream.shard(s.shard).values[s.first : s.last].tolist() for s in spans]
        assert [token for part in found for token in part] == sorted(tokens)
        for span, part in zip(spans, found, strict=True):
            begin, end = stream.shard(span.shard).offsets[span.row :][:2]
            assert begin <= span.first < span.last <= end
            assert set(part) <= set(stream.document(span.document).tolist())
        places = [(span.document, span.first) for span in spans]
        assert places == sorted(set(places))
