"""What the memory is worth on text: the loss of long documents against controls without one.

Each trial trains a small model on Python's standard library, whole modules as documents in windows
of 64 segments of 32 tokens, and differs in its memory alone. The first control has none: it sees
one segment at a time. The second has none either, but segments so much longer that it takes about
as many FLOPs. A seed's trainings start from the same weights and read the same text.

What counts is the loss of held-out documents beyond their first 8 segments, where only a memory can
tell what came before. Every trial scores the same documents; intervals of 95% are over them.
Knocked out is the same trained model with its memory emptied before every segment. A training is a
process with one thread, as many at once as there are cores. With --folder the runs are kept, and
the same command goes on where it was interrupted. Exits with status 1 if the default of this
project does worse than the control.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import Cell, publish, run, spread
from flows.presets import configure
from infini_model.config import Config, dump_config
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.evaluation.long_documents import LongDocuments, find_long_documents, measure
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.subject import Subject
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.cores import available_cores
from infini_model.runtime.metrics_file import read_validation_losses
from infini_model.training.callbacks.flops import flops_per_token

NEAR = 8
SETTINGS: dict[str, Any] = {
    "data": {
        "name": "memory-gain",
        "tokenizer": {"spec": "train", "vocab_size": 2048},
        "splits": {"train": 0.85, "validation": 0.05, "test": 0.1},
    },
    "packing": {"mode": "aligned", "context_length": 2048},
    "model": {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "segment_length": 32,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "training": {"batch_size": 1, "learning_rate": 3e-3, "gate_learning_rate": 3e-2},
    "tracking": {"mlflow": False, "tensorboard": False},
    "evaluation": {"max_windows": 96, "loss_by_position": {"max_documents": 256}},
}
CONTROL, LONGER, DEFAULT = "no memory", "no memory, longer segments", "linear"
TRIALS: dict[str, dict[str, Any]] = {
    CONTROL: {"memory": "none"},
    LONGER: {"memory": "none"},
    DEFAULT: {},
    "delta": {"memory": "delta"},
    "gates at 0": {"gate_start": 0.0},
    "no key shift": {"memory_key_shift": False},
}
USUAL = (CONTROL, LONGER, DEFAULT, "delta")


class Trained(NamedTuple):
    """A trained model, and its losses on the tokens beyond the first segments of the documents.

    Attributes:
        validation: Loss over the windows of the validation split, in nats per token.
        losses: Summed loss of each document in nats, float64 [documents].
        knocked_out: The same with the memory emptied before every segment; None without a memory.
        counts: Tokens of each document, float64 [documents].
        seconds: How long the training took.
    """

    validation: float
    losses: np.ndarray
    knocked_out: np.ndarray | None
    counts: np.ndarray
    seconds: float

    @property
    def loss(self) -> float:
        """The mean loss in nats per token."""
        return float(self.losses.sum() / self.counts.sum())

    def gain_over(self, others: np.ndarray) -> Interval:
        """How much lower the loss per token is than that of `others` on the same documents."""
        return bootstrap((others - self.losses)[:, None], self.counts[:, None])[0]


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_gain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000, help="steps per training")
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(USUAL), metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; else temporary")
    parser.add_argument(
        "overrides", nargs="*", help="overrides of every trial, as model.hidden_size=256"
    )
    return parser.parse_args()


def settings(folder: Path, trial: str, seed: int, options: argparse.Namespace) -> Config:
    """The quickstart with `SETTINGS`, validated at its end alone."""
    steps = options.steps
    config = configure(
        ["quickstart"],
        overrides=[
            SETTINGS,
            {"run": {"output_dir": str(folder), "seed": seed}},
            {"training": {"max_steps": steps}},
            {"logging": {"eval_steps": steps}, "checkpoint": {"save_steps": steps}},
            {"model": TRIALS[DEFAULT if trial == LONGER else trial]},
            *options.overrides,
        ],
    )
    return _lengthened(config) if trial == LONGER else config


def _lengthened(config: Config) -> Config:
    """`config` without a memory, in segments so much longer that the FLOPs are most alike.

    They are at most as long as the text that is not scored, and end where the scored text starts.
    """
    length = config.model.segment_length
    candidates = [
        config.model_copy(update={"model": config.model.model_copy(update=shape)})
        for shape in (
            {"memory": "none", "segment_length": length * times}
            for times in (2, 4, NEAR)
            if config.packing.context_length % (length * times) == 0
        )
    ]
    return min(candidates, key=lambda candidate: abs(_flops(candidate) - _flops(config)))


def _flops(config: Config) -> float:
    """FLOPs of a training step per token; the vocabulary makes no difference between trials."""
    with torch.device("meta"):
        model = InfiniLlama(config.model.model_copy(update={"vocab_size": 1}))
    return flops_per_token(model, config.packing.context_length)


def train(
    folder: Path, dataset: Path, trial: str, seed: int, options: argparse.Namespace
) -> Trained:
    """Train a model, and score the documents."""
    config, began = settings(folder, trial, seed, options), time.monotonic()
    run_dir = folder / f"{trial}-{seed}"
    file = folder / f"{trial}-{seed}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    where = ["--config", str(file), "--dataset", str(dataset), "--run-dir", str(run_dir)]
    run(["-m", "infini_model.training", *where], threads=1)
    seconds = time.monotonic() - began
    print(f"{trial}, seed {seed}: {seconds:.0f} s", file=sys.stderr)
    # A control with longer segments has fewer of them.
    segment = settings(folder, CONTROL, seed, options).model.segment_length
    near = NEAR * segment // config.model.segment_length
    return score(Subject(run_dir, dataset, config), near, seconds)


def score(subject: Subject, near: int, seconds: float) -> Trained:
    """The losses of a model beyond the `near` first segments of the documents."""
    documents = find_long_documents(subject)
    if not isinstance(documents, LongDocuments):
        raise SystemExit(f"no documents to score: the longest has {documents:,} tokens")
    measured = measure(subject, documents)
    far = np.s_[:, near:]
    knocked_out = measured.losses.get("knocked_out")
    return Trained(
        read_validation_losses(subject.run_dir)[subject.position.step],
        measured.losses["fresh"][far].sum(1),
        None if knocked_out is None else knocked_out[far].sum(1),
        measured.counts[far].sum(1),
        seconds,
    )


def train_all(folder: Path, options: argparse.Namespace) -> dict[str, list[Trained]]:
    """All trainings, by trial in the order of the seeds."""
    config = settings(folder, CONTROL, 0, options)
    manifest = build_dataset(download(config.data, folder), config.data, folder)
    dataset = (folder / "datasets" / manifest.folder_name).resolve()
    with ThreadPoolExecutor(available_cores()) as pool:
        jobs = {
            trial: [
                pool.submit(train, folder, dataset, trial, seed, options) for seed in options.seeds
            ]
            for trial in options.only
        }
    return {trial: [job.result() for job in made] for trial, made in jobs.items()}


def tabulate(results: Mapping[str, list[Trained]], seeds: list[int]) -> list[dict[str, Cell]]:
    """A row for each training."""
    rows: list[dict[str, Cell]] = []
    for trial, trained in results.items():
        for seed, ours, control in zip(seeds, trained, results[CONTROL], strict=True):
            out = ours.knocked_out
            rows.append(
                {
                    "": f"{trial}, seed {seed}",
                    "validation loss": f"{ours.validation:.4f}",
                    "loss": f"{ours.loss:.4f}",
                    "gain over no memory": str(ours.gain_over(control.losses)),
                    "gain over itself knocked out": None
                    if out is None
                    else str(ours.gain_over(out)),
                    "documents": len(ours.losses),
                    "seconds": round(ours.seconds),
                }
            )
    return rows


def main() -> None:
    """Run the trials and print the results."""
    options = parse()
    torch.set_num_threads(1)
    options.only = list(dict.fromkeys([CONTROL, *options.only]))
    with tempfile.TemporaryDirectory() as name:
        results = train_all((options.folder or Path(name)).resolve(), options)
    ratios = {
        trial: spread([a.loss / b.loss for a, b in zip(trained, results[CONTROL], strict=True)])
        for trial, trained in results.items()
        if trial != CONTROL
    }
    heading = (
        f"Loss in nats per token beyond the first {NEAR} segments after {options.steps} steps, "
        "and as a ratio of the loss without memory"
    )
    limits = {DEFAULT: 1.0} if DEFAULT in ratios else {}
    publish("memory_gain", heading, tabulate(results, options.seeds), ratios, limits=limits)
    if any(ratios[trial].median > limit for trial, limit in limits.items()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
