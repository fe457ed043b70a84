"""The model: one pass, chunks of it and single tokens must give the same results."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import draw_memory_parameters, tiny_config
from torch.nn import functional

from infini_model.model.generation.causal import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import summed_loss
from infini_model.runtime.errors import ConfigError

FEW = settings(max_examples=20, derandomize=True)


def config(**changes):
    return tiny_config(**{"vocab_size": 17, "initializer_range": 0.3} | changes)


def build(seed=0, dtype=torch.float64, **changes):
    """A tiny model with random gates and key shifts."""
    torch.manual_seed(seed)
    model = InfiniLlama(config(**changes)).to(dtype)
    draw_memory_parameters(model)
    return model


def mean_loss(model, tokens, labels, reset=None, *, rows_at_once):
    """The loss of `model`, from chunks of logits of so many rows."""
    hidden, _ = model.hidden(tokens, reset=reset)
    weight = model.lm_head.weight
    total = summed_loss(
        hidden.flatten(0, 1), weight, labels.flatten(), logits_at_once=rows_at_once * len(weight)
    )
    return total / (labels != -100).sum()


def ids(batch, tokens, seed=0):
    return torch.randint(17, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs, tolerance=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_parameters_are_those_of_llama_and_of_the_memory():
    names = dict(build().named_parameters())
    own = {name for name in names if name.endswith(("gate", "memory_key_shift"))}
    attention = "model.layers.1.self_attn."
    assert {attention + "gate", attention + "memory_key_shift"} <= own
    assert len(own) == 4
    assert names[attention + "gate"].shape == (4,)
    assert names[attention + "memory_key_shift"].shape == (2,)
    plain = dict(build(memory="none").named_parameters())
    assert set(plain) == set(names) - own


def test_gates_start_where_the_settings_say_and_key_shifts_at_one_half():
    model = InfiniLlama(config(gate_start=0.0))
    assert model.gate_statistics() == [(0.5, 0.5, 0.5)] * 2
    assert model.get_parameter("model.layers.0.self_attn.memory_key_shift").tolist() == [0.5, 0.5]
    assert InfiniLlama(config(memory="none")).gate_statistics() == []


@given(
    st.integers(0, 100),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(["linear", "delta", "none"]),
    st.booleans(),
    st.booleans(),
)
@FEW
def test_one_pass_equals_any_chunks(seed, chunks, memory, keys_shifted, queries_shifted):
    model = build(
        seed, memory=memory, memory_key_shift=keys_shifted, memory_query_shift=queries_shifted
    )
    tokens = ids(2, sum(chunks), seed)
    with torch.no_grad():
        whole = model(tokens)
        state, parts = None, []
        for chunk in tokens.split(chunks, dim=1):
            out = model(chunk, state=state)
            state = out.state
            parts.append(out.logits)
        close(torch.cat(parts, 1), whole.logits)
        # The states are equivalent too: what follows is equal.
        after = ids(2, 6, seed + 1)
        close(model(after, state=state).logits, model(after, state=whole.state).logits)


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
@pytest.mark.parametrize("shift", [True, False])
def test_one_pass_equals_token_by_token(memory, shift):
    model = build(memory=memory, memory_key_shift=shift, memory_query_shift=shift)
    tokens = ids(2, 14)
    with torch.no_grad():
        state = model.empty_state(2)
        sizes = {x.shape for x in state.layers[0].memory} | {state.layers[0].keys.shape}
        hidden = []
        for t in range(14):
            out, state = model.advance(tokens[:, t : t + 1], state)
            hidden.append(out)
            layer = state.layers[0]
            assert {x.shape for x in layer.memory} | {layer.keys.shape} == sizes
        close(model.lm_head(torch.cat(hidden, 1)), model(tokens).logits)
    assert state.position.tolist() == [14, 14]


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_an_empty_state_equals_no_state(memory):
    """Also where one of two rows starts and the other continues."""
    model = build(memory=memory)
    tokens, after = ids(2, 10), ids(2, 6, seed=1)
    with torch.no_grad():
        fresh = model(tokens)
        first = model(tokens, state=model.empty_state(2))
        close(first.logits, fresh.logits)
        close(model(after, state=first.state).logits, model(after, state=fresh.state).logits)
        _, state = model.advance(tokens[:, :4], model.empty_state(2), torch.tensor([4, 0]))
        mixed = model(tokens, state=state).logits
        close(mixed[0], model(torch.cat((tokens[:1, :4], tokens[:1]), 1)).logits[0, 4:])
        close(mixed[1], fresh.logits[1])


def test_rows_may_be_at_different_positions():
    model = build()
    tokens, counts = ids(3, 4), torch.tensor([4, 1, 0])
    with torch.no_grad():
        _, state = model.advance(tokens, model.empty_state(3), counts)
        assert state.position.tolist() == [4, 1, 0]
        hidden, _ = model.advance(tokens[:, :3], state)
        for row, count in enumerate(counts.tolist()):
            separate = torch.cat((tokens[row, :count], tokens[row, :3]))[None]
            close(model.lm_head(hidden[row]), model(separate).logits[0, -3:])


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_a_state_may_be_continued_twice(memory, start):
    """From anywhere in a segment, alternating: neither continuation affects the other."""
    model, continuations = build(memory=memory), (ids(2, 7, seed=1), ids(2, 7, seed=2))
    with torch.no_grad():
        state = model.empty_state(2)
        for t in range(start):
            _, state = model.advance(ids(2, start)[:, t : t + 1], state)
        expected = [model(tokens, state=state).logits for tokens in continuations]
        states, found = [state, state], ([], [])
        for t in range(7):
            for index, tokens in enumerate(continuations):
                hidden, states[index] = model.advance(tokens[:, t : t + 1], states[index])
                found[index].append(model.lm_head(hidden))
        close([torch.cat(parts, 1) for parts in found], expected)
        assert torch.equal(model(continuations[0], state=state).logits, expected[0])


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
def test_in_place_gives_the_same_results_without_copies(memory):
    model, tokens = build(memory=memory), ids(3, 11)
    with torch.no_grad():
        copied, spent = model.empty_state(3), model.empty_state(3)
        held = [layer.keys.data_ptr() for layer in spent.layers]
        for counts in ([3, 0, 2], [1, 3, 2], [4, 1, 1], [0, 2, 3]):
            counts = torch.tensor(counts)
            expected, copied = model.advance(tokens[:, :4], copied, counts)
            hidden, spent = model.advance(tokens[:, :4], spent, counts, in_place=True)
            real = torch.arange(4) < counts[:, None]
            assert torch.equal(hidden[real], expected[real])
        assert [layer.keys.data_ptr() for layer in spent.layers] == held
        assert copied.layers[0].keys.data_ptr() not in held
        after = [model(tokens, state=state).logits for state in (copied, spent)]
        assert torch.equal(*after)


def test_a_state_holds_no_view_of_the_whole_sequence():
    model, sizes = build(), []
    for length in (7, 4 * 16 + 3):
        with torch.no_grad():
            layers = model(ids(2, length)).state.layers
        tensors = [x for layer in layers for x in (*layer.memory, *vars(layer).values())]
        sizes.append(sum(x.untyped_storage().nbytes() for x in tensors if torch.is_tensor(x)))
    assert sizes[0] == sizes[1]


def test_causal_around_every_border():
    model = build()
    tokens = ids(1, 13)
    with torch.no_grad():
        base = model(tokens).logits
        for t in range(13):
            changed = tokens.clone()
            changed[0, t] = (changed[0, t] + 1) % 17
            logits = model(changed).logits
            assert torch.equal(logits[:, :t], base[:, :t])
            assert not torch.equal(logits[:, t:], base[:, t:])


def test_only_the_memory_reaches_across_segments():
    tokens = ids(1, 12)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 17
    for memory, reaches in (("linear", True), ("none", False)):
        model = build(memory=memory)
        with torch.no_grad():
            difference = (model(tokens).logits - model(changed).logits).abs()[:, 4:]
        assert bool(difference.max() > 0) is reaches


def test_without_memory_segments_are_independent():
    model = build(memory="none")
    tokens = ids(2, 10)
    with torch.no_grad():
        separate = torch.cat([model(chunk).logits for chunk in tokens.split(4, 1)], 1)
        close(model(tokens).logits, separate)


def test_a_bidirectional_model_sees_whole_segments_and_no_other():
    model, tokens = build(memory="none", bidirectional=True), ids(1, 14)
    with torch.no_grad():
        base = model(tokens).logits
        for start in (0, 4, 8, 12):
            last = min(start + 4, 14) - 1
            changed = tokens.clone()
            changed[0, last] = (changed[0, last] + 1) % 17
            moved = (model(changed).logits != base).any(-1)[0]
            assert moved.nonzero().flatten().tolist() == list(range(start, last + 1))
        alone = torch.cat([model(segment).logits for segment in tokens.split(4, 1)], 1)
        close(base, alone)


def test_a_bidirectional_model_has_no_state_to_extend():
    model, tokens = build(memory="none", bidirectional=True), ids(1, 4)
    state = build(memory="none").empty_state(1)
    for call in (
        lambda: model(tokens, state=state),
        lambda: model.hidden(tokens, state),
        lambda: model.extend(tokens, state),
        lambda: model.advance(tokens, state),
        lambda: model.empty_state(1),
        lambda: generate(model, tokens, max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="a bidirectional segment has no state to extend"):
            call()


def test_a_reset_forgets_all_preceding_tokens():
    model = build()
    tokens = ids(2, 16)
    reset = torch.tensor([[False, False, True, False], [True, False, False, True]])
    with torch.no_grad():
        logits = model(tokens, reset=reset).logits
        close(logits[0, 8:], model(tokens[:1, 8:]).logits[0])
        close(logits[1, 12:], model(tokens[1:, 12:]).logits[0])
        before = model(ids(2, 8, seed=5)).state
        carried = model(tokens, state=before, reset=reset).logits
        close(carried[1], logits[1])
        assert (carried[0, :8] - logits[0, :8]).abs().max() > 1e-6


def test_labels_are_aligned_and_masked():
    model = build()
    tokens, labels = ids(2, 8), ids(2, 8, seed=1)
    labels[0, :3] = -100
    logits = model(tokens).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    out = model(tokens, labels=labels)
    assert out.logits is None
    close(out.loss, expected)
    assert model(tokens, labels=torch.full((2, 8), -100)).loss == 0


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_loss_is_that_of_the_logits(tied, chunked):
    model, tokens, labels = build(tie_word_embeddings=tied), ids(2, 8), ids(2, 8, seed=1)
    labels[0, 3:] = -100
    logits = model(tokens).logits.flatten(0, 1)
    loss = (
        mean_loss(model, tokens, labels, rows_at_once=5)
        if chunked
        else model(tokens, labels=labels).loss
    )
    losses = loss, functional.cross_entropy(logits, labels.flatten())
    results = [(x, *torch.autograd.grad(x, list(model.parameters()))) for x in losses]
    close(*results)


def test_every_parameter_learns():
    model = build()
    loss = model(ids(2, 12), labels=ids(2, 12, seed=1)).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    one_segment = build()
    one_segment(ids(2, 4), labels=ids(2, 4, seed=1)).loss.backward()
    assert all(parameter.grad is not None for parameter in one_segment.parameters())


def test_bf16_under_autocast_and_as_dtype():
    tokens, labels = ids(2, 12), ids(2, 12, seed=1)
    exact = build(dtype=torch.float32, initializer_range=0.05)
    reference = exact(tokens, labels=labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        out = exact(tokens, labels=labels)
        hidden, _ = exact.advance(tokens[:, :4], exact.empty_state(2))
    out.loss.backward()
    assert hidden.isfinite().all()
    assert out.state.layers[0].memory.kv.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in exact.parameters())
    rounded = build(dtype=torch.bfloat16, initializer_range=0.05)(tokens, labels=labels).loss
    for loss in (out.loss, rounded):
        close(loss, reference, 0.02)


def largest_allocation(run):
    """The result of `run`, and the size in bytes of the largest tensor that it allocated."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        out = run()
    return out, max(event.self_cpu_memory_usage for event in profile.events())


