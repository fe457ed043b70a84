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

With --weights FOLDER, as `transformers` writes it, a real Llama is cut into segments of 512 tokens
in place of the small one, and scored beyond the second: whole, cut, with the segment before in
sight, with the first four tokens of the document in sight too, and after some further training of
that form, with a residual memory and without. For SmolLM2-135M a step of 4,096 tokens takes half a
minute on a core.
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
from infini_model.data.sources.listing import list_sources
from infini_model.evaluation.statistics import bootstrap
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import content_key, sha256

# Scored as trained with plain attention, without training in the forms that others begin from.
UNCUT, CUT, NARROWED = "uncut", "cut", "window, untrained"
UNTRAINED = {CUT: "none", NARROWED: "window"}
ENDS = (UNCUT, *UNTRAINED)
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


# Tokens of a segment of a real Llama, and the segments whose losses are not counted.
LONG_SEGMENT, LONG_NEAR = 512, 2
REAL: dict[str, Any] = {
    "data": {"name": "code"},
    "model": {"segment_length": LONG_SEGMENT},
    "training": {"gradient_accumulation_steps": 1, "warmup_steps": 5, "precision": "bf16"},
    "launch": {"gradient_checkpointing": False},
    "logging": {"eval_steps": 1_000_000},
    "checkpoint": {"save_steps": 20, "save_total_limit": 1},
    "evaluation": {"max_windows": 1, "loss_by_position": {"max_documents": 8}},
    "tracking": {"mlflow": False, "tensorboard": False},
}
# One step that changes nothing, so that what is not trained is scored in the same way.
STILL: dict[str, Any] = {"learning_rate": 1e-12, "memory_learning_rate": 1e-12, "warmup_steps": 0}
IN_SIGHT: dict[str, Any] = {"memory": "none", "window_segments": 1, "window_sinks": 4}
REAL_LORA: dict[str, Any] = {"learning_rate": 2e-4, "lora": {"r": 16, "target_modules": ALL}}
NO_SINKS = "the segment before in sight, untrained"
SINKS = "the segment before and four sinks, untrained"
REAL_UNTRAINED: dict[str, dict[str, Any]] = {
    UNCUT: {"memory": "none"},  # with all segments before in sight
    CUT: IN_SIGHT | {"window_segments": 0, "window_sinks": 0},
    NO_SINKS: IN_SIGHT | {"window_sinks": 0},
    SINKS: IN_SIGHT,
}
WITH_MEMORY = IN_SIGHT | {"memory": "residual"}
REAL_RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no memory, all weights": (IN_SIGHT, {"learning_rate": 2e-5}),
    "memory, all weights": (WITH_MEMORY, {"learning_rate": 2e-5}),
    "memory alone": (WITH_MEMORY, {"lora": {"target_modules": ()}}),
    "memory and LoRA": (WITH_MEMORY, REAL_LORA),
}


class Trial(NamedTuple):
    """A recipe's training; of the models that it starts from, `steps` are those before."""

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
    recipes = [*RECIPES, *REAL_RECIPES]
    parser.add_argument("--only", nargs="+", choices=recipes, default=recipes, metavar="NAME")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="of a real Llama")
    parser.add_argument("--context", type=int, default=4096, help="tokens of its windows")
    parser.add_argument("--pretraining-steps", type=int, default=4800)
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 1200])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results" / "uptrain.jsonl"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs", "uptrain"))
    parser.add_argument("overrides", nargs="*", help="settings of every run")
    options: argparse.Namespace = parser.parse_args()
    if options.context % LONG_SEGMENT or options.context <= LONG_NEAR * LONG_SEGMENT:
        least = (LONG_NEAR + 1) * LONG_SEGMENT
        parser.error(f"--context: takes multiples of {LONG_SEGMENT} from {least} on")
    return options


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
    manifest = build_dataset(
        list_sources(config.data, options.folder), config.data, options.folder / "datasets"
    )
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
        if name in RECIPES
    ]
    runs.complete(key, trials, follow)
    return key


def perform_real(options: argparse.Namespace, runs: FinishedRuns[Trial]) -> str:
    """As `perform`, from the weights of a folder."""
    where = {"run": {"output_dir": str(options.folder)}}
    context = {"packing": {"context_length": options.context}}
    folder = str(options.weights.resolve())
    weights = {"model": {"initial_weights": folder}, "data": {"tokenizer": {"spec": folder}}}

    def config(
        model: dict[str, Any], steps: int, training: dict[str, Any], seed: int = 0
    ) -> Config:
        trained = {"run": {"seed": seed}, "model": model, "training": {"max_steps": steps}}
        changes = [REAL, where, context, weights, trained, {"training": training}]
        return configure(["uptrain"], overrides=[*changes, *options.overrides])

    cut = config(REAL_UNTRAINED[CUT], 1, STILL)
    manifest = build_dataset(
        list_sources(cut.data, options.folder), cut.data, options.folder / "datasets"
    )
    dataset = (options.folder / "datasets" / manifest.folder_name).resolve()
    common = common_key(cut.updated(model={"initial_weights": None}), dataset, LONG_NEAR)
    files = [sha256(path) for path in sorted(options.weights.glob("*.safetensors"))]
    key = content_key({"common": common, "weights": files})[:12]

    def follow(trial: Trial) -> dict[str, Any]:
        if trial.recipe in REAL_UNTRAINED:
            model, steps, training = REAL_UNTRAINED[trial.recipe], 1, STILL
        else:
            (model, training), steps = REAL_RECIPES[trial.recipe], trial.steps
        if trial.recipe == UNCUT:
            model = model | {"window_segments": options.context // LONG_SEGMENT - 1}
        run_dir = options.folder / folder_name(trial, key)
        settings = config(model, steps, training, trial.seed)
        return train_and_score("none", settings, dataset, run_dir, LONG_NEAR)

    trials = [Trial(name, 0, 0) for name in REAL_UNTRAINED]
    trials += [
        Trial(name, steps, seed)
        for seed in options.seeds
        for steps in options.steps
        for name in options.only
        if name in REAL_RECIPES
    ]
    runs.complete(key, trials, follow)
    return key


def tabulate(
    done: dict[Trial, dict[str, Any]],
) -> Iterator[tuple[dict[str, Cell], Ratio | None]]:
    """A row for the model as it is, one for it cut, and one for each recipe and its steps.

    With the ratios of a recipe's losses to that of the cut model.
    """
    ends = {t.recipe: losses([r]) for t, r in done.items() if t.recipe in (*ENDS, *REAL_UNTRAINED)}
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
        out = losses(of_seeds.values(), "knocked_out")
        row["worth of the memory"] = None if out is None else str(ours.gain_over(out))
        yield row, None if recipe in ends else spread([mean / cut.mean for mean in means])


def main() -> None:
    """Train by all recipes and print the results."""
    options = parse()
    options.folder = options.folder.resolve()
    torch.set_num_threads(1)
    runs = FinishedRuns(options.results, Trial)
    if options.weights is None:
        done = runs.of(perform(options, runs))
        beyond = f"{NEAR} of 16 segments of 32 tokens"
    else:
        done = runs.of(perform_real(options, runs))
        segments = options.context // LONG_SEGMENT
        beyond = f"{LONG_NEAR} of {segments} segments of {LONG_SEGMENT} tokens"
    found = list(tabulate(done))
    ratios = {str(row[""]): ratio for row, ratio in found if ratio is not None}
    heading = f"Loss in nats per token beyond the first {beyond}"
    publish("uptrain", heading, [row for row, _ in found], ratios)


if __name__ == "__main__":
    main()
