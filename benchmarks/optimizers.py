"""Muon beside AdamW: the loss after as many tokens, each at its best learning rate.

The runs are those of the preset quickstart and differ in `training.optimizer` and
`training.learning_rate` alone. With the first of --seeds each optimizer is trained at all --rates,
with the others at the best of them. A step is of 2,048 tokens, so that --steps 4883 is 10 million.
The corpus is `code`, the standard library, or `text`, manuals of Debian packages.

A run of 500 steps takes two to four minutes on a free core, and there are as many at once as there
are cores. Each one that is finished is a line of --results, and is not run again. --show prints
what the results hold, and trains nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.finished_runs import FinishedRuns
from benchmarks.memory_trial import common_key, folder_name
from benchmarks.natural_text import natural_text
from benchmarks.report import Cell, Ratio, environment, publish, run, spread
from flows.presets import configure
from infini_model.config import Config, dump_config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import list_sources
from infini_model.runtime.metrics_file import read_metrics, read_newest

OPTIMIZERS = ("adamw", "muon")


class Trial(NamedTuple):
    """One run."""

    corpus: str
    steps: int
    optimizer: str
    rate: float
    seed: int


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--corpus", choices=("code", "text"), default="code")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3, 1.2e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--show", action="store_true", help="print the results, train nothing")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "optimizers.jsonl"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs", "optimizers"))
    parser.add_argument("overrides", nargs="*", help="settings of every run")
    return parser.parse_args()


def settings(options: argparse.Namespace, trial: Trial | None = None) -> Config:
    """Return the settings of the quickstart, with what a trial sets."""
    overrides: list[Any] = [
        {"run": {"output_dir": str(options.folder)}, "data": {"name": options.corpus}},
        {"tracking": {"mlflow": False, "tensorboard": False}},
    ]
    if options.corpus == "text":
        text = str(natural_text(options.folder / "text"))
        overrides.append({"data": {"source": {"paths": [text]}}})
    if trial is not None:
        overrides.append(
            {
                "run": {"seed": trial.seed},
                "training": {
                    "optimizer": trial.optimizer,
                    "learning_rate": trial.rate,
                    "max_steps": trial.steps,
                },
                "logging": {"eval_steps": trial.steps},
            }
        )
    return configure(["quickstart"], overrides=[*overrides, *options.overrides])


def perform(options: argparse.Namespace, runs: FinishedRuns[Trial]) -> None:
    """Train what is missing."""
    config = settings(options)
    manifest = build_dataset(
        list_sources(config.data, options.folder), config.data, options.folder / "datasets"
    )
    dataset = options.folder / "datasets" / manifest.folder_name
    key = common_key(config, dataset)
    first, *others = options.seeds

    def perform_one(trial: Trial) -> dict[str, Any]:
        run_dir = options.folder / folder_name(trial, key)
        file = options.folder / f"{run_dir.name}.yaml"
        file.write_text(dump_config(settings(options, trial)), encoding="utf-8")
        where = [f"--config={file}", f"--dataset={dataset}", f"--run-dir={run_dir}"]
        run(["-m", "infini_model.training", *where], threads=1)
        seconds = [line.get("train/step_seconds", math.nan) for line in read_metrics(run_dir)]
        about = environment()
        return {
            "loss": read_newest(run_dir, "validation/loss")["validation/loss"],
            "step_seconds": round(float(np.nanmedian(seconds)), 4),
            "cpu": about["machine"]["cpu"],
            "torch": about["versions"]["torch"],
            "commit": about["commit"],
        }

    usual = Trial(options.corpus, options.steps, "adamw", 0.0, first)
    trials = [
        usual._replace(optimizer=optimizer, rate=rate)
        for optimizer in OPTIMIZERS
        for rate in options.rates
    ]
    runs.complete(key, trials, perform_one)
    done = runs.of(key)
    best = [
        min((each for each in trials if each.optimizer == optimizer), key=lambda t: done[t]["loss"])
        for optimizer in OPTIMIZERS
    ]
    again = [trial._replace(seed=seed) for seed in others for trial in best]
    runs.complete(key, again, perform_one)


def tabulate(done: dict[Trial, dict[str, Any]]) -> Iterator[tuple[dict[str, Cell], Ratio | None]]:
    """Yield a row for each optimizer and rate; of the best of muon, the ratio to that of adamw."""
    groups: dict[Trial, dict[int, dict[str, Any]]] = {}
    for trial, result in done.items():
        groups.setdefault(trial._replace(seed=0), {})[trial.seed] = result
    best: dict[tuple[str, int, str], Trial] = {}
    for group, results in groups.items():
        rival = best.setdefault(group[:3], group)
        # The rate with which all seeds were trained is the best with the first.
        if len(results) > len(groups[rival]):
            best[group[:3]] = group
    for group in sorted(groups):
        results, ratio = groups[group], None
        peer = best.get((group.corpus, group.steps, "adamw"))
        if group.optimizer == "muon" and group == best[group[:3]] and peer is not None:
            pairs = [(results[s], groups[peer][s]) for s in results if s in groups[peer]]
            ratio = spread([ours["loss"] / theirs["loss"] for ours, theirs in pairs])
        row: dict[str, Cell] = {
            "": f"{group.corpus}, {group.steps:,} steps, {group.optimizer}, {group.rate:g}",
            "seeds": ", ".join(map(str, results)),
            "validation loss": ", ".join(f"{each['loss']:.3f}" for each in results.values()),
            "ms a step": 1000 * float(np.median([r["step_seconds"] for r in results.values()])),
        }
        yield row, ratio


def main() -> None:
    """Train what is missing, and print the results."""
    options = parse()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    runs = FinishedRuns(options.results, Trial)
    if not options.show:
        perform(options, runs)
    if not runs.keys():
        raise SystemExit("no finished runs")
    rows, ratios = [], {}
    for key in runs.keys():  # noqa: SIM118 - it is no mapping
        for row, ratio in tabulate(runs.of(key)):
            rows.append(row)
            if ratio is not None:
                ratios[str(row[""])] = ratio
    heading = "Validation loss in nats per token, and as a ratio of that of adamw at its best rate"
    publish("optimizers", heading, rows, ratios, limits=dict.fromkeys(ratios, 1.0))


if __name__ == "__main__":
    main()
