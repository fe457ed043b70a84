"""Two streams of a bidirectional model: what a noisy token may and may not know, in float64."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.model.key_shift import streams_with_previous, with_previous
from infini_model.model.llama import InfiniLlama

LENGTH, SEGMENTS, VOCABULARY = 4, 5, 17
BOTH = pytest.mark.parametrize("memory", ["linear", "delta"])


def build(**changes):
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.3,
        "bidirectional": True,
        "memory_query_shift": True,
    }
    model = InfiniLlama(tiny_config(**shape | changes)).double()
    draw_memory_parameters(model)
    return model


def ids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY - 1, (2, SEGMENTS * LENGTH), generator=generator)


def changed(tokens, position):
    """`tokens` with another one at `position` of every row."""
    other = tokens.clone()
    other[:, position] = (other[:, position] + 1) % VOCABULARY
    return other


def moved(before, after):
    """Numbers of the segments that differ anywhere."""
    differs = (before != after).any(-1).any(0)
    return differs.view(-1, LENGTH).any(1).nonzero().flatten().tolist()


@BOTH
def test_streams_of_the_same_tokens_are_equal_bit_for_bit(memory):
    model, tokens = build(memory=memory), ids()
    reset = torch.rand(2, SEGMENTS, generator=torch.Generator().manual_seed(1)) < 0.3
    both, _ = model.model(torch.cat((tokens, tokens)), None, reset, None, 2)
    clean, noisy = both.chunk(2)
    assert torch.equal(clean, noisy)
    torch.testing.assert_close(clean, model.hidden(tokens, reset=reset)[0], rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("place", [0, LENGTH - 1])
def test_a_clean_token_moves_later_noisy_segments_and_a_noisy_one_all_of_its_own(memory, place):
    model, clean, noisy = build(memory=memory), ids(), ids(seed=1)
    before = model.noisy_hidden(noisy, clean)
    for segment in range(SEGMENTS):
        token = segment * LENGTH + place
        after = model.noisy_hidden(noisy, changed(clean, token))
        assert moved(before, after) == list(range(segment + 1, SEGMENTS))
        after = model.noisy_hidden(changed(noisy, token), clean)
        assert moved(before, after) == [segment]
        assert (before != after).any(-1)[:, segment * LENGTH :][:, :LENGTH].all()


@BOTH
def test_nothing_before_a_reset_is_known_after_it(memory):
    model, clean, noisy = build(memory=memory), ids(), ids(seed=1)
    reset = torch.arange(SEGMENTS).expand(2, -1) == 2
    before = model.noisy_hidden(noisy, clean, reset)
    for segment, reached in enumerate([[1], [], [3, 4], [4], []]):
        after = model.noisy_hidden(noisy, changed(clean, segment * LENGTH + 1), reset)
        assert moved(before, after) == reached


@BOTH
def test_a_segment_after_a_state_is_as_in_two_streams(memory):
    """Generation reads the state of the clean segments before; it holds as much for any number."""
    model, clean, noisy = build(memory=memory), ids(), ids(seed=1)
    both = model.noisy_hidden(noisy, clean)
    state = model.empty_state(2)
    sizes = set()
    for start in range(0, SEGMENTS * LENGTH, LENGTH):
        segment = slice(start, start + LENGTH)
        hidden, _ = model.extend(noisy[:, segment], state)
        torch.testing.assert_close(hidden, both[:, segment], rtol=1e-10, atol=1e-10)
        _, state = model.extend(clean[:, segment], state)
        sizes.add(size(state))
    assert len(sizes) == 1


def size(state):
    """Bytes that a state holds."""
    tensors = [x for layer in state.layers for x in (*layer.memory, *vars(layer).values())]
    return sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, torch.Tensor))


def test_the_token_before_a_segment_is_of_the_first_stream():
    clean, noisy = torch.randn(2, 2, 3, 2 * LENGTH, 4, dtype=torch.float64).unbind(0)
    share, starts = torch.tensor([0.2, 0.5, 1.3]).double(), torch.zeros(2, 2 * LENGTH).bool()
    both = streams_with_previous(torch.cat((clean, noisy)), share, starts, LENGTH)
    assert torch.equal(both[:2], with_previous(clean, share, None, None))
    expected = torch.cat((clean[:, :, LENGTH - 1 : LENGTH], noisy[:, :, LENGTH:]), dim=2)
    assert torch.equal(both[2:, :, LENGTH:], with_previous(expected, share, None, None)[:, :, 1:])
    assert torch.equal(both[2:, :, 0], noisy[:, :, 0])


def test_parts_of_segments_are_refused():
    with pytest.raises(ValueError, match=r"expected whole segments of 4 as \[2, 6\]"):
        build().noisy_hidden(ids()[:, :6], ids()[:, :6])
