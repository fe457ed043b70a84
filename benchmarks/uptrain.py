"""What cutting a pretrained Llama into segments costs, and how much of it a memory brings back.

A small Llama is trained with plain attention over windows of 16 segments on the standard library,
and exported. Its weights are scored as they are, cut into segments of 32 tokens without a memory,
and with a sliding window. Between the first two losses beyond the 8th segment lies what cutting
costs. Then it is trained further by several recipes:

- all weights, without a memory: what further training alone brings back;
- all weights, or LoRA alone, with a sliding window whose state is as large as the memory's;
- all weights, or LoRA alone, with a residual memory.

The adapters are of all linear layers, and the memory's own parameters are always trained. Each
finished run is a line of --results, and is not run again. Intervals of 95% are over documents, of
losses that are averaged over the seeds, which differ in the order of the windows.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.finished_runs import FinishedRuns
from benchmarks.memory_forms import FORMS
from benchmarks.memory_gain import SETTINGS, first_segment, losses
from benchmarks.memory_trial import NEAR, common_key, folder_name, train_and_score
from benchmarks.report import Cell, Ratio, publish, spread
from flows.presets import configure
from infini_model.config import Config
from infini_model.data.build import build_dataset
from infini_model.data.sources.listing import download
from infini_model.evaluation.statistics import bootstrap
from infini_model.runtime.runs import MODEL

# Scored as trained with plain attention, without training in the forms that others begin from.
UNCUT, CUT, NARROWED = "uncut", "cut", "window, untrained"
UNTRAINED = {CUT: "none", NARROWED: "window"}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WINDOWS: dict[str, Any] = {
    "packing": {"context_length": 512},
    "training": {"batch_size": 4},
    "evaluation": {"loss_by_position": {"max_documents": 256}},
}
FULL: dict[str, Any] = {"training": {"learning_rate": 1e-3}}
LORA: dict[str, Any] = {
    "training": {"learning_rate": 3e-3, "lora": {"r": 16, "target_modules": ALL}}
}


class Recipe(NamedTuple):
    """A form of attention, and the settings of the training."""

    form: str
    settings: dict[str, Any]


RECIPES = {
    "none, all weights": Recipe("none", FULL),
    "window, all weights": Recipe("window", FULL),
    "window, LoRA": Recipe("window", LORA),
    "residual, all weights": Recipe("residual", FULL),
    "residual, LoRA": Recipe("residual", LORA),
}


class Trial(NamedTuple):
    """A recipe's training; of the two models that it starts from, `steps` are those before."""

    recipe: str
    steps: int
    seed: int


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uptrain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES), metavar="NAME")
    parser.add_argument("--pretraining-steps", type=int, default=4800)
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "uptrain.jsonl"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs", "uptrain"))
    parser.add_argument("overrides", nargs="*", help="settings of every run")
    return parser.parse_args()


def settings(options: argparse.Namespace, *changes: dict[str, Any]) -> Config:
    """The settings of a training of `benchmarks.memory_gain` in shorter windows, with `changes`."""
    where = {"run": {"output_dir": str(options.folder)}, "data": {"name": "code"}}
    return configure(
        ["quickstart"], overrides=[SETTINGS, WINDOWS, where, *changes, *options.overrides]
    )


def pretrain(options: argparse.Namespace) -> Config:
    """The settings of the model to start from."""
    steps = options.pretraining_steps
    training = {"training": {"max_steps": steps}, "checkpoint": {"save_steps": 1200}}
    return settings(options, training, {"model": FORMS["plain"].model})


def perform(options: argparse.Namespace, runs: FinishedRuns[Trial]) -> str:
    """Train and score what is missing; returns the key of the results."""
    config = pretrain(options)
    manifest = build_dataset(download(config.data, options.folder), config.data, options.folder)
    dataset = (options.folder / "datasets" / manifest.folder_name).resolve()
    key = common_key(config, dataset)
    whole = options.folder / f"{UNCUT}-{key}"
    pretrained = options.pretraining_steps
    runs.complete(
        key,
        [Trial(UNCUT, pretrained, 0)],
        lambda trial: train_and_score("plain", config, dataset, whole),  # noqa: ARG005
    )

    def score(trial: Trial) -> dict[str, Any]:
        # Scores are kept in the run folder, and do not say of which form they are.
        copy = options.folder / folder_name(trial, key)
        shutil.copytree(whole, copy, ignore=lambda *_: ["evaluation"], dirs_exist_ok=True)
        return train_and_score(UNTRAINED[trial.recipe], config, dataset, copy)

    runs.complete(key, [Trial(name, pretrained, 0) for name in UNTRAINED], score)

    def follow(trial: Trial) -> dict[str, Any]:
        recipe = RECIPES[trial.recipe]
        run_dir = options.folder / folder_name(trial, key)
        form = {"segment_length": 32, **FORMS[recipe.form].model}
        steps = {"max_steps": trial.steps, "warmup_steps": 20}
        tuned = settings(
            options,
            {"model": {"initial_weights": str(whole / MODEL), **form}},
            {"run": {"seed": trial.seed}, "training": steps},
            recipe.settings,
        )
        return train_and_score(recipe.form, tuned, dataset, run_dir)

    trials = [
        Trial(name, steps, seed)
        for seed in options.seeds
        for steps in sorted(options.steps, reverse=True)
        for name in options.only
    ]
    runs.complete(key, trials, follow)
    return key


def tabulate(
    done: dict[Trial, dict[str, Any]],
) -> Iterator[tuple[dict[str, Cell], Ratio | None]]:
    """A row for the model as it is, one for it cut, and one for each recipe and its steps.

    With the ratios of a recipe's losses to that of the cut model.
    """
    ends = {t.recipe: losses([r]) for t, r in done.items() if t.recipe in (UNCUT, *UNTRAINED)}
    uncut, cut = ends[UNCUT], ends[CUT]
    assert uncut is not None
    assert cut is not None
    cost = cut.sums - uncut.sums
    groups = dict.fromkeys((trial.recipe, trial.steps) for trial in done)
    for recipe, steps in sorted(groups, key=lambda each: (each[0] not in ends, each)):
        of_seeds = {t.seed: done[t] for t in done if t[:2] == (recipe, steps)}
        ours = losses(of_seeds.values())
        assert ours is not None
        back = bootstrap((cut.sums - ours.sums)[:, None], cost[:, None])[0]
        by_seed = [losses([each]) for each in of_seeds.values()]
        means = [each.mean for each in by_seed if each]
        row: dict[str, Cell] = {
            "": recipe if recipe in ends else f"{recipe}, {steps:,} steps",
            "seeds": ", ".join(map(str, of_seeds)),
            "loss": ", ".join(f"{mean:.3f}" for mean in means),
            "of the cost comes back": None
            if recipe in (UNCUT, CUT)
            else f"{back.estimate:.0%} ({back.low:.0%} to {back.high:.0%})",
            "first segment": f"{first_segment(of_seeds.values()):.3f}",
        }
        yield row, None if recipe in ends else spread([mean / cut.mean for mean in means])


def main() -> None:
    """Train by all recipes and print the results."""
    options = parse()
    options.folder = options.folder.resolve()
    torch.set_num_threads(1)
    runs = FinishedRuns(options.results, Trial)
    found = list(tabulate(runs.of(perform(options, runs))))
    ratios = {str(row[""]): ratio for row, ratio in found if ratio is not None}
    heading = f"Loss in nats per token beyond the first {NEAR} of 16 segments of 32 tokens"
    publish("uptrain", heading, [row for row, _ in found], ratios)


if __name__ == "__main__":
    main()
