"""Forward and backward of `infini_attention` beside attention without a memory.

The peers: `local only`, PyTorch's causal attention inside each segment, which sees nothing older
and is the floor; `full causal`, PyTorch's causal attention over everything, which costs the square
of the length. No projections and no rotary embedding: attention alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.report import Cell, Ratio, publish, speed_ratio, stopwatch, take_turns
from infini_model.attention import infini_attention

OURS, LOCAL, FULL = "infini", "local only", "full causal"


def parse() -> argparse.Namespace:
    """The options; what is not given depends on whether there is a GPU."""
    cuda = torch.cuda.is_available()
    lengths = [8192, 16384, 32768, 65536, 131072] if cuda else [2048, 4096, 8192, 16384]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens")
    parser.add_argument("--segment", type=int, default=2048 if cuda else 512, help="tokens")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9, help="turns at most, at each length")
    parser.add_argument("--seconds", type=float, default=12.0, help="about, at each length")
    return parser.parse_args()


def make_peers(length: int, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Each way to attend over the same q, k and v, with its gradients."""
    cuda = torch.cuda.is_available()
    shape = (1, options.heads, length, options.head_dim)
    place: dict[str, Any] = (
        {"device": "cuda", "dtype": torch.bfloat16} if cuda else {"device": "cpu"}
    )
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, **place).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape, **place)
    gate = torch.zeros(options.heads, device=place["device"], requires_grad=True)

    def infini() -> None:
        out, _ = infini_attention(q, k, v, gate, segment_length=options.segment)
        torch.autograd.grad(out, (q, k, v, gate), gradient)

    def local_only() -> None:
        out = scaled_dot_product_attention(segments(q), segments(k), segments(v), is_causal=True)
        torch.autograd.grad(out, (q, k, v), segments(gradient))

    def full_causal() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    def segments(x: Tensor) -> Tensor:
        return x.reshape(options.heads, -1, options.segment, options.head_dim)

    return {
        name: stopwatch(work)
        for name, work in ((OURS, infini), (LOCAL, local_only), (FULL, full_causal))
    }


def compare(length: int, options: argparse.Namespace) -> tuple[dict[str, Cell], dict[str, Ratio]]:
    """The row of one length, and our speed over each peer's."""
    peers = make_peers(length, options)
    # What is compiled, chosen or allocated once is not what is measured.
    for name in (OURS, LOCAL):
        peers[name]()
    seconds = take_turns(peers, options.turns, options.seconds)
    ratios = {peer: speed_ratio(seconds[OURS], seconds[peer]) for peer in (LOCAL, FULL)}
    times = {f"{name} ms": 1e3 * statistics.median(seconds[name]) for name in peers}
    against = {f"speed / {peer}": ratio for peer, ratio in ratios.items()}
    return {"tokens": length, **times, **against}, ratios


def main() -> None:
    """Measure every length and tell it; the ratios are those of the longest."""
    options = parse()
    for length in options.lengths:
        if length % options.segment:
            raise SystemExit(
                f"--lengths: {length} is not a multiple of --segment {options.segment}"
            )
    compared = {length: compare(length, options) for length in sorted(options.lengths)}
    rows = [row for row, _ in compared.values()]
    ratios = compared[max(compared)][1]
    publish(
        "attention",
        f"Attention, forward and backward: {options.heads} heads of {options.head_dim}, "
        f"segments of {options.segment}",
        rows,
        ratios,
    )


if __name__ == "__main__":
    main()
