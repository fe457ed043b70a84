"""A training step of a billion parameters on windows of 8,192 tokens.

- Memory: the step's time relative to `local only`, the same model without a memory.
- Packing: the step's time on aligned windows, where half of the segments start a document and each
  ends with padding, relative to packed ones.
- Compiled: the step's time relative to `memory, plain`, the same without `launch.compile`. On CUDA
  all others are compiled, as in a training; on a CPU none is but with `--compiled`.
- MFU: relative to the GPU's peak; on a CPU, to the matrix product rate that PyTorch reaches.

`--layers` takes fewer layers of the same shape, for a smaller GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Iterator

import torch

from benchmarks.report import Cell, Ratio, publish, spread, stopwatch, take_turns
from benchmarks.train_step import peak_rate
from benchmarks.utilization import BILLION, Shape, Training
from infini_model.config import ModelConfig
from infini_model.training.callbacks.flops import flops_per_token

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MEMORY, LOCAL, ALIGNED, PLAIN = "memory", "local only", "memory, aligned", "memory, plain"
# Largest step time relative to local attention, by segment length, and of aligned to packed.
LIMITS = {2048: 1.3, 512: 1.6}
ALIGNED_LIMIT, COMPILED_LIMIT = 1.05, 1.0
MFU_TARGET = 0.5

Rows = list[dict[str, Cell]]


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=8192 if CUDA else 1024, help="tokens")
    parser.add_argument("--rows", type=int, default=2, help="windows of a step")
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[2048, 512] if CUDA else [256, 128]
    )
    parser.add_argument("--layers", type=int, default=BILLION.num_hidden_layers if CUDA else 1)
    parser.add_argument("--hidden-size", type=int, default=BILLION.hidden_size if CUDA else 256)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=CUDA)
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


def shape_of(options: argparse.Namespace, segment: int, memory: str) -> ModelConfig:
    """The model: a billion parameters, or fewer of the same proportions."""
    heads = max(1, options.hidden_size // 128)
    return BILLION.model_copy(
        update={
            "hidden_size": options.hidden_size,
            "num_hidden_layers": options.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 2),
            "head_dim": options.hidden_size // heads,
            "intermediate_size": 4 * options.hidden_size,
            "segment_length": segment,
            "memory": memory,
        }
    )


def compare(
    segment: int, peak: float, options: argparse.Namespace
) -> tuple[Rows, dict[str, Ratio], Ratio]:
    """The rows of one segment length, its ratios of step times, and the MFU with memory."""
    memory, local = (Training(shape_of(options, segment, m), DEVICE) for m in ("linear", "none"))
    packed = Shape(options.rows, options.length, checkpointing=False, compiled=options.compiled)
    # The last time with the moments and gradients of both.
    for training in (memory, local, memory):
        packed = training.fit(packed)
    aligned = packed._replace(aligned=True)
    works = {MEMORY: (memory, packed), LOCAL: (local, packed), ALIGNED: (memory, aligned)}
    if options.compiled:
        works[PLAIN] = memory, packed._replace(compiled=False)
    peers = {
        name: stopwatch(functools.partial(training.step, shape))
        for name, (training, shape) in works.items()
    }
    for measure in peers.values():
        measure()
    seconds = take_turns(peers, options.turns)
    flops = flops_per_token(memory.model, options.length) * packed.tokens
    mfu = spread([flops / (each * peak) for each in seconds[MEMORY]])
    rows: Rows = [
        {
            "": f"{name}, segments of {segment:,}",
            "rows": packed.rows,
            "ms a step": 1e3 * statistics.median(each),
            "tokens/s": packed.tokens / statistics.median(each),
            "MFU": mfu if name == MEMORY else None,
        }
        for name, each in seconds.items()
    ]
    return rows, dict(_relative(seconds, segment)), mfu


def _relative(seconds: dict[str, list[float]], segment: int) -> Iterator[tuple[str, Ratio]]:
    for one, other in ((MEMORY, LOCAL), (ALIGNED, MEMORY), (MEMORY, PLAIN)):
        if other not in seconds:
            continue
        ratio = spread([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])
        yield f"step time, {one} / {other}, segments of {segment:,}", ratio


def main() -> None:
    """Measure both segment lengths and print the results."""
    options = parse()
    peak = peak_rate()
    rows: Rows = []
    ratios: dict[str, Ratio] = {}
    targets: dict[str, float] = {}
    for segment in options.segments:
        gc.collect()  # the models of the last one
        found, relative, mfu = compare(segment, peak, options)
        name = f"MFU, windows of {options.length:,}, segments of {segment:,}"
        rows += found
        ratios |= relative | {name: mfu}
        targets |= {name: MFU_TARGET} if CUDA and segment == max(options.segments) else {}
    limits = {name: ALIGNED_LIMIT for name in ratios if name.startswith(f"step time, {ALIGNED}")}
    limits |= {name: COMPILED_LIMIT for name in ratios if PLAIN in name}
    for segment, limit in LIMITS.items():
        limits[f"step time, {MEMORY} / {LOCAL}, segments of {segment:,}"] = limit
    publish(
        "step",
        f"A training step: {options.layers} layers of width {options.hidden_size}, "
        f"windows of {options.length:,}",
        rows,
        ratios,
        targets,
        {name: limit for name, limit in limits.items() if CUDA and name in ratios},
    )


if __name__ == "__main__":
    main()
