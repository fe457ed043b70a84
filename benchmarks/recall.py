"""Whether a model remembers: associative recall across segments, trained from scratch.

Early segments hold pairs of a key and its value amid fillers. The last segment asks for every key,
and what follows a question is a filler, never its answer: the local attention cannot see an answer,
and none can be guessed by elimination. In the rewritten trials each key is written again, with
another value, in a later segment, and the newest value is the answer. Chance is 3%.

Every trial trains the same small Infini-Llama on sequences that begin with two segments and grow up
to 32, then asks it at 8, 16 and 64. Short ones show soonest where to look, long ones that fillers
are to be kept out of the memory. The
controls, which show what happens when one thing is missing, take the first seed alone. One training
is one process with one thread. Ends with status 1 where a figure misses what it needs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import Cell, publish
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.cores import available_cores
from infini_model.training.optimizer import make_optimizer, set_learning_rate

SEGMENT, PAIRS, KEYS, VALUES, FILLERS = 32, 8, 32, 32, 16
SHAPE: dict[str, Any] = {
    "vocab_size": KEYS + VALUES + FILLERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "segment_length": SEGMENT,
    # One by the root of the width, as the default 0.02 is at a width of 2,500. With the default the
    # first keys of so narrow a model are small: all have nearly the same features, and it takes
    # longer until the memory tells them apart.
    "initializer_range": 0.125,
}
STEPS, BATCH = 1500, 8
# No training draws from this seed, and every model is asked the same.
EXAMINATION = 1 << 20
LENGTHS = {f"{segments} segments": segments for segments in (8, 16, 64)}
QUARTER, KNOCKED_OUT, OVER_LINEAR = "worst quarter", "knocked out", "over linear"
COLUMNS = (*LENGTHS, QUARTER, KNOCKED_OUT, OVER_LINEAR, "gate 0", "gate 1", "CPU seconds")
RELATIONS = {"≥": operator.ge, "≤": operator.le, ">": operator.gt}

Figures = dict[str, float]


class Need(NamedTuple):
    """What a figure must be with every seed."""

    relation: str
    percent: float

    def judge(self, figures: Iterable[float]) -> str:
        """The need in words, and `met` or `missed`."""
        met = all(RELATIONS[self.relation](figure, self.percent) for figure in figures)
        return f"{self.relation} {self.percent:g} {'met' if met else 'missed'}"


@dataclass(frozen=True)
class Trial:
    """One way to train.

    Attributes:
        model: What differs from `SHAPE`.
        writings: Segments that each key is written in.
        shortest: Segments of the first training sequences, and of the shortest of all.
        longest: Segments of the longest, which come last.
        gates_learn: Whether the gates do, or stay where they start.
        control: Whether one seed is enough.
        needs: By figure.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    writings: int = 1
    shortest: int = 2
    longest: int = 32
    gates_learn: bool = True
    control: bool = False
    needs: Mapping[str, Need] = field(default_factory=dict)


REMEMBERS = {
    "8 segments": Need("≥", 98),
    "16 segments": Need("≥", 95),
    "64 segments": Need("≥", 90),
    QUARTER: Need("≥", 85),
    KNOCKED_OUT: Need("≤", 10),
}
REWRITES = {"16 segments": Need("≥", 95), OVER_LINEAR: Need(">", 0)}
TRIALS = {
    "linear": Trial(needs=REMEMBERS),
    "no-key-shift": Trial({"memory_key_shift": False}, control=True),
    "gates-frozen": Trial(gates_learn=False, control=True),
    "fixed-length": Trial(shortest=8, longest=8, control=True),
    "small-start": Trial({"initializer_range": 0.02}, control=True),
    "no-memory": Trial({"memory": "none"}, control=True),
    # Two segments to write in and one to ask in are the shortest.
    "rewritten-linear": Trial(writings=2, shortest=3),
    "rewritten-delta": Trial({"memory": "delta"}, writings=2, shortest=3, needs=REWRITES),
}


