"""A training step of a billion parameters on windows of 8,192 tokens: its share of the peak.

- MFU: relative to the GPU's peak; on a CPU, to the matrix product rate that PyTorch reaches. FLOPs
  are counted as in `infini_model.training.metrics`.
- Memory: the step's time relative to `local only`, the same model without a memory.
- Packing: the step's time on aligned windows, where half of the segments start a document and each
  ends with padding, relative to packed ones.
- Compiled: the step's time relative to `memory, plain`, the same without `launch.compile`. On CUDA
  all others are compiled, as in a training; on a CPU none is but with `--compiled`.

`--layers` takes fewer layers of the same shape, for a smaller GPU, and `--checkpointing` recomputes
activations, for a longer window.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import Cell, Ratio, publish, spread, stopwatch, take_turns
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.kernels.attention import resolve_backend
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.memory import RULES
from infini_model.training.metrics import flops_per_token, peak_flops
from infini_model.training.optimizer import make_optimizer

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MEMORY, LOCAL, ALIGNED, PLAIN = "memory", "local only", "memory, aligned", "memory, plain"
# Largest step time relative to local attention, by segment length, and of aligned to packed.
LIMITS = {2048: 1.3, 512: 1.6}
ALIGNED_LIMIT, COMPILED_LIMIT = 1.05, 1.0
MFU_TARGET = 0.5
# Size and number of the matrix products that measure a CPU's peak.
SIDE, PRODUCTS = 1024, 8


class Shape(NamedTuple):
    """The batch of a step: `rows` of `length` tokens, with or without activation checkpointing.

    `aligned` is as in `PackingConfig.mode`: the memory is emptied before every second segment, and
    the last eighth of each segment is padding. `compiled` is `launch.compile`.
    """

    rows: int
    length: int
    checkpointing: bool
    compiled: bool
    aligned: bool = False


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.utilization",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=8192 if CUDA else 1024, help="tokens")
    parser.add_argument("--rows", type=int, default=2, help="windows of a step, at most")
    parser.add_argument(
        "--segments", type=int, nargs="+", default=[2048, 512] if CUDA else [256, 128]
    )
    parser.add_argument("--layers", type=int, default=16 if CUDA else 1)
    parser.add_argument("--hidden-size", type=int, default=2048 if CUDA else 256)
    parser.add_argument("--memory", choices=RULES, default="residual")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=CUDA)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


def model_of(options: argparse.Namespace, segment: int, memory: str) -> ModelConfig:
    """The model, by default 1.07 billion parameters without the embedding."""
    heads = max(1, options.hidden_size // 128)
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        intermediate_size=4 * options.hidden_size,
        segment_length=segment,
        memory=memory,
    )


class Training:
    """A model and its training steps, as in `infini_model.training`.

    Weights are float32, matrix products bfloat16 on CUDA, and the optimizer is the training's own.
    """

    def __init__(self, config: ModelConfig) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = InfiniLlama(config).to(DEVICE)
        self._config = TrainingConfig()
        self._optimizer = make_optimizer(self.model, self._config)
        kernel = resolve_backend(
            *("auto", torch.device(DEVICE), torch.bfloat16 if CUDA else torch.float32),
            config.head_dim,
        )
        self._attention_compiles = kernel == "sdpa"

    def step(self, shape: Shape) -> None:
        """Forward, backward and update with a batch of random tokens."""
        vocab_size = self.model.lm_head.out_features
        tokens = torch.randint(vocab_size, (shape.rows, shape.length + 1), device=DEVICE)
        decoder = self.model.model
        decoder.recomputed_layers = len(decoder.layers) if shape.checkpointing else 0
        attention = shape.compiled and self._attention_compiles
        decoder.compile_layers(attention=attention, feed_forward=shape.compiled)
        # A step that ran out of memory may have left gradients.
        self._optimizer.zero_grad(set_to_none=True)
        labels, starts = tokens[:, 1:], None
        if shape.aligned:
            labels, starts = self._align(labels)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = self.model(tokens[:, :-1], labels=labels, document_starts=starts).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self._config.max_grad_norm)
        self._optimizer.step()

    def _align(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of documents that start at every second segment, and where documents start."""
        segment = self.model.config.segment_length
        places = torch.arange(labels.size(1), device=DEVICE)
        padding = places % segment >= segment - segment // 8
        starts = places[::segment] // segment % 2 == 0
        return labels.masked_fill(padding, IGNORED), starts.expand(labels.size(0), -1)

    def fit(self, shape: Shape) -> Shape:
        """Take a step; returns the shape, with rows halved until they fit into memory."""
        try:
            self.step(shape)
        except torch.OutOfMemoryError:
            if shape.rows == 1:
                raise
        else:
            return shape
        torch.cuda.empty_cache()
        return self.fit(shape._replace(rows=shape.rows // 2))


def peak_rate() -> float:
    """The device's peak FLOP/s: the GPU's data sheet value, or measured."""
    if CUDA and (known := peak_flops(torch.cuda.get_device_name())):
        return known
    dtype = torch.bfloat16 if CUDA else torch.float32
    left, right = (torch.randn(SIDE, SIDE, device=DEVICE, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(PRODUCTS):
            left @ right

    multiply()
    seconds = take_turns({"products": stopwatch(multiply)}, 3)["products"]
    return 2 * SIDE**3 * PRODUCTS / min(seconds)


def compare(
    segment: int, peak: float, options: argparse.Namespace
) -> tuple[list[dict[str, Cell]], dict[str, Ratio], Ratio]:
    """The rows of one segment length, its ratios of step times, and the MFU with memory."""
    rules = (options.memory, "none")
    memory, local = (Training(model_of(options, segment, rule)) for rule in rules)
    packed = Shape(options.rows, options.length, options.checkpointing, options.compiled)
    # The last time with the moments and gradients of both.
    for training in (memory, local, memory):
        packed = training.fit(packed)
    works = {
        MEMORY: (memory, packed),
        LOCAL: (local, packed),
        ALIGNED: (memory, packed._replace(aligned=True)),
    }
    if options.compiled:
        works[PLAIN] = memory, packed._replace(compiled=False)
    peers = {
        name: stopwatch(functools.partial(training.step, shape))
        for name, (training, shape) in works.items()
    }
    for measure in peers.values():
        measure()
    seconds = take_turns(peers, options.turns)
    tokens = packed.rows * packed.length
    flops = flops_per_token(memory.model, packed.length) * tokens
    mfu = spread([flops / (each * peak) for each in seconds[MEMORY]])
    rows: list[dict[str, Cell]] = [
        {
            "": f"{name}, segments of {segment:,}",
            "rows": packed.rows,
            "ms a step": 1e3 * statistics.median(each),
            "tokens/s": tokens / statistics.median(each),
            "MFU": mfu if name == MEMORY else None,
        }
        for name, each in seconds.items()
    ]
    ratios = {
        f"step time, {one} / {other}, segments of {segment:,}": spread(
            [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
        )
        for one, other in ((MEMORY, LOCAL), (ALIGNED, MEMORY), (MEMORY, PLAIN))
        if other in seconds
    }
    return rows, ratios, mfu


def main() -> None:
    """Measure each segment length and print the results."""
    options = parse()
    peak = peak_rate()
    rows: list[dict[str, Cell]] = []
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
        "utilization",
        f"A training step: {options.layers} layers of width {options.hidden_size}, "
        f"windows of {options.length:,}",
        rows,
        ratios,
        targets,
        {name: limit for name, limit in limits.items() if CUDA and name in ratios},
    )


if __name__ == "__main__":
    main()
