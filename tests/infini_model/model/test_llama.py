"""The model: one pass, chunks of it and single tokens must give the same results.

At last two streams of a bidirectional model: what a noisy token may and may not know.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_config, tiny_model
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import ConfigError

WITH_MEMORY = pytest.mark.parametrize("memory", ["linear", "delta", "residual"])
MEMORIES = pytest.mark.parametrize("memory", ["linear", "delta", "residual", "none"])


# Parts of bases other than Llama.
VARIANTS = (
    {},
    {"qkv_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"qk_norm": "head", "no_rope_layer_interval": 2},
    {"qk_norm": "projection", "post_norm": True, "attention_bias": True},
)
# What a token sees beside its own segment: nothing; an earlier one; two, and the first tokens.
WINDOWS = pytest.mark.parametrize("window", [(0, 0), (1, 0), (2, 3)])


def build(seed=0, dtype=torch.float64, window=(0, 0), **changes):
    changes |= {"window_segments": window[0], "window_sinks": window[1]}
    return tiny_model(seed, dtype, **{"vocab_size": 17, "initializer_range": 0.3} | changes)


def ids(batch, tokens, seed=0):
    return torch.randint(17, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def rounding(window):
    """The tolerance: a state turns the keys of a window by float32 tables."""
    return 1e-6 if any(window) else 1e-10


def test_read_weights_start_where_the_settings_say_and_key_shifts_at_one_half():
    model = InfiniLlama(tiny_config(memory="linear", read_weight_start=0.0))
    assert [heads.tolist() for heads in model.read_strengths()] == [[0.5] * 4] * 2
    assert model.get_parameter("model.layers.0.self_attn.memory.memory_key_shift").tolist() == [
        0.5,
        0.5,
    ]
    assert InfiniLlama(tiny_config(memory="none")).read_strengths() == []
    strengths = InfiniLlama(tiny_config(memory="residual")).read_strengths()
    assert [heads.tolist() for heads in strengths] == [[0.0] * 4] * 2


def test_in_bf16_the_loss_is_close_and_the_memory_in_float32():
    tokens, labels = ids(2, 12), ids(2, 12, seed=1)
    exact = build(dtype=torch.float32, initializer_range=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        under = exact(tokens, labels=labels)
    rounded = build(dtype=torch.bfloat16, initializer_range=0.05)(tokens, labels=labels)
    for out in (under, rounded):
        assert out.state.layers[0].rule.memory.kv.dtype == torch.float32
        close(out.loss, exact(tokens, labels=labels).loss, 0.02)


def test_a_new_residual_memory_learns_though_it_adds_nothing():
    """The weights first, then what depends on them."""
    model, tokens = InfiniLlama(tiny_config(memory="residual", initializer_range=0.3)), ids(2, 20)
    tokens %= 11
    rule = model.attentions[0].memory
    model(tokens).logits.sum().backward()
    assert rule.memory_weight.grad.abs().min() > 0
    torch.nn.init.ones_(rule.memory_weight)
    model(tokens).logits.sum().backward()
    assert rule.memory_write_gate.grad.abs().min() > 0
    assert rule.memory_forget_gate.grad.abs().min() > 0


@given(
    st.integers(0, 100),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(["linear", "delta", "residual", "none"]),
    st.booleans(),
    st.booleans(),
    st.tuples(st.integers(0, 2), st.integers(0, 4)),
    st.sampled_from(VARIANTS),
)
@settings(max_examples=60, derandomize=True)
def test_one_pass_equals_any_chunks(
    seed, chunks, memory, keys_shifted, queries_shifted, window, variant
):
    shifts = {"memory_key_shift": keys_shifted, "memory_query_shift": queries_shifted}
    model = build(seed, memory=memory, window=window, **shifts, **variant)
    tokens = ids(2, sum(chunks), seed)
    with torch.no_grad():
        whole = model(tokens)
        state, parts = None, []
        for chunk in tokens.split(chunks, dim=1):
            out = model(chunk, state=state)
            state = out.state
            parts.append(out.logits)
        close(torch.cat(parts, 1), whole.logits, rounding(window))
        # The states are equivalent too: what follows is equal.
        after = ids(2, 6, seed + 1)
        both = (model(after, state=each).logits for each in (state, whole.state))
        close(*both, rounding(window))


@MEMORIES
@WINDOWS
def test_rows_may_be_at_different_positions_and_a_state_be_continued_twice(memory, window):
    """One at the end of a segment, one after its first token, one before any."""
    model = build(memory=memory, window=window)
    tokens, counts = ids(3, 4), torch.tensor([4, 1, 0])
    with torch.no_grad():
        _, state = model.advance(tokens, model.empty_state(3), counts)
        assert state.position.tolist() == [4, 1, 0]
        first, after = model.advance(tokens[:, :3], state)
        other, _ = model.extend(tokens.flip(1), state)
        last, _ = model.extend(tokens[:, 3:], after)
        ours = torch.cat((first, last), 1)
        for row, count in enumerate(counts.tolist()):
            for hidden, read in ((ours, tokens[row]), (other, tokens[row].flip(0))):
                separate = torch.cat((tokens[row, :count], read))[None]
                expected = model(separate).logits[0, count:]
                close(model.lm_head(hidden[row]), expected, rounding(window))


@MEMORIES
@WINDOWS
def test_in_place_gives_the_same_results_without_copies(memory, window):
    model, tokens = build(memory=memory, window=window), ids(3, 11)
    with torch.no_grad():
        copied, spent = model.empty_state(3), model.empty_state(3)
        held = list[int]()
        for counts in ([3, 0, 2], [1, 3, 2], [4, 1, 1], [0, 2, 3]):
            counts = torch.tensor(counts)
            expected, copied = model.advance(tokens[:, :4], copied, counts)
            hidden, spent = model.advance(tokens[:, :4], spent, counts, in_place=True)
            held = held or [layer.keys.data_ptr() for layer in spent.layers]  # there were no slots
            real = torch.arange(4) < counts[:, None]
            assert torch.equal(hidden[real], expected[real])
        if not any(window):  # which is moved on, as a copy, when a segment is full
            assert [layer.keys.data_ptr() for layer in spent.layers] == held
            assert copied.layers[0].keys.data_ptr() not in held
        after = [model(tokens, state=state).logits for state in (copied, spent)]
        assert torch.equal(*after)


@MEMORIES
@WINDOWS
def test_a_state_holds_no_view_of_the_whole_sequence(memory, window):
    model, sizes = build(memory=memory, window=window), []
    for length in (7, 4 * 16 + 3):
        with torch.no_grad():
            layers = model(ids(2, length)).state.layers
        tensors = [x for x in tree_leaves(layers) if torch.is_tensor(x)]
        sizes.append(sum(x.untyped_storage().nbytes() for x in tensors))
    assert sizes[0] == sizes[1]
    # And a training, which asks for none, builds none.
    assert model.model(ids(2, 7), keep_state=False)[1] == ()


@MEMORIES
@WINDOWS
def test_a_document_knows_nothing_of_those_before_it(memory, window):
    model = build(memory=memory, window=window)
    tokens = ids(2, 16)
    document_starts = torch.tensor([[False, False, True, False], [True, False, False, True]])
    with torch.no_grad():
        logits = model(tokens, document_starts=document_starts).logits
        close(logits[0, 8:], model(tokens[:1, 8:]).logits[0])
        close(logits[1, 12:], model(tokens[1:, 12:]).logits[0])
        before = model(ids(2, 8, seed=5)).state
        carried = model(tokens, state=before, document_starts=document_starts).logits
        close(carried[1], logits[1])
        is_carried = model.config.has_past
        assert ((carried[0, :8] - logits[0, :8]).abs().max() > 1e-6) == is_carried
        # Nor does what follows it, token by token.
        state = model(tokens, document_starts=document_starts).state
        assert state.position.tolist() == [8, 4]
        after = ids(2, 9, seed=6)
        parts = []
        for token in after.split(1, dim=1):
            hidden, state = model.advance(token, state)
            parts.append(model.lm_head(hidden))
        for row, start in enumerate((8, 12)):
            alone = torch.cat((tokens[row, start:], after[row]))[None]
            close(torch.cat(parts, 1)[row], model(alone).logits[0, -9:], rounding(window))


@MEMORIES
@WINDOWS
def test_knocking_out_a_part_leaves_the_other(memory, window):
    """With the weights of a model that has only that, and with documents."""
    model, tokens = build(memory=memory, window=window), ids(2, 20)
    starts = torch.rand(2, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    for part, changes in (("memory", {"memory": "none"}), ("window", {"window": (0, 0)})):
        other = build(**{"memory": memory, "window": window} | changes)
        other.load_state_dict(model.state_dict(), strict=False)
        with torch.no_grad():
            knocked_out, expected = model.hidden(tokens, starts, part), other.hidden(tokens, starts)
        close(knocked_out, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_logits(tied):
    model, tokens, labels = build(tie_word_embeddings=tied), ids(2, 8), ids(2, 8, seed=1)
    labels[0, :3] = -100
    out, logits = model(tokens, labels=labels), model(tokens).logits
    assert out.logits is None
    losses = out.loss, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    close(*[(x, *torch.autograd.grad(x, list(model.parameters()))) for x in losses])
    assert model(tokens, labels=torch.full((2, 8), -100)).loss == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant):
    model = build(**variant)
    model(ids(2, 12), labels=ids(2, 12, seed=1)).loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    # Also of a single segment, which reads no memory, each has a gradient.
    model.zero_grad()
    model(ids(2, 4), labels=ids(2, 4, seed=1)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_bad_input_is_named():
    model, bidirectional = build(), build(memory="none", bidirectional=True)
    inside, border = model(ids(1, 3)).state, torch.zeros(1, 1, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        InfiniLlama(tiny_config(vocab_size=None))
    for message, call in (
        ("segment has no state", lambda: bidirectional(ids(1, 4), state=inside)),
        ("segment has no state", lambda: bidirectional.advance(ids(1, 4), inside)),
        ("segment has no state", lambda: generate(bidirectional, ids(1, 4), max_new_tokens=1)),
        ("labels: expected shape", lambda: model(ids(1, 3), labels=ids(1, 2))),
        (
            "document_starts: expected a state that",
            lambda: model(ids(1, 4), state=inside, document_starts=border),
        ),
        ("state: expected 2 rows", lambda: model(ids(2, 4), state=inside)),
        ("1 tokens beyond the segment", lambda: model.advance(ids(1, 2), inside)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


LENGTH, SEGMENTS = 4, 5


def two_streams(memory, window):
    return build(memory=memory, window=window, bidirectional=True, memory_query_shift=True)


def two_rows(seed=0):
    return ids(2, SEGMENTS * LENGTH, seed)


def changed(tokens, position):
    """`tokens` with another one at `position` of every row."""
    other = tokens.clone()
    other[:, position] = (other[:, position] + 1) % 17
    return other


def moved(before, after):
    """Numbers of the segments that differ anywhere."""
    differs = (before != after).any(-1).any(0)
    return differs.view(-1, LENGTH).any(1).nonzero().flatten().tolist()


@WITH_MEMORY
@WINDOWS
def test_streams_of_the_same_tokens_are_equal_bit_for_bit(memory, window):
    model, tokens = two_streams(memory, window), two_rows()
    document_starts = torch.rand(2, SEGMENTS, generator=torch.Generator().manual_seed(1)) < 0.3
    both, _ = model.model(torch.cat((tokens, tokens)), document_starts=document_starts, streams=2)
    clean, noisy = both.chunk(2)
    assert torch.equal(clean, noisy)
    torch.testing.assert_close(clean, model.hidden(tokens, document_starts), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("memory", "window"),
    [("linear", (0, 0)), ("delta", (1, 2)), ("residual", (0, 0)), ("residual", (1, 2))],
)
@pytest.mark.parametrize("place", [0, LENGTH - 1])
def test_a_clean_token_moves_later_noisy_segments_and_a_noisy_one_all_of_its_own(
    memory, window, place
):
    model, clean, noisy = two_streams(memory, window), two_rows(), two_rows(seed=1)
    before = model.hidden(noisy, past_ids=clean)
    for segment in range(SEGMENTS):
        token = segment * LENGTH + place
        after = model.hidden(noisy, past_ids=changed(clean, token))
        assert moved(before, after) == list(range(segment + 1, SEGMENTS))
        after = model.hidden(changed(noisy, token), past_ids=clean)
        assert moved(before, after) == [segment]
        assert (before != after).any(-1)[:, segment * LENGTH :][:, :LENGTH].all()


def on_gpu(gpu, **changes):
    """A model in float64 on the CPU, and its copy in float32 on the GPU."""
    exact = build(hidden_size=64, initializer_range=0.02, **changes)
    ours = InfiniLlama(exact.config).to(gpu)
    ours.load_state_dict(exact.state_dict())
    return exact, ours


@pytest.mark.cuda
@MEMORIES
@pytest.mark.parametrize("bidirectional", [False, True])
def test_on_a_gpu_it_equals_float64_with_all_gradients(gpu, memory, bidirectional):
    """Two rows whose last segment is not full; in one of them a document starts."""
    tokens, document_starts, results = ids(2, 28), torch.zeros(2, 7, dtype=torch.bool), []
    document_starts[0, 2] = True
    for model in on_gpu(gpu, memory=memory, bidirectional=bidirectional):
        device = model.lm_head.weight.device
        inputs, labels = (each.to(device) for each in (tokens[:, :-1], tokens[:, 1:]))
        loss = model(inputs, labels=labels, document_starts=document_starts.to(device)).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results.append([x.double().cpu() for x in (loss, *gradients) if x is not None])
    assert len(results[0]) > 10
    for expected, found in zip(*results, strict=True):
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.cuda
def test_on_a_gpu_generation_gives_the_tokens_of_the_cpu(gpu):
    exact, _ = on_gpu(gpu)
    prompts = [row[:length].tolist() for row, length in zip(ids(2, 30), (5, 30), strict=True)]
    expected = generate(exact, prompts, max_new_tokens=20, temperature=0.0)
    assert generate(exact.to(gpu), prompts, max_new_tokens=20, temperature=0.0) == expected
