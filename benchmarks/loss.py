"""The loss of a large vocabulary and its gradients: seconds, beside PyTorch's cross entropy.

`whole` computes all logits at once, in the products' dtype, and keeps them for the backward pass.
`2^26 logits` is ours in chunks of that many at most, whatever the size of the weight. The products
are in 16 bits under autocast on CUDA, and on a CPU with `--bf16`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.report import Cell, Ratio, publish, speed_ratio, stopwatch, take_turns
from infini_model.model.loss import LOGITS_AT_ONCE, summed_loss

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
OURS, SMALL, WHOLE = "ours", "2^26 logits", "whole"

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=__doc__)
    parser.add_argument("--rows", type=int, default=16_384 if CUDA else 2048, help="tokens")
    parser.add_argument("--hidden-size", type=int, default=2048 if CUDA else 1024)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--bf16", action="store_true", default=CUDA, help="products in 16 bits")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The loss of all logits at once."""
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, targets, reduction="sum")


def measured(options: argparse.Namespace, vocabulary: int) -> dict[str, list[float]]:
    """Seconds of a loss and its gradients, by what computes it."""
    torch.manual_seed(0)
    rows, width = options.rows, options.hidden_size
    hidden = torch.randn(rows, width, device=DEVICE, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=DEVICE) / width).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)

    def work(loss: Loss) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=options.bf16):
            total = loss(hidden, weight, targets)
        torch.autograd.grad(total, (hidden, weight))

    losses: dict[str, Loss] = {
        OURS: summed_loss,
        SMALL: partial(summed_loss, logits_at_once=LOGITS_AT_ONCE),
        WHOLE: whole,
    }
    for loss in losses.values():
        work(loss)
    peers = {name: stopwatch(partial(work, loss)) for name, loss in losses.items()}
    return take_turns(peers, options.turns)


def main() -> None:
    """Measure each vocabulary in turns and print the results."""
    options = parse()
    rows: list[dict[str, Cell]] = []
    ratios: dict[str, Ratio] = {}
    for vocabulary in options.vocabularies:
        seconds = measured(options, vocabulary)
        for name, each in seconds.items():
            speed = statistics.median(each) * 1e6 / options.rows
            rows.append({"": name, "vocabulary": vocabulary, "µs a token": speed})
        for peer in (SMALL, WHOLE):
            ratios[f"{vocabulary:,} entries, ours / {peer}"] = speed_ratio(
                seconds[OURS], seconds[peer]
            )
    products = "16 bits" if options.bf16 else "float32"
    heading = f"Loss and gradients of {options.rows:,} rows of {options.hidden_size}, {products}"
    publish("loss", heading, rows, ratios, {name: 0.95 for name in ratios if SMALL in name})


if __name__ == "__main__":
    main()
