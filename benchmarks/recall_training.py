"""Small models trained by the project's own loop, on sequences that are drawn as they are read.

`packing.context_schedule` makes the windows of a dataset grow. They say how many sequences a step
reads, and how long they are; what is in these, and which answers count, a task draws in their
place.
"""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from infini_model.config import Config
from infini_model.data.build import build_dataset
from infini_model.data.loading.windows import Batch
from infini_model.data.sources.listing import list_sources
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.objectives import make_objective
from infini_model.objectives.objective import Inputs, Reduction
from infini_model.runtime.runs import MODEL
from infini_model.training import setup
from infini_model.training.train import train as run_training

SEGMENT, WIDTH = 32, 64
SEGMENTS_PER_STEP = 128
# Segments of the training sequences, for an equal share of the steps each.
GROWING = (2, 4, 8, 16, 32)
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "segment_length": SEGMENT,
    # 1 / sqrt(width), which is the default 0.02 at a width of 2,500. In so narrow a model the
    # default makes the initial keys small, with nearly equal features, and it takes longer until
    # the memory can tell them apart.
    "initializer_range": WIDTH**-0.5,
}
# A small model has to find what it is asked for.
OPTIMIZATION: dict[str, Any] = {
    "learning_rate": 6e-3,
    "memory_learning_rate": 6e-2,
    "min_learning_rate_ratio": 0.05,
    "warmup_steps": 50,
    "weight_decay": 0.0,
}

# Draws sequences of so many rows and segments: their tokens and, where there is one, the target of
# each position, both int64 [rows, tokens].
Draw: TypeAlias = Callable[[np.random.Generator, int, int], tuple[Tensor, Tensor]]


class Drawn:
    """The objective of `config` on sequences that are drawn in place of the windows of a batch."""

    def __init__(self, draw: Draw, config: Config) -> None:
        self._draw, self._seed, self._asked = draw, config.run.seed, make_objective(config)

    def inputs(self, batch: Batch) -> Inputs:
        """As many sequences as windows, and as long; the key of the first one decides them all."""
        rows, _, length = batch.tokens.shape
        rng = np.random.default_rng((self._seed, int(batch.noise_keys[0])))
        input_ids, labels = self._draw(rng, rows, length // SEGMENT)
        return Inputs(input_ids, labels, None, labels != IGNORED)

    def loss(self, model: InfiniLlama, inputs: Inputs, reduction: Reduction) -> Tensor:
        """That of the answers."""
        return self._asked.loss(model, inputs, reduction)


def settings(
    model: Mapping[str, Any], seed: int, steps: int, lengths: Sequence[int], text: Path
) -> Config:
    """Those of a training whose sequences have `lengths` segments, one after the other."""
    longest, count = lengths[-1], len(lengths)
    objective = "block_diffusion" if "mask_token_id" in model else "causal"
    batches = {"objective": objective, "batch_size": SEGMENTS_PER_STEP // longest}
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "data": {
                "source": {"paths": [str(text)]},
                "splits": {"train": 1.0, "validation": 0.0, "test": 0.0},
            },
            "packing": {
                "context_length": longest * SEGMENT,
                "context_schedule": {number / count: each for number, each in enumerate(lengths)},
            },
            "model": {**SHAPE, **model},
            "training": {**OPTIMIZATION, "max_steps": steps, **batches},
            "launch": {"gpus": "cpu"},
            "tracking": {"mlflow": False, "tensorboard": False},
            "logging": {"logging_steps": steps},
            "checkpoint": {"save_steps": steps},
        }
    )


def train(
    draw: Draw, model: Mapping[str, Any], seed: int, steps: int, lengths: Sequence[int] = GROWING
) -> InfiniLlama:
    """Train a model that differs from `SHAPE` by `model`; deterministic."""
    # Once the loss is next to nothing, the smallest noise is reported as a spike.
    logging.getLogger("infini_model").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        folder, text = Path(name), Path(name, "text.txt")
        # The tokens of a step; nobody reads what they are.
        text.write_text("." * (SEGMENTS_PER_STEP * SEGMENT + 1))
        config = settings(model, seed, steps, lengths, text)
        build_dataset(list_sources(config.data, folder), config.data, folder / "datasets")
        with mock.patch.object(setup, "make_objective", partial(Drawn, draw)):
            outcome = run_training(config, folder / "datasets" / "latest", folder / "run")
        if outcome.stopped_by is not None:
            raise InterruptedError(f"stopped by signal {outcome.stopped_by}")
        return InfiniLlama.from_pretrained(folder / "run" / MODEL)


def without_memory(model: InfiniLlama) -> InfiniLlama:
    """The same weights without the memory, with local attention only."""
    bare = InfiniLlama(model.config.updated(memory="none"))
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    return bare


def processes(count: int) -> ProcessPoolExecutor:
    """Processes of one thread each."""
    return ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
