"""The parameters of a flow, and the `Config` that they stand for.

A flow run takes a preset, named settings, and `advanced`, a part of the configuration tree.
`resolve` applies both over the preset; `parameters_of` is its inverse. `flows.form` shows the
parameters in Prefect's UI.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect.flows import Flow

from flows.presets import DEFAULT_PRESET, configure, is_preset, template
from infini_model.config import Config, check_typed, load_config
from infini_model.runtime.claims import resume_config
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.stored.working_copy import refresh_runs

Tree = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A named parameter of a flow.

    Attributes:
        key: The key of the configuration tree that it sets.
        flows: The flows that take it.
        title: Its label in the form.
        description: Its help text in the form.
    """

    key: str
    flows: tuple[str, ...]
    title: str
    description: str


PREPROCESS, EVALUATE = ("preprocess",), ("evaluate",)
TRAINING = ("pipeline", "train")
COMPARE = ("compare",)
# In the order of the form.
SETTINGS = {
    "run": Setting(
        "run.name",
        EVALUATE,
        "Run",
        "Name of the run folder to evaluate; the newest run if empty.",
    ),
    "sweep": Setting(
        "comparison.sweep",
        COMPARE,
        "Sweep",
        "Settings to vary, each as KEY=VALUE,VALUE such as `model.memory=linear,none`. All "
        "combinations are run first, one after another; finished ones are reused.",
    ),
    "runs": Setting(
        "comparison.runs",
        COMPARE,
        "Runs",
        "Names of finished runs to compare, beside those of the sweep if there is one.",
    ),
    "documents": Setting(
        "data.source.paths",
        ("pipeline", *PREPROCESS),
        "Documents",
        "Globs or URLs of text to use instead of the preset's, such as `/texts/**/*.txt`. .txt, "
        ".md, .rst and .py files hold one document each; .jsonl (.gz, .zst), .parquet and .arrow "
        "files hold one per row.",
    ),
    "dataset": Setting(
        "data.folder",
        (*TRAINING, *COMPARE, *EVALUATE),
        "Dataset",
        "Name, folder or address of a finished dataset; a name without its key is the newest of "
        "that name.",
    ),
    "initial_weights": Setting(
        "model.initial_weights",
        ("pipeline", "preprocess", "train"),
        "Initial weights",
        "Pretrained Llama to begin from: a Hugging Face folder, or a name on the Hub such as "
        "meta-llama/Llama-3.2-1B. The presets uptrain and fine-tune need it.",
    ),
    "dataset_name": Setting(
        "data.name",
        ("pipeline", *PREPROCESS),
        "Dataset name",
        "First part of the dataset folder's name; if empty, the preset's, or that of the folder of "
        "your documents.",
    ),
    "tokenizer": Setting(
        "data.tokenizer.spec",
        ("pipeline", *PREPROCESS),
        "Tokenizer",
        "bytes, train (a byte-level BPE trained on the documents), model (that of "
        "model.initial_weights), the path of a tokenizer.json, or the name of a tokenizer on the "
        "Hugging Face Hub.",
    ),
    "keep": Setting(
        "data.keep",
        PREPROCESS,
        "Keep",
        "Datasets of this name to keep, those used last. Older ones that no run refers to are "
        "removed at the end; all are kept if empty.",
    ),
    "steps": Setting(
        "training.max_steps", (*TRAINING, *COMPARE), "Steps", "Total optimizer steps."
    ),
    "learning_rate": Setting(
        "training.learning_rate",
        TRAINING,
        "Learning rate",
        "Peak of the learning rate schedule, such as 3e-4.",
    ),
    "batch_size": Setting(
        "training.batch_size",
        (*TRAINING, *COMPARE),
        "Batch size",
        "Windows per process and micro-batch.",
    ),
    "context_length": Setting(
        "packing.context_length",
        TRAINING,
        "Context length",
        "Tokens per window; a multiple of the model's segment_length.",
    ),
    "tasks": Setting(
        "evaluation.tasks",
        EVALUATE,
        "Tasks",
        "What to measure, in the order of the report; those of the preset if empty.",
    ),
    "windows": Setting(
        "evaluation.max_windows",
        EVALUATE,
        "Windows",
        "Maximum number of windows to score in each split.",
    ),
    "devices": Setting(
        "launch.gpus",
        (*TRAINING, *COMPARE, *EVALUATE),
        "Devices",
        "auto (GPUs with the most free memory first, or the CPU), all, GPU numbers such as 0,3, or "
        "cpu.",
    ),
    "resume": Setting(
        "run.name",
        TRAINING,
        "Resume",
        "Name of a run folder to resume, or latest. Its own settings and dataset replace those of "
        "the preset.",
    ),
    "name": Setting(
        "run.name",
        TRAINING,
        "Name",
        "Name of the run folder; if empty, the preset's name and a number.",
    ),
    "force": Setting(
        "launch.force",
        (*TRAINING, *COMPARE),
        "Force",
        "Train even if the memory estimate says that it cannot fit.",
    ),
    "seed": Setting(
        "run.seed", TRAINING, "Seed", "Seed of the weights, of the order of windows and of samples."
    ),
}

