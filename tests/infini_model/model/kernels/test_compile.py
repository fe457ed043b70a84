"""Compiled layers: one compilation for all of them, no graph break, the numbers of plain layers."""

import functools

import pytest
import torch
from tiny_models import tiny_model
from torch._dynamo.utils import counters

from infini_model.model.generate import generate
from infini_model.model.kernels import compile as compiled
from infini_model.model.kernels.compile import resolve_compile
from infini_model.runtime.errors import ConfigError

LAYERS, SEGMENT = 2, 4


@pytest.fixture
def compiler(monkeypatch, gpu):
    """Nothing compiled yet; on a CPU without generated code, which takes many seconds to build."""
    if gpu.type == "cpu":
        traced = functools.partial(torch.compile, backend="aot_eager")
        monkeypatch.setattr(torch, "compile", traced)
    compiled._compiled.cache_clear()
    torch.compiler.reset()
    counters.clear()
    yield gpu
    compiled._compiled.cache_clear()
    torch.compiler.reset()


def build(device, **changes):
    shape = {"num_hidden_layers": LAYERS, "segment_length": SEGMENT}
    return tiny_model(dtype=torch.float32, **shape | changes).to(device)


def step(model, tokens=14, seed=0, starts=False, products=None):
    """The loss and all gradients, of two rows whose last segment is not full."""
    device = model.lm_head.weight.device
    ids = torch.randint(11, (2, tokens + 1), generator=torch.Generator().manual_seed(seed))
    ids, document_starts = ids.to(device), None
    if starts:
        document_starts = torch.zeros(2, -(-tokens // SEGMENT), dtype=torch.bool, device=device)
        document_starts[seed % 2, 2] = True
    with torch.autocast(device.type, products, enabled=products is not None):
        loss = model(ids[:, :-1], labels=ids[:, 1:], document_starts=document_starts).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_close(ours, theirs, tolerance):
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-3)


def score(model):
    """Logits of batches of two shapes, and the tokens that follow prompts of different lengths."""
    model.eval()
    ids = torch.arange(10).reshape(2, 5).to(model.lm_head.weight.device)
    with torch.no_grad():
        logits = [model(ids).logits, model(ids[:1, :3]).logits]
    text = generate(model, [[1, 2, 3, 4, 5, 6], [7]], max_new_tokens=9, temperature=0.0)
    model.train()
    return logits, text


@pytest.mark.cuda
@pytest.mark.parametrize(("memory", "window"), [("delta", 0), ("residual", 0), ("residual", 1)])
def test_they_compile_once_and_give_the_numbers_of_plain_layers(compiler, memory, window):
    """Layers recomputed in the backward pass take the same code, other passes the plain one."""
    model = build(compiler, memory=memory, window_segments=window, window_sinks=2 * window)
    expected = [step(model, seed=seed, starts=True) for seed in range(2)]
    logits, text = score(model)
    model.model.compile_layers()
    assert_close(step(model, starts=True), expected[0], 1e-5)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    with torch.compiler.set_stance("fail_on_recompile"):
        kept = step(model, seed=1, starts=True)
        assert_close(kept, expected[1], 1e-5)
        found, found_text = score(model)
        model.model.recomputed_layers = len(model.model.layers)
        recomputed = step(model, seed=1, starts=True)
    assert all(torch.equal(one, other) for one, other in zip(recomputed, kept, strict=True))
    assert found_text == text
    assert all(torch.equal(one, other) for one, other in zip(found, logits, strict=True))


@pytest.mark.cuda
def test_they_give_the_numbers_of_plain_layers_in_16_bits(compiler):
    model = build(compiler)
    expected = step(model, products=torch.bfloat16)
    model.model.compile_layers()
    assert_close(step(model, products=torch.bfloat16), expected, 5e-2)


@pytest.mark.cuda
def test_a_kernel_that_cannot_be_compiled_leaves_the_feed_forward(compiler):
    model = build(compiler)
    expected = step(model)
    model.model.compile_layers(attention=False)
    assert_close(step(model), expected, 1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_it_is_used_where_it_works_and_refused_where_something_is_missing(monkeypatch, tmp_path):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda *_: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setenv("CC", "sh")
    monkeypatch.setenv("CXX", "sh")
    found = [resolve_compile(*each) for each in ((None, gpu), (None, cpu), (True, cpu))]
    assert found == [True, False, True]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not resolve_compile(None, gpu)
    with pytest.raises(ConfigError, match=r"launch\.compile: got true, but there is no C comp"):
        resolve_compile(True, gpu)
    with pytest.raises(ConfigError, match=r"but there is no C\+\+ compiler \(sh\)"):
        resolve_compile(True, cpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="there is no triton"):
        resolve_compile(True, gpu)
