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
process with one thread. Exits with status 1 if a figure misses its target.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import Cell, publish
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.evaluation.retrieval.associations import Questions, Shape, draw
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.cores import available_cores
from infini_model.training.optimizer import make_optimizer, set_learning_rate

SEGMENT, PAIRS = 32, 8
TASK = Shape(SEGMENT, PAIRS)
SHAPE: dict[str, Any] = {
    "vocab_size": TASK.vocabulary.size,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "segment_length": SEGMENT,
    # 1 / sqrt(width), which is the default 0.02 at a width of 2,500. In so narrow a model the
    # default makes the initial keys small, with nearly equal features, and it takes longer until
    # the memory can tell them apart.
    "initializer_range": 0.125,
    "memory": "linear",
    # The task has nothing but the memory to learn, and then this is sooner than the default of -2.
    "gate_start": 0.0,
}
STEPS, BATCH = 1500, 8
# Not used in training; every model gets the same questions.
EXAMINATION = 1 << 20
LENGTHS = {f"{segments} segments": segments for segments in (8, 16, 64)}
MASK = SHAPE["vocab_size"]
QUARTER, KNOCKED_OUT, OVER_LINEAR = "worst quarter", "knocked out", "over linear"
COLUMNS = (*LENGTHS, QUARTER, KNOCKED_OUT, OVER_LINEAR, "gate 0", "gate 1", "CPU seconds")
RELATIONS = {"≥": operator.ge, "≤": operator.le, ">": operator.gt}

Figures = dict[str, float]
Job, Result = TypeVar("Job"), TypeVar("Result")


class Need(NamedTuple):
    """A target that a figure must meet with every seed."""

    relation: str
    percent: float

    def judge(self, figures: Iterable[float]) -> str:
        """The target as text, and `met` or `missed`."""
        met = all(RELATIONS[self.relation](figure, self.percent) for figure in figures)
        return f"{self.relation} {self.percent:g} {'met' if met else 'missed'}"


@dataclass(frozen=True)
class Trial:
    """A training setup.

    Attributes:
        model: Differences from `SHAPE`.
        writings: Number of segments in which each key is written.
        shortest: Segments in the shortest training sequences, which come first.
        longest: Segments in the longest training sequences, which come last.
        gates_learn: Whether the gates are trained.
        control: Whether to use only one seed.
        needs: Targets by figure.
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
RECALLS_MASKED = {"64 segments": Need("≥", 95), KNOCKED_OUT: Need("≤", 10)}
BLOCKS = {"vocab_size": MASK + 1, "mask_token_id": MASK, "bidirectional": True}
BLOCKS_SHIFTED = BLOCKS | {"memory_query_shift": True}
# It has no gates to start.
RESIDUAL = {"memory": "residual", "gate_start": ModelConfig().gate_start}
TRIALS = {
    "linear": Trial(needs=REMEMBERS),
    "residual": Trial(RESIDUAL, needs=REMEMBERS | {"64 segments": Need("≥", 98)}),
    "no-key-shift": Trial({"memory_key_shift": False}, control=True),
    "gates-frozen": Trial(gates_learn=False, control=True),
    "fixed-length": Trial(shortest=8, longest=8, control=True),
    "small-gates": Trial({"gate_start": -2.0}, control=True),
    "small-start": Trial({"initializer_range": 0.02}, control=True),
    "no-memory": Trial({"memory": "none"}, control=True),
    "query-shift": Trial({"memory_query_shift": True}, control=True),
    "block-diffusion": Trial(BLOCKS_SHIFTED, needs=RECALLS_MASKED),
    "block-diffusion-no-query-shift": Trial(BLOCKS, control=True),
    "block-diffusion-no-memory": Trial(BLOCKS_SHIFTED | {"memory": "none"}, control=True),
    # At least two segments to write in and one to ask in.
    "rewritten-linear": Trial(writings=2, shortest=3),
    "rewritten-residual": Trial(RESIDUAL, writings=2, shortest=3),
    "rewritten-delta": Trial({"memory": "delta"}, writings=2, shortest=3, needs=REWRITES),
}


def lengths_at(trial: Trial, step: int, steps: int) -> range:
    """Possible numbers of segments at a step (1 to `steps`); the maximum grows exponentially, up to
    `trial.longest` at the last step."""
    growth = (trial.longest / trial.shortest) ** (step / steps)
    return range(trial.shortest, round(trial.shortest * growth) + 1)


def answers(model: InfiniLlama, batch: Questions) -> Tensor:
    """Logits of the answer to each question, [N, vocab_size]."""
    asked = batch.labels >= 0
    if not model.config.bidirectional:
        logits: Tensor = model(batch.input_ids).logits[asked]
        return logits
    state = None
    if model.config.memory != "none":
        _, state = model.hidden(batch.input_ids[:, :-SEGMENT])
    hidden, _ = model.hidden(batch.input_ids[:, -SEGMENT:], state)
    masked: Tensor = model.lm_head(hidden[asked[:, -SEGMENT:]])
    return masked


def training_config(steps: int) -> TrainingConfig:
    """The optimization of a small model that has to find what it is asked for."""
    return TrainingConfig(
        max_steps=steps,
        learning_rate=6e-3,
        gate_learning_rate=6e-2,
        min_learning_rate_ratio=0.05,
        warmup_steps=50,
        weight_decay=0.0,
    )


def train(trial: Trial, seed: int, steps: int) -> InfiniLlama:
    """Train a model on the answers only; deterministic."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = InfiniLlama(ModelConfig(**{**SHAPE, **trial.model}))
    for name, parameter in model.named_parameters():
        if name.endswith(".gate"):
            parameter.requires_grad_(trial.gates_learn)
    config = training_config(steps)
    optimizer = make_optimizer(model, config)
    for step in range(1, steps + 1):
        lengths = lengths_at(trial, step, steps)
        segments = lengths[int(torch.randint(len(lengths), (), generator=generator))]
        masked = model.config.bidirectional
        batch = draw(TASK, BATCH, segments, trial.writings, generator, masked=masked)
        # Few tokens are questions: `labels` would compute the loss of all tokens.
        right = batch.labels[batch.labels >= 0]
        functional.cross_entropy(answers(model, batch), right).backward()
        clip_grad_norm_(model.parameters(), config.max_grad_norm)
        set_learning_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad()
    return model


