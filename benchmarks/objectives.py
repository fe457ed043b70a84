"""Seconds of a training step with other memories and under other objectives, relative to its own.

The shape is that of the quickstart, which is causal and has a residual memory. Masked diffusion has
the same windows in rows of one segment; block diffusion has the segments of the causal model, and
two streams. A step is forward, backward and AdamW, of every token of the window or, in diffusion,
of those masked.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import publish, spread, stopwatch, take_turns
from flows.presets import configure
from infini_model.data.loading.windows import Batch
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.training.model_shape import with_objective, with_vocabulary
from infini_model.training.optimizer import make_optimizer

PRESET, VOCABULARY, TOKENS = "quickstart", 2048, 1024
QUICKSTART, LINEAR = "causal, residual", "causal, linear"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Overrides of the preset.
STEPS: dict[str, dict[str, Any]] = {
    QUICKSTART: {},
    LINEAR: {"model": {"memory": "linear"}},
    "causal, no memory": {"model": {"memory": "none"}},
    "masked diffusion": {
        "training": {"objective": "masked_diffusion"},
        "model": {"memory": "none", "segment_length": TOKENS},
    },
    "block diffusion": {"training": {"objective": "block_diffusion"}},
}
# A step with a residual memory takes at most 1.25 times as long as one with a linear memory.
TARGETS = {LINEAR: 0.8}
WARM_UP = 2


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objectives", description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    return parser.parse_args()


def step_of(changes: dict[str, Any]) -> Callable[[], object]:
    """A training step of the preset with these overrides, on the same tokens every time."""
    config = configure([PRESET], overrides=[changes])
    config = with_objective(with_vocabulary(config, VOCABULARY, config.run.datasets_dir))
    torch.manual_seed(config.run.seed)
    module = LossModule(InfiniLlama(config.model), make_objective(config)).to(DEVICE)
    optimizer = make_optimizer(module.model, config.training)
    shape = (config.training.batch_size, 1, config.packing.context_length + 1)
    tokens = torch.randint(VOCABULARY, shape, device=DEVICE)
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
    peers = {name: stopwatch(step_of(changes)) for name, changes in STEPS.items()}
    seconds = take_turns(peers, options.turns)
    ratios = {
        name: spread([a / b for a, b in zip(each, seconds[QUICKSTART], strict=True)])
        for name, each in seconds.items()
    }
    rows = [
        {"": name, "ms a step": 1e3 * statistics.median(each), "relative": ratios[name]}
        for name, each in seconds.items()
    ]
    publish("objectives", f"A step of the {PRESET}", rows, ratios, TARGETS)


if __name__ == "__main__":
    main()
