"""What a flow is asked for, and the `Config` that it means.

A flow run has a preset, named settings, and `advanced`, a part of the configuration tree: `resolve`
lays `advanced` over the preset and the named settings over both. `parameters_of` is the way back.
`flows.form` shows the parameters in Prefect's UI.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect.flows import Flow

from flows.presets import DEFAULT_PRESET, configure, is_preset
from infini_model.config import Config, load_config
from infini_model.runtime.claims import resume_config
from infini_model.runtime.errors import ConfigError

Tree = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A named parameter: the key of the tree that it sets, and how the form shows it."""

    key: str
    title: str
    description: str


SETTINGS = {
    "documents": Setting(
        "data.source.paths",
        "Documents",
        "Globs or URLs of text to use instead of the preset's, such as `/texts/**/*.txt`: .txt .md "
        ".rst .py hold one document a file; .jsonl (.gz, .zst), .parquet and .arrow one a row.",
    ),
    "dataset": Setting(
        "data.folder", "Dataset", "Folder of a finished dataset, such as outputs/datasets/NAME-KEY."
    ),
    "dataset_name": Setting(
        "data.name", "Dataset name", "First part of the dataset folder's name."
    ),
    "tokenizer": Setting(
        "data.tokenizer.spec",
        "Tokenizer",
        "bytes, train (a byte-level BPE trained on the text), a path to a tokenizer.json, or the "
        "name of a tokenizer on the hub.",
    ),
    "steps": Setting("training.max_steps", "Steps", "Optimizer steps in all."),
    "learning_rate": Setting(
        "training.learning_rate", "Learning rate", "Peak of the schedule, such as 3e-4."
    ),
    "batch_size": Setting(
        "training.batch_size", "Batch size", "Windows that one process reads at once."
    ),
    "context_length": Setting(
        "packing.context_length",
        "Context length",
        "Tokens in one window; a multiple of the model's segment_length.",
    ),
    "devices": Setting(
        "launch.gpus",
        "Devices",
        "auto (the freest GPUs first, else the CPU), all, numbers of GPUs such as 0,3, or cpu.",
    ),
    "batches": Setting(
        "evaluation.max_windows", "Windows", "Windows of each split to score at most."
    ),
    "run": Setting("run.name", "Run", "Name of the run folder to score; the newest if empty."),
    "name": Setting(
        "run.name", "Name", "Name of the run folder; numbered after the preset if empty."
    ),
    "resume": Setting(
        "run.name",
        "Resume",
        "Name of a run folder to resume, or latest. Its own settings and dataset then take the "
        "place of the preset's.",
    ),
    "seed": Setting("run.seed", "Seed", "Seed of the weights, the order of windows and samples."),
}

# Settings of which only one can be given.
APART = (("name", "resume"), ("documents", "resume"), ("documents", "dataset"))
# A run is resumed by its name, and documents may be of more than one kind.
NAMED_IN_COMMANDS = SETTINGS.keys() - {"resume", "documents"}


def resolve(
    preset: str | None = DEFAULT_PRESET, advanced: Mapping[str, Any] | None = None, **named: Any
) -> Config:
    """The configuration that a flow's parameters ask for; without a preset, the library's defaults.

    Raises `ConfigError` in one line if a value is wrong or two do not go together.
    """
    if advanced is not None and not isinstance(advanced, Mapping):
        raise ConfigError(f"advanced: got {advanced!r}: takes a mapping of sections")
    if preset is not None and "preset" in dict((advanced or {}).get("run") or {}):
        raise ConfigError("advanced.run.preset: choose the preset by the parameter of that name")
    given = {name: value for name, value in named.items() if value is not None}
    for one, other in APART:
        if one in given and other in given:
            raise ConfigError(f"{other}: does not go with {one}; leave one of the two empty")
    changes = [advanced or {}, *(_change(name, value) for name, value in given.items())]
    if "resume" in given:
        return _resumed(changes)
    return configure([] if preset is None else [str(preset)], overrides=changes)


def _change(name: str, value: Any) -> Tree:
    """What a named setting lays over the tree."""
    *sections, leaf = SETTINGS[name].key.split(".")
    change: Tree = {"kind": "files", leaf: value} if name == "documents" else {leaf: value}
    for section in reversed(sections):
        change = {section: change}
    return change


def _resumed(changes: list[Mapping[str, Any]]) -> Config:
    """The settings of the run that `changes` name, with `changes` laid over them."""
    asked = load_config(overrides=[{"run": change["run"]} for change in changes if "run" in change])
    # `latest` is a link to the run.
    run_dir = (asked.run.runs_dir / str(asked.run.name)).resolve()
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"resume: there is no run {run_dir}")
    itself = {"name": run_dir.name, "output_dir": str(run_dir.parent.parent)}
    return resume_config(run_dir, [*changes, {"run": itself}])


def parameters_of(config: Config, flow: Flow[..., Any]) -> Tree:
    """The parameters with which `flow` resolves to `config`: its preset and what differs from that.

    A setting that the flow has a name for is named, all others are in `advanced`.
    """
    preset = config.run.preset if is_preset(config.run.preset) else None
    change = _difference(_tree(resolve(preset)), _tree(config))
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
    """What `merge` has to lay over `base` to make `tree` of it."""
    change: Tree = {}
    for key, value in tree.items():
        below: Any = base.get(key)
        if value == below:
            continue
        parts = isinstance(value, dict) and isinstance(below, dict)
        # `merge` puts a source of another kind in the place of the whole.
        if parts and value.get("kind") == below.get("kind"):
            value = _difference(below, value)
        change[key] = value
    return change
