"""The form of a deployment: a preset, the settings that people change, and `advanced` for the rest.

`settings` gives a flow, whose story takes a `Config`, these parameters instead; inside the flow run
they become a `Config` again: the preset, `advanced` laid over it, the named settings over both. The
JSON schema comes from the configuration tree, so that Prefect refuses a wrong value on Submit; what
only the whole tree shows to be wrong fails the run in its first second. The parameters themselves
are not typed: `infini_model.config` says in one line what is wrong with a value, Prefect does not.

`parameters_of` is the way back: the parameters with which a flow resolves to a given `Config`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from prefect.flows import Flow
from pydantic import Field, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import MISSING

from infini_model.config import Config, load_config, preset_names
from infini_model.errors import ConfigError
from infini_model.runs import resume_config

R = TypeVar("R")
Tree = dict[str, Any]
DEFAULT_PRESET = "quickstart"


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
        "training.gpus",
        "Devices",
        "auto (the freest GPUs first, else the CPU), all, numbers of GPUs such as 0,3, or cpu.",
    ),
    "batches": Setting(
        "evaluation.max_batches", "Batches", "Batches of each split to score at most."
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


def _without(node: Tree, *keys: str) -> Tree:
    return {key: value for key, value in node.items() if key not in keys}


@functools.cache
def _tree_schema() -> Tree:
    """JSON schema of a part of the configuration: nothing is required, nothing has a default."""
    whole = Config.model_json_schema()
    definitions = whole.pop("$defs")

    def part(node: Tree) -> Tree:
        if reference := node.get("$ref"):
            return part(definitions[reference.rpartition("/")[2]] | _without(node, "$ref"))
        kept = _without(node, "default", "required", "discriminator", "oneOf")
        # Where nothing is required, a part of a source may fit both kinds of it.
        if choices := node.get("oneOf", node.get("anyOf")):
            kept["anyOf"] = [part(choice) for choice in choices]
        if "properties" in node:
            kept["properties"] = {key: part(value) for key, value in node["properties"].items()}
        return kept

    return part(whole)


def _schema_at(key: str) -> Tree:
    """JSON schema of one key; no value is a parameter left out, not null."""
    node = _tree_schema()
    for name in key.split("."):
        sections = [choice["properties"] for choice in node.get("anyOf", [node])]
        node = next(section[name] for section in sections if name in section)
    (typed,) = [choice for choice in node.get("anyOf", [node]) if choice["type"] != "null"]
    return _without(typed, "title", "description")


def _shown(title: str, description: str, schema: Tree) -> Any:
    """A parameter that takes anything, for `Config` to judge, and shows `schema` to Prefect."""
    # Prefect would have the parameter's name for a title but for the extra.
    extra: JsonDict = {"title": title, "description": description}
    return Annotated[Any, WithJsonSchema(schema), Field(json_schema_extra=extra)]


def _annotations(names: tuple[str, ...]) -> dict[str, Any]:
    presets: Tree = {"type": "string", "enum": preset_names()}
    # An object without properties is one JSON editor in the UI; `then` is checked all the same.
    advanced: Tree = {"type": "object", "if": True, "then": _tree_schema()}
    annotations = {
        "preset": _shown("Preset", "Where the settings that are left empty come from.", presets)
    }
    for name in names:
        setting = SETTINGS[name]
        annotations[name] = _shown(setting.title, setting.description, _schema_at(setting.key))
    return annotations | {
        "advanced": _shown(
            "Advanced",
            "Any other setting of the configuration, laid over the preset, as JSON such as "
            '`{"model": {"num_hidden_layers": 6}, "training": {"warmup_steps": 50}}`.',
            advanced,
        ),
    }


def _signature(annotations: Mapping[str, Any], empty: Any) -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(
                name, kind, default=DEFAULT_PRESET if name == "preset" else empty, annotation=shown
            )
            for name, shown in annotations.items()
        ]
    )


def settings(*names: str) -> Callable[[Callable[[Config], R]], Callable[..., R]]:
    """Let a flow's function, which takes a `Config`, take a preset, `names` and `advanced`."""

    def decorate(story: Callable[[Config], R]) -> Callable[..., R]:
        @functools.wraps(story)
        def flow_function(**parameters: Any) -> R:
            return story(resolve(**parameters))

        annotations = _annotations(names)
        flow_function.__signature__ = _signature(annotations, None)  # type: ignore[attr-defined]
        flow_function.__annotations__ = annotations
        return flow_function

    return decorate


def form(flow: Flow[..., R]) -> Flow[..., R]:
    """Show a flow's settings in the UI as plain inputs that may stay empty.

    A default of null in the schema would make each of them a choice between a type and "None", with
    "None" chosen. Prefect reads this signature for the schema, the function's own for a run.
    """
    signature = inspect.signature(flow.fn)
    annotations = {name: found.annotation for name, found in signature.parameters.items()}
    flow.__signature__ = _signature(annotations, MISSING)  # type: ignore[attr-defined]
    return flow


def resolve(
    preset: str | None = DEFAULT_PRESET, advanced: Mapping[str, Any] | None = None, **named: Any
) -> Config:
    """The configuration that a flow's parameters ask for; without a preset, the library's defaults.

    Raises `ConfigError` in one line if a value is wrong or two do not go together.
    """
    if advanced is not None and not isinstance(advanced, Mapping):
        raise ConfigError(f"advanced: got {advanced!r}: takes a mapping of sections")
    given = {name: value for name, value in named.items() if value is not None}
    for one, other in APART:
        if one in given and other in given:
            raise ConfigError(f"{other}: does not go with {one}; leave one of the two empty")
    changes = [advanced or {}, *(_change(name, value) for name, value in given.items())]
    if "resume" in given:
        return _resumed(changes)
    return load_config(preset, overrides=changes)


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
    return resume_config(run_dir, [*changes, {"run": {"name": run_dir.name}}])


def parameters_of(config: Config, flow: Flow[..., Any]) -> Tree:
    """The parameters with which `flow` resolves to `config`: its preset and what differs from that.

    A setting that the flow has a name for is named, all others are in `advanced`.
    """
    preset = config.run.preset if config.run.preset in preset_names() else None
    change = _difference(_tree(load_config(preset)), _tree(config))
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