def kept_bytes(forward):
    """The result of `forward`, and the bytes that autograd keeps for the backward pass."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    return out, sum(storages.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_logits_are_never_held_whole(autocast, training):
    model = build(dtype=torch.float32, vocab_size=997, num_hidden_layers=1)
    tokens, labels = ids(2, 256), ids(2, 256, seed=1)
    whole, seen = 2 * 256 * 997 * 4, {}

    def loss(rows_at_once):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, kept = kept_bytes(
                lambda: mean_loss(model, tokens, labels, rows_at_once=rows_at_once)
            )
        if training:
            out.backward()
        return kept

    for rows_at_once in (2 * 256, 16):
        with torch.set_grad_enabled(training):
            kept, largest = largest_allocation(partial(loss, rows_at_once))
        seen[rows_at_once] = largest
        assert kept < whole
    most, most_in_chunks = seen.values()
    assert most == whole
    assert most_in_chunks < whole / 10


@pytest.mark.parametrize("memory", ["linear", "delta", "none"])
@pytest.mark.parametrize("carried", [False, True])
def test_recomputed_layers_give_the_same_bits_and_keep_less(memory, carried):
    model = build(memory=memory, num_hidden_layers=4)
    tokens, labels = ids(2, 32), ids(2, 32, seed=1)
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[0, 3] = reset[1, 6] = True
    with torch.no_grad():
        state = model(ids(2, 8, seed=2)).state if carried else None
    results = []
    for again in (False, True):
        model.model.gradient_checkpointing = again
        out, kept = kept_bytes(lambda: model(tokens, state, labels, reset))
        gradients = torch.autograd.grad(out.loss, list(model.parameters()), allow_unused=True)
        results.append((out.loss, gradients, out.state.layers[3].memory.kv, kept))
    (*plain, plain_bytes), (*ours, our_bytes) = results
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    inputs = 4 * 2 * 32 * 16 * 8  # the inputs of the layers are kept, too
    assert our_bytes + inputs < plain_bytes / 4
    model.eval()
    assert kept_bytes(lambda: model(tokens, state, labels, reset))[1] > plain_bytes / 2


@pytest.mark.parametrize(
    ("memory", "recomputed"),
    [("linear", False), ("delta", False), ("none", False), ("linear", True)],
)
def test_compiles_without_a_graph_break(memory, recomputed):
    """Also with a chunked loss and with layers recomputed in the backward pass."""
    model = build(dtype=torch.float32, memory=memory, num_hidden_layers=1)
    model.model.gradient_checkpointing = recomputed

    def loss(tokens, labels, reset):
        if recomputed:
            return mean_loss(model, tokens, labels, reset, rows_at_once=5)
        return model(tokens, labels=labels, reset=reset).loss

    tokens, labels = ids(2, 12), ids(2, 12, seed=1)
    reset = torch.tensor([[False, True, False], [False, False, False]])
    torch.compiler.reset()
    losses = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        out = run(tokens, labels, reset)
        losses.append((out, torch.autograd.grad(out, list(model.parameters()))))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)


def test_a_seed_decides_the_weights():
    first, second, other = build(1), build(1), build(2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_bad_input_is_named():
    model = build()
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        InfiniLlama(config(vocab_size=None))
    with pytest.raises(ValueError, match=r"input_ids: expected \[B, T\], got \[3\]"):
        model(ids(1, 3)[0])
    with pytest.raises(ValueError, match=r"labels: expected shape \[1, 3\], got \[1, 2\]"):
        model(ids(1, 3), labels=ids(1, 2))
    with pytest.raises(ValueError, match=r"reset: expected shape \[1, 2\]"):
        model(ids(1, 8), reset=torch.zeros(1, 3, dtype=torch.bool))
    inside = model(ids(1, 3)).state
    with pytest.raises(ValueError, match="reset: expected a state that ends on a segment border"):
        model(ids(1, 4), state=inside, reset=torch.zeros(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="state: expected 2 rows"):
        model(ids(2, 4), state=inside)
    with pytest.raises(ValueError, match="1 tokens beyond the segment"):
        model.advance(ids(1, 2), inside)
