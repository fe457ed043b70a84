"""Pass keys far beyond the trained length: does the memory keep one thing among much else?

A small Infini-Llama is trained on the haystacks of the evaluation task `passkey`: a number is
hidden in random sentences and asked for at the end. The sequences grow from two segments to 32
until half of the training is over, and the loss is that of the answers alone. Then it is asked at
32 segments, and at 4 and 16 times as many, with the needle at every depth in steps of 5%. As a
control, the same weights are asked without the memory.

A word is a token, and so is each group of two digits, as large tokenizers group them. Each training
is a process with one thread. Exits with status 1 if a cell of the grid misses its target.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.recall_training import OPTIMIZATION, SEGMENT, SHAPE, processes, without_memory
from benchmarks.report import Cell, publish
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.evaluation.plots import plot_heat_map
from infini_model.evaluation.tasks.passkey import (
    RANDOM,
    Haystacks,
    ask,
    build,
    pass_key,
    random_sentences,
)
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.machine import available_cores
from infini_model.training.optimizer import make_optimizer, set_learning_rate

DIGITS = 5
SHORTEST, LONGEST = 2, 32
# Segments at which it is asked, and those of them at which every cell must reach the target.
ASKED, JUDGED = (32, 128, 512), (32, 128)
TARGET = 95.0
DEPTHS = [5.0 * step for step in range(21)]
STEPS = 3000
# A step reads so many segments, and at least so many sequences: short ones have few answers each.
SEGMENTS_PER_STEP, SEQUENCES = 128, 8
# Not used in training; every model gets the same questions.
EXAMINATION = 1 << 20

PIECE = re.compile(r"\d\d?|\w+|[^\w\s]")
TEXT = " ".join([*RANDOM, " The pass key is. Remember it. What is the pass key?"])
WORDS = sorted({*PIECE.findall(TEXT), *map(str, range(10)), *(f"{n:02}" for n in range(100))})
NUMBERS = {word: number for number, word in enumerate(WORDS)}


def encode(text: str) -> list[int]:
    """The tokens of the haystacks' words."""
    return [NUMBERS[word] for word in PIECE.findall(text)]


SENTENCES = [encode(sentence) for sentence in RANDOM]


class Outcome(NamedTuple):
    """What one training gave.

    Attributes:
        right: Percent of right answers by number of segments, by depth: each [len(DEPTHS)].
        knocked_out: Percent of right answers at the fewest segments without the memory.
        read_weights: Mean strength of the reads by layer, in percent.
        train_seconds: CPU seconds of the training.
        seconds: CPU seconds of all.
    """

    right: dict[int, list[float]]
    knocked_out: float
    read_weights: list[float]
    train_seconds: float
    seconds: float


def draw(rng: np.random.Generator, segments: int, depths: Sequence[float]) -> Haystacks:
    """Haystacks of a pass key each, at `depths` in percent."""
    length = segments * SEGMENT
    fillers = [random_sentences(SENTENCES, rng, length) for _ in depths]
    keys = rng.integers(10 ** (DIGITS - 1), 10**DIGITS, len(depths))
    needles = [[pass_key(encode, key)] for key in keys]
    return build(fillers, needles, [[depth / 100] for depth in depths], length)


def answers(model: InfiniLlama, haystacks: Haystacks) -> Tensor:
    """Logits of the answers' tokens, [N, A, vocab_size]."""
    _, question, answer = (each.flatten(1) for each in haystacks)
    hidden = model.hidden(torch.cat((haystacks.bodies, question, answer), 1))
    logits: Tensor = model.lm_head(hidden[:, -answer.size(1) - 1 : -1])
    return logits


