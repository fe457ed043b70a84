"""Packing: each token is predicted once, and rows respect documents and resets."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infini_model.config import PackingConfig
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows
from infini_model.data.shards.stream import TokenStream
from infini_model.model.loss import IGNORED
from infini_model.objectives.causal import CausalLM

EOS = 0
SEGMENT = 3

# Documents by length, at least two tokens (one and end-of-text), in shards of any size.
shapes = st.lists(st.lists(st.integers(2, 40), max_size=6), min_size=1, max_size=4)


def make_windows(shape, mode, context_length=6, remainder="drop"):
    """Windows over documents whose tokens are all distinct, so each can be identified."""
    values, offsets, first = [], [], 1
    for lengths in shape:
        shard = np.arange(first, first + sum(lengths), dtype=np.int32)
        first += len(shard)
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        values.append(shard)
        offsets.append(ends)
    stream = TokenStream(values, offsets, EOS)
    config = PackingConfig(mode=mode, context_length=context_length, remainder=remainder)
    packing = pack(stream.tokens, lambda: stream.document_offsets, config, SEGMENT)
    return Windows(stream, packing, mode == "aligned", "test")


def gather_all(windows):
    return read(windows.gather(np.arange(len(windows))))


def read(batch):
    """The causal LM inputs of windows: inputs, labels, resets."""
    inputs = CausalLM().inputs(batch)
    return inputs.input_ids.numpy(), inputs.labels.numpy(), inputs.reset


def documents_of(windows):
    return [windows.stream.document(index) for index in range(windows.stream.documents)]


@given(shapes, st.integers(1, 12))
def test_packed_predicts_every_token_but_the_first_once(shape, context):
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
def test_document_windows_stay_in_their_document(shape, context, remainder):
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
def test_aligned_documents_start_on_segments_and_reset_there(shape):
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


@settings(max_examples=50)
@given(shapes, st.sampled_from(["packed", "document", "aligned"]), st.data())
def test_gathering_any_windows_in_any_order_matches_gathering_all(shape, mode, data):
    windows = make_windows(shape, mode)
    inputs, labels, reset = gather_all(windows)
    if not len(windows):
        return
    chosen = data.draw(st.lists(st.integers(0, len(windows) - 1), max_size=10))
    indices = np.array(chosen, dtype=np.int64)
    batch = windows.gather(indices)
    assert batch.keys.tolist() == chosen
    some_inputs, some_labels, _ = read(batch)
    assert np.array_equal(some_inputs, inputs[indices])
    assert np.array_equal(some_labels, labels[indices])
    if mode == "aligned":
        assert np.array_equal(batch.reset.numpy(), reset.numpy()[indices])


def test_a_window_number_out_of_range_is_refused():
    windows = make_windows([[20]], "packed")
    for index in (-1, len(windows)):
        with pytest.raises(IndexError):
            windows.gather(np.array([index]))


def test_documents_are_found_by_number():
    windows = make_windows([[3, 2], [], [4]], "packed")
    assert [document.tolist() for document in documents_of(windows)] == [
        [1, 2, 3],
        [4, 5],
        [6, 7, 8, 9],
    ]
    for index in (-1, 3):
        with pytest.raises(IndexError):
            windows.stream.document(index)


@given(
    shapes,
    st.integers(1, 4),
    st.sampled_from([("packed", "drop"), ("document", "drop"), ("document", "pad")])
    | st.just(("aligned", "drop")),
)
def test_the_spans_of_a_window_are_its_tokens_by_shard_and_document(shape, segments, mode):
    windows = make_windows(shape, mode[0], segments * SEGMENT, mode[1])
    inputs, labels, _ = gather_all(windows)
    stream = windows.stream
    for index in range(len(windows)):
        tokens = {t for t in inputs[index].tolist() if t != EOS}
        tokens |= {t for t in labels[index].tolist() if t != IGNORED}
        spans = windows.spans(index)
        found = [stream.values[s.shard][s.first : s.last].tolist() for s in spans]
        assert [token for part in found for token in part] == sorted(tokens)
        for span, part in zip(spans, found, strict=True):
            begin, end = stream.offsets[span.shard][span.row :][:2]
            assert begin <= span.first < span.last <= end
            assert set(part) <= set(stream.document(span.document).tolist())
        places = [(span.document, span.first) for span in spans]
        assert places == sorted(set(places))
