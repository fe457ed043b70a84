"""Seconds of a training step under each objective, relative to the causal one.

The shape is that of the quickstart. Masked diffusion has the same windows in rows of one segment;
block diffusion has the segments of the causal model, and two streams. A step is forward, backward
and AdamW, of every token of the window or, in diffusion, of those masked.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from benchmarks.report import publish, spread, stopwatch, take_turns
from flows.presets import configure
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.training.optimizer import make_optimizer
from infini_model.training.sizing.shape import with_objective, with_vocabulary

PRESET, BYTES = "quickstart", 256
CAUSAL, BLOCKS = "causal", "block_diffusion"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Overrides of the preset by objective: how much of the window is a segment.
SEGMENTS = {
    CAUSAL: {},
    "masked_diffusion": {"memory": "none", "segment_length": 512},
    BLOCKS: {},
}
WARM_UP = 2


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives", description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    return parser.parse_args()


def step_of(objective: str) -> Callable[[], object]:
    """A training step of the preset under an objective, on the same tokens every time."""
    changes = {"training": {"objective": objective}, "model": SEGMENTS[objective]}
    config = configure([PRESET], overrides=[changes])
    config = with_objective(with_vocabulary(config, BYTES, config.run.datasets_dir))
    torch.manual_seed(config.run.seed)
    module = LossModule(InfiniLlama(config.model), make_objective(config)).to(DEVICE)
    optimizer = make_optimizer(module.model, config.training)
    shape = (config.training.batch_size, 1, config.packing.context_length + 1)
    tokens = torch.randint(BYTES, shape, device=DEVICE)
    batch = Batch(tokens, None, None, torch.arange(len(tokens), device=DEVICE))

    def step() -> None:
        inputs = module.objective.inputs(batch)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = module(inputs) / inputs.counted.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_UP):
        step()
    return step


def main() -> None:
    """Measure in turns and print the results."""
    options = parse()
    peers = {name: stopwatch(step_of(name)) for name in SEGMENTS}
    seconds = take_turns(peers, options.turns)
    ratios = {
        name: spread([a / b for a, b in zip(each, seconds[CAUSAL], strict=True)])
        for name, each in seconds.items()
    }
    rows = [
        {"": name, "ms a step": 1e3 * statistics.median(each), "relative": ratios[name]}
        for name, each in seconds.items()
    ]
    publish("objectives", f"A step of the {PRESET}, by objective", rows, ratios)


if __name__ == "__main__":
    main()
