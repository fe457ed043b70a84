"""Forward and backward of `infini_attention` and its layer, compared with other attention.

Attention only, without projections and rotary embedding: `infini` (residual memory), `local only`
(PyTorch's causal attention within each segment, the lower bound on cost) and `full causal`
(PyTorch's causal attention over the whole sequence, quadratic in its length).

Whole layers, with norm, projections and rotary embedding: `layer` is this model's, with the key
shift; `peer layer` is that of `infini-transformer-pytorch`, called in a loop over segments. It
passes its memory on without detaching it, so both compute gradients over the whole sequence. On
CUDA, attention runs in bfloat16 and the layers in float32 under autocast.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.report import Cell, Ratio, publish, speed_ratio, stopwatch, take_turns
from infini_model.config import ModelConfig
from infini_model.model.attention import infini_attention
from infini_model.model.layers import Attention, LayerContext
from infini_model.model.rotary import rope_tables
from infini_model.model.window import Window

try:
    from infini_transformer_pytorch.infini_transformer import (  # type: ignore[import-untyped]
        CausalAttention,
    )
except ImportError:
    CausalAttention = None

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OURS, LOCAL, FULL = "infini", "local only", "full causal"
LAYER, PEER = "layer", "peer layer"
# Pairs whose speed ratio is reported.
COMPARED = ((OURS, LOCAL), (OURS, FULL), (LAYER, PEER))
# The length whose ratios are reported, if it is measured, and their minimum targets.
REPORTED_LENGTH = 32_768 if CUDA else 16_384
TARGETS = (
    {(OURS, LOCAL): 1 / 1.2, (LAYER, PEER): 10.0}
    if CUDA
    else {(OURS, LOCAL): 1 / 1.35, (OURS, FULL): 15.0, (LAYER, PEER): 1.6}
)
# The peer keeps the attention weights of every segment: twice this length would fill a GPU.
PEER_LIMIT = 1 << 18

Works = dict[str, Callable[[], object]]


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    lengths = [2048 << doubling for doubling in range(10 if CUDA else 6)]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens")
    parser.add_argument("--segment", type=int, default=2048 if CUDA else 512, help="tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128 if CUDA else 64)
    parser.add_argument(
        "--full-limit",
        type=int,
        default=131_072 if CUDA else 16_384,
        help="skip full causal attention above this many tokens",
    )
    parser.add_argument("--turns", type=int, default=9, help="maximum turns per length")
    parser.add_argument("--seconds", type=float, default=12.0, help="approximate time per length")
    options = parser.parse_args()
    for length in options.lengths:
        if length % options.segment:
            parser.error(f"--lengths: {length} is not a multiple of --segment {options.segment}")
    return options


def attentions(length: int, options: argparse.Namespace) -> Works:
    """Forward and backward of each attention over the same q, k and v."""
    shape = (1, options.heads, length, options.head_dim)
    place: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16 if CUDA else torch.float32}
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, **place).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape, **place)
    weight = torch.ones(options.heads, options.head_dim, device=DEVICE, requires_grad=True)
    rule: dict[str, Any] = {"update": "residual", "segment_length": options.segment}

    def infini() -> None:
        out, _ = infini_attention(q, k, v, weight, **rule)
        torch.autograd.grad(out, (q, k, v, weight), gradient)

    def local_only() -> None:
        out = scaled_dot_product_attention(segments(q), segments(k), segments(v), is_causal=True)
        torch.autograd.grad(out, (q, k, v), segments(gradient))

    def full_causal() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    def segments(x: Tensor) -> Tensor:
        return x.reshape(options.heads, -1, options.segment, options.head_dim)

    works: Works = {OURS: infini, LOCAL: local_only}
    return works | ({FULL: full_causal} if length <= options.full_limit else {})


def layers(length: int, options: argparse.Namespace) -> Works:
    """Forward and backward of each layer over the same input."""
    width = options.heads * options.head_dim
    torch.manual_seed(0)
    x = torch.randn(1, length, width, device=DEVICE, requires_grad=True)
    gradient = torch.randn(1, length, width, device=DEVICE, dtype=torch.bfloat16 if CUDA else None)
    config = ModelConfig(
        hidden_size=width, num_attention_heads=options.heads, segment_length=options.segment
    )
    norm, attention = nn.RMSNorm(width).to(DEVICE), Attention(config).to(DEVICE)
    cos, sin = (
        table.to(DEVICE)
        for table in rope_tables(options.segment, options.head_dim, config.rope_theta)
    )

    context = LayerContext(Window(options.segment), (cos, sin), keep_state=False)

    def layer() -> Tensor:
        out: Tensor = attention(norm(x), context, None)[0]
        return out

    works: Works = {LAYER: trained(layer, x, gradient, norm, attention)}
    if CausalAttention is None or length > PEER_LIMIT:
        return works
    peer = CausalAttention(width, dim_head=options.head_dim, heads=options.heads).to(DEVICE)

    def looped() -> Tensor:
        memories, outs = None, []
        for segment in torch.split(x, options.segment, dim=1):
            out, _, memories = peer(segment, past_memories=memories, return_new_memories=True)
            outs.append(out)
        return torch.cat(outs, dim=1)

    return works | {PEER: trained(looped, x, gradient, peer)}


def trained(
    forward: Callable[[], Tensor], x: Tensor, gradient: Tensor, *modules: nn.Module
) -> Callable[[], None]:
    """A function that runs `forward` and the backward to `x` and the modules' parameters."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    inputs = [x, *(parameter for parameter in parameters if parameter.requires_grad)]

    def work() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            out = forward()
        # With a single segment the memory is not read, so its read weight has no gradient.
        torch.autograd.grad(out, inputs, gradient, allow_unused=True)

    return work