# Pairs of which only one can be given.
EXCLUSIVE = (("name", "resume"), ("documents", "resume"), ("documents", "dataset"))
# `resume` sets the same key as `name`; `documents` cannot express every kind of source.
NAMED_IN_COMMANDS = SETTINGS.keys() - {"resume", "documents"}


def settings_of(flow_name: str) -> list[str]:
    """The names of the settings that a flow takes, in the order of the form."""
    return [name for name, setting in SETTINGS.items() if flow_name in setting.flows]


def resolve(
    preset: str | None = DEFAULT_PRESET, advanced: Mapping[str, Any] | None = None, **named: Any
) -> Config:
    """The configuration of a flow's parameters; without a preset, over the library's defaults.

    Raises `ConfigError` in one line if a value is invalid, or is given twice, or two exclude each
    other.
    """
    if advanced is not None and not isinstance(advanced, Mapping):
        raise ConfigError(f"advanced: got {advanced!r}: takes a mapping of sections")
    run = (advanced or {}).get("run")
    if preset is not None and isinstance(run, Mapping) and "preset" in run:
        raise ConfigError("advanced.run.preset: set the parameter `preset` instead")
    given = {name: value for name, value in named.items() if value is not None}
    for one, other in EXCLUSIVE:
        if one in given and other in given:
            raise ConfigError(f"{other}: cannot be combined with {one}; leave one of them empty")
    changes = [advanced or {}, *(_change(name, value) for name, value in given.items())]
    check_typed(changes)
    if "resume" in given:
        return _resumed(changes)
    return configure([] if preset is None else [str(preset)], overrides=changes)


def _change(name: str, value: Any) -> Tree:
    """A named setting as a part of the configuration tree."""
    *sections, leaf = SETTINGS[name].key.split(".")
    change: Tree = {"kind": "files", leaf: value} if name == "documents" else {leaf: value}
    for section in reversed(sections):
        change = {section: change}
    return change


def _resumed(changes: list[Mapping[str, Any]]) -> Config:
    """The settings of the run that `changes` name, with `changes` applied over them."""
    asked = load_config(overrides=[{"run": change["run"]} for change in changes if "run" in change])
    # `latest` is a link to the run.
    refresh_runs(asked.run.runs_dir, asked.run.store)
    run_dir = (asked.run.runs_dir / str(asked.run.name)).resolve()
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"resume: there is no run {run_dir}")
    itself = {"name": run_dir.name, "output_dir": str(run_dir.parent.parent)}
    if asked.run.store is not None:
        itself["store"] = asked.run.store
    return resume_config(run_dir, [*changes, {"run": itself}])


def parameters_of(config: Config, flow: Flow[..., Any]) -> Tree:
    """The parameters for which `flow` resolves to `config`: its preset and the differences from it.

    Settings that the flow has a name for are named; all others are in `advanced`.
    """
    preset = config.run.preset if is_preset(config.run.preset) else None
    tree = _tree(config)
    base = Config() if preset is None else template(preset)
    change = _difference(_tree(base), tree)
    if config.model.initial_weights is not None:
        # What is set beside it counts even where it is the default.
        change["model"] = tree["model"]
    named: Tree = {}
    for name in inspect.signature(flow.fn).parameters.keys() & NAMED_IN_COMMANDS:
        *sections, leaf = SETTINGS[name].key.split(".")
        section = functools.reduce(lambda tree, key: tree.get(key, {}), sections, change)
        if section.get(leaf) is not None:
            named[name] = section.pop(leaf)
    return {"preset": preset, **named, "advanced": _pruned(change) or None}


def _pruned(tree: Tree) -> Tree:
    """The tree without its empty parts."""
    parts = {
        key: _pruned(value) if isinstance(value, dict) else value for key, value in tree.items()
    }
    return {key: value for key, value in parts.items() if value != {}}


def _tree(config: Config) -> Tree:
    tree: Tree = config.model_dump(mode="json")
    return tree


def _difference(base: Tree, tree: Tree) -> Tree:
    """The smallest tree that, merged into `base`, gives `tree`."""
    change: Tree = {}
    for key, value in tree.items():
        below: Any = base.get(key)
        if value == below:
            continue
        parts = isinstance(value, dict) and isinstance(below, dict)
        # `merge` replaces a whole source by one of another kind.
        if parts and value.get("kind") == below.get("kind"):
            value = _difference(below, value)
        change[key] = value
    return change
