"""The coverage of windows is that of the batches that come from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import numbered_stream

from infini_model.config import PackingConfig
from infini_model.data.loading.coverage import Coverage, measure_coverage
from infini_model.data.loading.loader import Phase
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows
from infini_model.model.loss import IGNORED
from infini_model.objectives.causal import CausalLM

SEGMENT, SEGMENTS = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@given(
    st.lists(st.lists(st.integers(1, 40), max_size=20), min_size=1, max_size=3).filter(
        lambda shape: sum(map(sum, shape)) > SEGMENT * SEGMENTS
    ),
    st.sampled_from(["packed", "document", "aligned"]),
    st.sampled_from(["share", "pad", "drop"]),
)
def test_coverage_is_that_of_all_windows(folder, shape, mode, remainder):
    stream = numbered_stream(folder, shape)
    config = PackingConfig(mode=mode, context_length=SEGMENT * SEGMENTS, remainder=remainder)
    windows = Windows(stream, pack(stream, config, SEGMENT), mode == "aligned", "test")
    if len(windows) == 0:
        return
    found = measure_coverage(Phase(windows), SEGMENT)
    inputs = CausalLM().inputs(windows.gather(np.arange(len(windows))))
    targets = (inputs.labels != IGNORED).view(-1, SEGMENT).numpy()
    # A memory is empty at the start of a window, and of a document where it is emptied there.
    filled = np.arange(len(targets)) % SEGMENTS > 0
    if inputs.document_starts is not None:
        filled &= ~inputs.document_starts.view(-1).numpy()
    assert found.filled == pytest.approx(targets.mean())
    learned = targets.any(axis=1)
    assert found.recalled == pytest.approx((filled & learned).sum() / learned.sum())


def test_web_text_shares_segments(folder):
    """Lengths of web text: median 630 tokens, mean 1,034, in the segments of `production`."""
    drawn = np.random.default_rng(0).normal(np.log(630), 0.9955, 4000)
    stream = numbered_stream(folder, [np.exp(drawn).astype(int).tolist()])

    def measure(segment, remainder):
        config = PackingConfig(mode="aligned", context_length=32768, remainder=remainder)
        windows = Windows(stream, pack(stream, config, segment), True, "")
        return measure_coverage(Phase(windows), segment)

    padded, shared = measure(1024, "pad"), measure(1024, "share")
    assert padded.filled < 0.66 < 0.78 < shared.filled
    assert padded.recalled + 0.05 < shared.recalled
    assert not list(shared.warnings("aligned", "residual"))


def test_a_warning_names_what_to_set():
    poor = Coverage(0.43, 0.14)
    assert [*poor.warnings("aligned", "residual")] == [
        "only 43% of the positions have a target, the rest is padding: lower model.segment_length, "
        "or set packing.remainder=share or packing.mode=packed",
        "only 14% of the segments read a memory, and only from them does it learn: lower "
        "model.segment_length, raise packing.context_length, or set packing.mode=packed",
    ]
    assert len([*poor.warnings("document", "none")]) == 1
    assert not [*Coverage(0.6, 0.25).warnings("aligned", "residual")]