def without_memory(model: InfiniLlama) -> InfiniLlama:
    """The same weights without the memory, with local attention only."""
    bare = InfiniLlama(model.config.model_copy(update={"memory": "none"}))
    weights = model.state_dict()
    bare.load_state_dict({name: weights[name] for name in bare.state_dict()})
    return bare


@torch.no_grad()
def ask(model: InfiniLlama, segments: int, writings: int, batches: int) -> tuple[Tensor, Tensor]:
    """Whether each answer is right, bool [N], and the quarter of the sequence it is in, [N]."""
    generator = torch.Generator().manual_seed(EXAMINATION + segments)
    right, quarters = [], []
    for _ in range(batches):
        batch = draw(TASK, BATCH, segments, writings, generator, masked=model.config.bidirectional)
        asked = batch.labels >= 0
        right.append(answers(model, batch).argmax(dim=-1) == batch.labels[asked])
        quarters.append(batch.written[asked] * 4 // (segments - 1))
    return torch.cat(right), torch.cat(quarters)


def percent(right: Tensor) -> float:
    """The percentage of true values."""
    return 100.0 * right.double().mean().item()


def examine(model: InfiniLlama, writings: int, batches: int) -> Figures:
    """All figures of a trained model, in percent."""
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


def in_processes(
    work: Callable[..., Result], jobs: Mapping[Job, tuple[Any, ...]], processes: int
) -> dict[Job, Result]:
    """What `work` gives for the arguments of each job, in processes of one thread each."""
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        submitted = {pool.submit(work, *arguments): job for job, arguments in jobs.items()}
        for future in as_completed(submitted):
            future.result()
            print(f"{submitted[future]}: done", file=sys.stderr)
    return {job: future.result() for future, job in submitted.items()}


def run_all(options: argparse.Namespace) -> dict[str, dict[int, Figures]]:
    """Run the selected trainings."""
    seeds = {
        name: options.seeds[:1] if TRIALS[name].control else options.seeds for name in options.only
    }
    # The delta rule, which is last, takes longest: start it first to keep all cores busy.
    jobs = {
        (name, seed): (name, seed, options.steps, options.batches)
        for name in reversed(seeds)
        for seed in seeds[name]
    }
    found = in_processes(run, jobs, available_cores())
    return {name: {seed: found[name, seed] for seed in seeds[name]} for name in seeds}


def compare_rules(results: dict[str, dict[int, Figures]]) -> None:
    """Add how much the delta rule beats the linear rule when rewritten, at 16 segments, by seed."""
    linear = results.get("rewritten-linear", {})
    for seed, figures in results.get("rewritten-delta", {}).items():
        if seed in linear:
            figures[OVER_LINEAR] = figures["16 segments"] - linear[seed]["16 segments"]


def tabulate(results: Mapping[str, Mapping[int, Figures]]) -> list[dict[str, Cell]]:
    """A row per training and, below those of a trial, its targets."""
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
    parser.add_argument("--steps", type=int, default=STEPS, help="steps per training")
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    parser.add_argument(
        "--batches",
        type=int,
        default=32,
        help=f"batches of {BATCH * PAIRS} questions per figure",
    )
    return parser.parse_args()


def main() -> None:
    """Run the trials and print the results."""
    options = parse()
    torch.set_num_threads(1)  # as in the trainings, so that the reported setting is theirs
    results = run_all(options)
    compare_rules(results)
    rows = tabulate(results)
    heading = (
        f"Correct answers in percent: {PAIRS} pairs in segments of {SEGMENT} tokens, "
        f"{options.steps} steps, {BATCH * PAIRS * options.batches} questions per figure"
    )
    publish("recall", heading, rows, {})
    if any("missed" in str(cell) for row in rows for cell in row.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