class Batch(NamedTuple):
    """Sequences of one length.

    Attributes:
        input_ids: [B, T] int64; keys come first in the vocabulary, then values, then fillers.
        labels: [B, T] int64, the answer at each question and -100 elsewhere.
        written: [B, T] int64, at each question the segment that its answer stands in.
    """

    input_ids: Tensor
    labels: Tensor
    written: Tensor


def draw(rows: int, segments: int, writings: int, generator: torch.Generator) -> Batch:
    """Sequences whose last segment asks for `PAIRS` keys, each written in `writings` segments.

    Those are drawn evenly from all but the last, so there must be more than `writings` segments.
    """

    def shuffled(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).argsort(dim=-1)

    row, pair = torch.arange(rows)[:, None], torch.arange(PAIRS)[:, None]
    keys = shuffled(rows, KEYS)[:, :PAIRS]
    values = KEYS + shuffled(rows, PAIRS, VALUES)[..., :writings]
    segment = shuffled(rows, PAIRS, segments - 1)[..., :writings].sort(dim=-1).values
    # Each segment's places are shuffled, and pair i takes the ith: no two pairs meet.
    place = shuffled(rows, segments - 1, SEGMENT // 2)[row[..., None], segment, pair]
    start = segment * SEGMENT + 2 * place
    question = (segments - 1) * SEGMENT + shuffled(rows, SEGMENT)[:, :PAIRS]

    shape = (rows, segments * SEGMENT)
    input_ids = KEYS + VALUES + torch.randint(FILLERS, shape, generator=generator)
    input_ids[row[..., None], start] = keys[..., None].expand_as(start)
    input_ids[row[..., None], start + 1] = values
    input_ids[row, question] = keys
    labels, written = torch.full(shape, -100), torch.full(shape, -100)
    labels[row, question] = values[..., -1]
    written[row, question] = segment[..., -1]
    return Batch(input_ids, labels, written)


def lengths_at(trial: Trial, step: int, steps: int) -> range:
    """How many segments the sequences of a step (1 to `steps`) may have: twice as many again and
    again, at even distances, up to `trial.longest` in the last step."""
    growth = (trial.longest / trial.shortest) ** (step / steps)
    return range(trial.shortest, round(trial.shortest * growth) + 1)


def train(trial: Trial, seed: int, steps: int) -> InfiniLlama:
    """A model that learned from the answers alone; the same one each time."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = InfiniLlama(ModelConfig(**{**SHAPE, **trial.model}))
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            parameter.requires_grad_(trial.gates_learn)
    config = TrainingConfig(
        max_steps=steps,
        learning_rate=6e-3,
        gate_learning_rate=6e-2,
        min_learning_rate_ratio=0.05,
        warmup_steps=50,
        weight_decay=0.0,
    )
    optimizer = make_optimizer(model, config)
    for step in range(1, steps + 1):
        lengths = lengths_at(trial, step, steps)
        segments = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        batch = draw(BATCH, segments, trial.writings, generator)
        asked = batch.labels >= 0
        # Few tokens are questions: `labels` would cost the loss of all.
        answers = model(batch.input_ids).logits[asked]
        functional.cross_entropy(answers, batch.labels[asked]).backward()
        clip_grad_norm_(model.parameters(), config.max_grad_norm)
        set_learning_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad()
    return model


def without_memory(model: InfiniLlama) -> InfiniLlama:
    """The same weights with the memory neither written nor read: the local attention alone."""
    bare = InfiniLlama(model.config.model_copy(update={"memory": "none"}))
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    return bare


@torch.no_grad()
def ask(model: InfiniLlama, segments: int, writings: int, batches: int) -> tuple[Tensor, Tensor]:
    """Whether each answer is right, bool [N], and the quarter of the depth it stands in, [N]."""
    generator = torch.Generator().manual_seed(EXAMINATION + segments)
    right, quarters = [], []
    for _ in range(batches):
        batch = draw(BATCH, segments, writings, generator)
        asked = batch.labels >= 0
        answers = model(batch.input_ids).logits[asked].argmax(dim=-1)
        right.append(answers == batch.labels[asked])
        quarters.append(batch.written[asked] * 4 // (segments - 1))
    return torch.cat(right), torch.cat(quarters)


def percent(right: Tensor) -> float:
    """The share of what is true."""
    return 100.0 * right.double().mean().item()


def examine(model: InfiniLlama, writings: int, batches: int) -> Figures:
    """All that is measured of a trained model, in percent."""
    figures, by_quarter = {}, []
    for length, segments in LENGTHS.items():
        right, quarters = ask(model, segments, writings, batches)
        figures[length] = percent(right)
        by_quarter += [percent(right[quarters == quarter]) for quarter in range(4)]
    figures[QUARTER] = min(by_quarter)
    if model.config.memory != "none":
        right, _ = ask(without_memory(model), LENGTHS["8 segments"], writings, batches)
        figures[KNOCKED_OUT] = percent(right)
    for layer, gates in enumerate(model.gate_statistics()):
        figures[f"gate {layer}"] = 100.0 * gates.mean
    return figures


def run(name: str, seed: int, steps: int, batches: int) -> Figures:
    """Train and examine one model."""
    began = time.process_time()
    trial = TRIALS[name]
    figures = examine(train(trial, seed, steps), trial.writings, batches)
    return {**figures, "CPU seconds": time.process_time() - began}


def run_all(options: argparse.Namespace) -> dict[str, dict[int, Figures]]:
    """Every training that was asked for, in a process each, as many at once as there are cores."""
    seeds = {
        name: options.seeds[:1] if TRIALS[name].control else options.seeds for name in options.only
    }
    results: dict[str, dict[int, Figures]] = {name: {} for name in seeds}
    with ProcessPoolExecutor(
        available_cores(),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        jobs = {
            pool.submit(run, name, seed, options.steps, options.batches): (name, seed)
            # The delta rule takes longest and stands last: begun last, it would leave cores idle.
            for name in reversed(seeds)
            for seed in seeds[name]
        }
        for job in as_completed(jobs):
            name, seed = jobs[job]
            results[name][seed] = job.result()
            print(f"{name}, seed {seed}: done", file=sys.stderr)
    return results


def compare_rules(results: dict[str, dict[int, Figures]]) -> None:
    """How much better than the linear rule the delta rule rewrites at 16 segments, by seed."""
    linear = results.get("rewritten-linear", {})
    for seed, figures in results.get("rewritten-delta", {}).items():
        if seed in linear:
            figures[OVER_LINEAR] = figures["16 segments"] - linear[seed]["16 segments"]


def tabulate(results: Mapping[str, Mapping[int, Figures]]) -> list[dict[str, Cell]]:
    """A row for each training and, below those of a trial, what they need."""
    rows: list[dict[str, Cell]] = []
    for name, by_seed in results.items():
        for seed in sorted(by_seed):
            cells = {column: by_seed[seed].get(column) for column in COLUMNS}
            rows.append({"": f"{name}, seed {seed}", **cells})
        needs = {
            column: need.judge(figures[column] for figures in by_seed.values())
            for column, need in TRIALS[name].needs.items()
            if all(column in figures for figures in by_seed.values())
        }
        if needs:
            rows.append({"": f"{name} needs", **{column: needs.get(column) for column in COLUMNS}})
    return rows


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recall", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    parser.add_argument(
        "--batches",
        type=int,
        default=32,
        help=f"of {BATCH * PAIRS} questions, for each figure",
    )
    return parser.parse_args()


def main() -> None:
    """Run the trials and tell what each remembers."""
    options = parse()
    torch.set_num_threads(1)  # as in the trainings, so that what is told of them is true
    results = run_all(options)
    compare_rules(results)
    rows = tabulate(results)
    heading = (
        f"Answers right, in percent: {PAIRS} pairs in segments of {SEGMENT} tokens, "
        f"{options.steps} steps, {BATCH * PAIRS * options.batches} questions a figure"
    )
    publish("recall", heading, rows, {})
    if any("missed" in str(cell) for row in rows for cell in row.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