def compare(
    length: int, options: argparse.Namespace
) -> tuple[dict[str, Cell], dict[tuple[str, str], Ratio]]:
    """The table row of one length, and its speed ratios."""
    works = attentions(length, options) | layers(length, options)
    peers = {name: stopwatch(work) for name, work in works.items()}
    # Warm up, to exclude one-time compilation, autotuning and allocation. On a CPU only the first
    # length needs it, and the longest take minutes.
    if CUDA or length == min(options.lengths):
        for name in peers.keys() - {FULL}:
            peers[name]()
    seconds = take_turns(peers, options.turns, options.seconds)
    ratios = {
        pair: speed_ratio(*(seconds[name] for name in pair))
        for pair in COMPARED
        if all(name in seconds for name in pair)
    }
    row: dict[str, Cell] = {"tokens": length}
    for name in (OURS, LOCAL, FULL, LAYER, PEER):
        row[f"{name} ms"] = 1e3 * statistics.median(seconds[name]) if name in seconds else None
    for pair in COMPARED:
        row["speed " + " / ".join(pair)] = ratios.get(pair)
    return row, ratios


def flatness(short: int, long: int, options: argparse.Namespace) -> Ratio:
    """Our tokens per second at `long`, relative to `short`."""
    peers = {str(length): stopwatch(attentions(length, options)[OURS]) for length in (short, long)}
    for measure in peers.values():
        measure()
    seconds = take_turns(peers, options.turns, options.seconds)
    per_token = {length: [each / int(length) for each in seconds[length]] for length in seconds}
    return speed_ratio(per_token[str(long)], per_token[str(short)])


def main() -> None:
    """Measure every length and print the results."""
    options = parse()
    if CausalAttention is None:
        print("infini-transformer-pytorch is not installed; skipping peer layer")
    compared = {length: compare(length, options) for length in sorted(options.lengths)}
    longest = max(compared)
    reported = REPORTED_LENGTH if REPORTED_LENGTH in compared else longest
    names = {pair: f"{reported:,} tokens, {' / '.join(pair)}" for pair in compared[reported][1]}
    ratios = {names[pair]: ratio for pair, ratio in compared[reported][1].items()}
    targets = {names[pair]: least for pair, least in TARGETS.items() if pair in names}
    if longest > reported:
        flat = f"tokens/s of {OURS}, {longest:,} / {reported:,} tokens"
        ratios[flat] = flatness(reported, longest, options)
        targets |= {flat: 0.95} if CUDA else {}
    publish(
        "attention",
        f"Attention, forward and backward: {options.heads} heads of {options.head_dim}, "
        f"segments of {options.segment}",
        [row for row, _ in compared.values()],
        ratios,
        targets,
    )


if __name__ == "__main__":
    main()
