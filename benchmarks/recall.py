"""Associative recall across segments, trained from scratch: does the memory work?

Early segments hold key-value pairs among fillers. The last segment asks for every key, and a filler
follows each question, never its answer: the local attention cannot see an answer, and none can be
guessed by elimination. In the rewritten trials each key is written again in a later segment with
another value, and the newest value is the answer. Chance is 3%.

In the trials of block diffusion the answer itself, a masked token, follows each question, and the
last segment is bidirectional. It reads the memory of the clean segments before it, as a noisy
segment does in training.

Every trial trains the same small Infini-Llama on sequences that grow from two segments to 32, then
tests it at 8, 16 and 64. Short sequences teach where to look, long ones to keep fillers out of the
memory. The controls, each with one thing removed, use only the first seed. Each training is a
process with one thread; those that are finished are lines of --results, and are not run again.
Exits with status 1 if a figure misses its target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.finished_runs import FinishedRuns
from benchmarks.recall_training import (
    GROWING,
    OPTIMIZATION,
    SEGMENT,
    SEGMENTS_PER_STEP,
    SHAPE,
    processes,
    train,
    without_memory,
)
from benchmarks.report import Cell, publish
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.machine import available_cores
from infini_model.runtime.storage import content_key

PAIRS = 8
# Tokens of each kind, in the order of their numbers; a masked one, if there is one, is the next.
KEYS, VALUES, FILLERS = 32, 32, 16
VOCABULARY = KEYS + VALUES + FILLERS
STEPS, BATCH = 1500, 8
# Not used in training; every model gets the same questions.
EXAMINATION = 1 << 20
LENGTHS = {f"{segments} segments": segments for segments in (8, 16, 64)}
QUARTER, KNOCKED_OUT = "worst quarter", "knocked out"
COLUMNS = (*LENGTHS, QUARTER, KNOCKED_OUT, "read weight 0", "read weight 1", "CPU seconds")

Figures = dict[str, float]


@dataclass(frozen=True)
class Setup:
    """A training setup.

    Attributes:
        model: Settings of the model.
        writings: Number of segments in which each key is written.
        lengths: Segments of the training sequences, one after the other.
        control: Whether to use only one seed.
        needs: Targets by figure, which every seed must meet; see `judge`.
    """

    model: Mapping[str, Any]
    writings: int = 1
    lengths: Sequence[int] = GROWING
    control: bool = False
    needs: Mapping[str, float] = field(default_factory=dict)


class Questions(NamedTuple):
    """Sequences of one length.

    Attributes:
        input_ids: [B, T] int64.
        labels: [B, T] int64, the answer at each question, or at the masked token after it, and -100
            elsewhere.
        written: [B, T] int64, the segment of each answer in its place.
    """

    input_ids: Tensor
    labels: Tensor
    written: Tensor


class Trial(NamedTuple):
    """What is trained."""

    setup: str
    seed: int


REMEMBERS = {"8 segments": 98, "16 segments": 95, "64 segments": 90, QUARTER: 85, KNOCKED_OUT: 10}
# The task has nothing but the memory to learn, and then this is sooner than the default of -2.
LINEAR = {"memory": "linear", "read_weight_start": 0.0}
DELTA, RESIDUAL = LINEAR | {"memory": "delta"}, {"memory": "residual"}
BLOCKS = LINEAR | {"mask_token_id": VOCABULARY}
# At least two segments to write in and one to ask in.
REWRITTEN: dict[str, Any] = {"writings": 2, "lengths": GROWING[1:]}
SETUPS = {
    "linear": Setup(LINEAR, needs=REMEMBERS),
    "residual": Setup(RESIDUAL, needs=REMEMBERS | {"64 segments": 98}),
    "no-key-shift": Setup(LINEAR | {"memory_key_shift": False}, control=True),
    "fixed-length": Setup(LINEAR, lengths=(8,), control=True),
    "small-read-weight": Setup(LINEAR | {"read_weight_start": -2.0}, control=True),
    "small-start": Setup(LINEAR | {"initializer_range": 0.02}, control=True),
    "no-memory": Setup({"memory": "none"}, control=True),
    "query-shift": Setup(LINEAR | {"memory_query_shift": True}, control=True),
    "block-diffusion": Setup(BLOCKS, needs={"64 segments": 95, KNOCKED_OUT: 10}),
    "block-diffusion-no-query-shift": Setup(BLOCKS | {"memory_query_shift": False}, control=True),
    "rewritten-linear": Setup(LINEAR, **REWRITTEN),
    "rewritten-residual": Setup(RESIDUAL, **REWRITTEN),
    "rewritten-delta": Setup(DELTA, **REWRITTEN, needs={"16 segments": 95}),
}


def draw(
    rows: int,
    segments: int,
    writings: int,
    generator: torch.Generator,
    *,
    masked: bool = False,
) -> Questions:
    """Sequences whose last segment asks for all keys, each written in `writings` segments.

    They are drawn uniformly from all but the last, so there must be more than `writings` segments;
    the newest value is the answer. With `masked`, a masked token follows each question.
    """

    def shuffled(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator).argsort(dim=-1)

    row, pair = torch.arange(rows)[:, None], torch.arange(PAIRS)[:, None]
    keys = shuffled(rows, KEYS)[:, :PAIRS]
    values = KEYS + shuffled(rows, PAIRS, VALUES)[..., :writings]
    segment = shuffled(rows, PAIRS, segments - 1)[..., :writings].sort(dim=-1).values
    # Each segment's places are shuffled and pair i takes the ith, so no two pairs overlap.
    place = shuffled(rows, segments - 1, SEGMENT // 2)[row[..., None], segment, pair]
    start = segment * SEGMENT + 2 * place
    step = 2 if masked else 1
    question = (segments - 1) * SEGMENT + step * shuffled(rows, SEGMENT // step)[:, :PAIRS]

    sizes = (rows, segments * SEGMENT)
    input_ids = KEYS + VALUES + torch.randint(FILLERS, sizes, generator=generator)
    input_ids[row[..., None], start] = keys[..., None].expand_as(start)
    input_ids[row[..., None], start + 1] = values
    input_ids[row, question] = keys
    if masked:
        question += 1
        input_ids[row, question] = VOCABULARY
    labels, written = torch.full(sizes, -100), torch.full(sizes, -100)
    labels[row, question] = values[..., -1]
    written[row, question] = segment[..., -1]
    return Questions(input_ids, labels, written)


def answers(model: InfiniLlama, batch: Questions) -> Tensor:
    """Logits of the answer to each question, [N, vocab_size]."""
    past, no_memory = batch.input_ids[:, :-SEGMENT], model.config.memory == "none"
    state = None if no_memory else model.extend(past, None)[1]
    hidden, _ = model.extend(batch.input_ids[:, -SEGMENT:], state)
    logits: Tensor = model.lm_head(hidden[batch.labels[:, -SEGMENT:] >= 0])
    return logits


@torch.no_grad()
def ask(model: InfiniLlama, segments: int, writings: int, batches: int) -> tuple[Tensor, Tensor]:
    """100 for each right answer, else 0, [N], and the quarter of the sequence it is in, [N]."""
    generator = torch.Generator().manual_seed(EXAMINATION + segments)
    right, quarters = [], []
    for _ in range(batches):
        batch = draw(BATCH, segments, writings, generator, masked=model.config.bidirectional)
        asked = batch.labels >= 0
        right.append(answers(model, batch).argmax(dim=-1) == batch.labels[asked])
        quarters.append(batch.written[asked] * 4 // (segments - 1))
    return 100.0 * torch.cat(right), torch.cat(quarters)


def examine(model: InfiniLlama, writings: int, batches: int) -> Figures:
    """All figures of a trained model, in percent."""
    figures, by_quarter = {}, []
    for length, segments in LENGTHS.items():
        right, quarters = ask(model, segments, writings, batches)
        figures[length] = right.mean().item()
        by_quarter += [right[quarters == quarter].mean().item() for quarter in range(4)]
    figures[QUARTER] = min(by_quarter)
    if model.config.memory != "none":
        right, _ = ask(without_memory(model), LENGTHS["8 segments"], writings, batches)
        figures[KNOCKED_OUT] = right.mean().item()
    for layer, heads in enumerate(model.read_strengths()):
        figures[f"read weight {layer}"] = 100.0 * heads.mean().item()
    return figures


def run(name: str, seed: int, steps: int, batches: int) -> Figures:
    """Train and examine one model."""
    began, setup = time.process_time(), SETUPS[name]

    def drawn(rng: np.random.Generator, rows: int, segments: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(int(rng.integers(1 << 62)))
        masked = "mask_token_id" in setup.model
        batch = draw(rows, segments, setup.writings, generator, masked=masked)
        return batch.input_ids, batch.labels

    model = train(drawn, setup.model, seed, steps, setup.lengths)
    figures = examine(model, setup.writings, batches)
    return {**figures, "CPU seconds": time.process_time() - began}


def run_all(options: argparse.Namespace) -> dict[str, dict[int, Figures]]:
    """Run the selected trainings that are not in the file of results."""
    seeds = {
        name: options.seeds[:1] if SETUPS[name].control else options.seeds for name in options.only
    }
    runs, sizes = FinishedRuns(options.results, Trial), (options.steps, options.batches)
    common = [SHAPE, OPTIMIZATION, SEGMENTS_PER_STEP, GROWING, *sizes]
    key = content_key(common)[:12]
    trials = [Trial(name, seed) for name in seeds for seed in seeds[name]]
    with processes(options.processes) as pool:
        runs.complete(key, trials, lambda trial: pool.submit(run, *trial, *sizes).result())
    done = runs.of(key)
    return {name: {seed: done[Trial(name, seed)] for seed in seeds[name]} for name in seeds}


def judge(column: str, needed: float, figures: Iterable[float]) -> str:
    """A target as text, and `met` or `missed`: the most without the memory, the least otherwise."""
    above = column != KNOCKED_OUT
    met = min(figures) >= needed if above else max(figures) <= needed
    return f"{'≥' if above else '≤'} {needed:g} {'met' if met else 'missed'}"


def tabulate(results: Mapping[str, Mapping[int, Figures]]) -> list[dict[str, Cell]]:
    """A row per training and, below those of a setup, its targets."""
    rows: list[dict[str, Cell]] = []
    for name, by_seed in results.items():
        for seed in sorted(by_seed):
            cells = {column: by_seed[seed].get(column) for column in COLUMNS}
            rows.append({"": f"{name}, seed {seed}", **cells})
        needs = {
            column: judge(column, needed, [figures[column] for figures in by_seed.values()])
            for column, needed in SETUPS[name].needs.items()
        }
        if needs:
            rows.append({"": f"{name} needs", **{column: needs.get(column) for column in COLUMNS}})
    return rows


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per training")
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS), metavar="NAME")
    batches = f"batches of {BATCH * PAIRS} questions per figure"
    parser.add_argument("--batches", type=int, default=32, help=batches)
    parser.add_argument("--processes", type=int, default=available_cores(), help="at once")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "recall.jsonl"
    )
    return parser.parse_args()


def main() -> None:
    """Run the trials and print the results."""
    options = parse()
    torch.set_num_threads(1)  # as in the trainings, so that the reported setting is theirs
    rows = tabulate(run_all(options))
    heading = (
        f"Correct answers in percent: {PAIRS} pairs in segments of {SEGMENT} tokens, "
        f"{options.steps} steps, {BATCH * PAIRS * options.batches} questions per figure"
    )
    publish("recall", heading, rows, {})
    if any("missed" in str(cell) for row in rows for cell in row.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