def train(seed: int, steps: int, memory: str) -> InfiniLlama:
    """Train a model on the answers only; deterministic."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    start = {} if memory == "residual" else {"read_weight_start": 0.0}
    model = InfiniLlama(ModelConfig(vocab_size=len(WORDS), memory=memory, **start, **SHAPE))
    config = TrainingConfig(max_steps=steps, **OPTIMIZATION)
    optimizer = make_optimizer(model, config)
    for step in range(1, steps + 1):
        # The second half has sequences of all lengths: they teach to keep fillers out.
        growth = (LONGEST / SHORTEST) ** min(2 * step / steps, 1.0)
        segments = int(rng.integers(SHORTEST, round(SHORTEST * growth) + 1))
        rows = max(SEQUENCES, SEGMENTS_PER_STEP // segments)
        # The ends, 0 and 100%, are as frequent as any step of 5%.
        haystacks = draw(rng, segments, rng.uniform(-5, 105, rows).clip(0, 100).tolist())
        logits = answers(model, haystacks).flatten(0, 1)
        functional.cross_entropy(logits, haystacks.answers.flatten()).backward()
        clip_grad_norm_(model.parameters(), config.max_grad_norm)
        set_learning_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad()
    return model


def examine(model: InfiniLlama, segments: int, trials: int) -> list[float]:
    """The percentage of right answers at each depth."""
    shares = []
    for number, depth in enumerate(DEPTHS):
        rng = np.random.default_rng((EXAMINATION, segments, number))
        right, tokens = ask(model, draw(rng, segments, [depth] * trials), SEQUENCES)
        shares.append(100.0 * (right == tokens).double().mean().item())
    return shares


def run(seed: int, steps: int, memory: str, trials: int) -> Outcome:
    """Train and examine one model."""
    began = time.process_time()
    model = train(seed, steps, memory)
    trained = time.process_time()
    right = {segments: examine(model, segments, trials) for segments in ASKED}
    knocked_out = float(np.mean(examine(without_memory(model), ASKED[0], trials)))
    read_weights = [100.0 * heads.mean().item() for heads in model.read_strengths()]
    return Outcome(right, knocked_out, read_weights, trained - began, time.process_time() - began)


def tabulate(outcomes: Mapping[int, Outcome]) -> list[dict[str, Cell]]:
    """A row per seed, and one of targets."""
    rows: list[dict[str, Cell]] = []
    for seed, outcome in outcomes.items():
        row: dict[str, Cell] = {"": f"seed {seed}"}
        for segments, right in outcome.right.items():
            row[f"{segments} segments"] = float(np.mean(right))
            row[f"worst of {segments}"] = min(right)
        row["no memory"] = outcome.knocked_out
        row |= {f"read weight {layer}": each for layer, each in enumerate(outcome.read_weights)}
        row |= {"training, CPU s": outcome.train_seconds, "all, CPU s": outcome.seconds}
        rows.append(row)
    needs = dict.fromkeys(rows[0], None) | {"": "needs"}
    for segments in JUDGED:
        met = all(min(outcome.right[segments]) >= TARGET for outcome in outcomes.values())
        needs[f"worst of {segments}"] = f"≥ {TARGET:g} {'met' if met else 'missed'}"
    return [*rows, needs]


def by_depth(outcomes: Mapping[int, Outcome]) -> np.ndarray:
    """The share of right answers over all seeds, [len(DEPTHS), len(ASKED)]."""
    grids = [[outcome.right[segments] for segments in ASKED] for outcome in outcomes.values()]
    mean: np.ndarray = np.mean(grids, axis=0).T / 100
    return mean


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passkey", description=__doc__)
    parser.add_argument("--memory", choices=("linear", "delta", "residual"), default="residual")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per training")
    parser.add_argument("--trials", type=int, default=40, help="answers per cell and seed")
    parser.add_argument("--processes", type=int, default=available_cores(), help="at once")
    parser.add_argument("--heat-map", type=Path, help="picture of the grid over all seeds")
    return parser.parse_args()


def main() -> None:
    """Run the trainings and print the results."""
    options = parse()
    torch.set_num_threads(1)  # as in the trainings, so that the reported setting is theirs
    shared = (options.steps, options.memory, options.trials)
    with processes(options.processes) as pool:
        running = {seed: pool.submit(run, seed, *shared) for seed in options.seeds}
        outcomes = {seed: future.result() for seed, future in running.items()}
    rows = tabulate(outcomes)
    grid = by_depth(outcomes)
    if options.heat_map is not None:
        plot_heat_map(
            grid,
            [f"{segments} segments\n{segments * SEGMENT:,} tokens" for segments in ASKED],
            DEPTHS,
            options.heat_map,
            title="Pass keys found",
            trained=sum(segments <= LONGEST for segments in ASKED),
        )
    rows += [
        dict.fromkeys(rows[0], None)
        | {"": f"depth {depth:g}%"}
        | {
            f"{segments} segments": 100.0 * float(share)
            for segments, share in zip(ASKED, shares, strict=True)
        }
        for depth, shares in zip(DEPTHS, grid, strict=True)
    ]
    heading = (
        f"Pass keys of {DIGITS} digits found, in percent: segments of {SEGMENT} tokens, trained on "
        f"at most {LONGEST} segments in {options.steps} steps, memory {options.memory}, "
        f"{options.trials} answers per depth and seed; the depths are means over the seeds"
    )
    publish("passkey", heading, rows, {})
    if any("missed" in str(cell) for row in rows for cell in row.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
