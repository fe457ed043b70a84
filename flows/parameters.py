"""The parameters of a flow: a preset, the settings that people change, and `advanced` for the rest.

`as_flow` gives a flow, whose function takes a `Config`, these parameters; the flow run turns them
into a `Config` by `invoked`. Prefect's UI shows them as a form: their JSON schema is taken from
the configuration tree, so that Prefect rejects an invalid value on Submit; combinations that only
the whole tree can reject fail the run in its first second. The parameters themselves are untyped:
`infini_model.config` reports an invalid value in one line, Prefect in many.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from prefect import Flow, flow
from prefect.runtime import flow_run
from pydantic import Field, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import MISSING

from flows.presets import DEFAULT_PRESET, Invocation, preset_names
from flows.runs import find_run_folder, places_of
from flows.serving import engine
from infini_model.config import Config, load_config, merge, merge_typed, nested
from infini_model.config.explaining import schemas
from infini_model.runtime.branches import branch_config, parent_of
from infini_model.runtime.claims import resume_config
from infini_model.runtime.errors import ConfigError
from tasks.control import end_earlier_attempt
from tasks.failures import report_failure
from tasks.flow_run import FLOW, unwrapped

R = TypeVar("R")
Tree = dict[str, Any]


class Setting(NamedTuple):
    """A named parameter of some flows, which sets a key of the configuration tree.

    Its label in the form is its name. Its help text is that of the key, unless that would speak of
    what the form has not, such as null.
    """

    key: str
    flows: tuple[str, ...]
    description: str | None = None


PREPROCESS, EVALUATE, COMPARE = ("preprocess",), ("evaluate",), ("compare",)
TRAINING = ("pipeline", "train")
# In the order of the form.
SETTINGS = {
    "run": Setting(
        "run.name", EVALUATE, "Name of the run folder to evaluate; the newest run if empty."
    ),
    "sweep": Setting("comparison.sweep", COMPARE),
    "runs": Setting("comparison.runs", COMPARE),
    "documents": Setting(
        "data.source.paths",
        ("pipeline", *PREPROCESS),
        "Globs or URLs of text to use instead of the preset's, such as `/texts/**/*.txt`. Texts "
        "and source code hold one document each; .jsonl, .json, .csv, .tsv and .parquet files "
        "hold one per row.",
    ),
    "sources": Setting(
        "data.sources",
        ("pipeline", *PREPROCESS),
        "Named sources instead of documents, as JSON such as "
        '`{"web": {"paths": ["/web/*.jsonl.gz"]}, "code": {"repository": "team/code"}}`.',
    ),
    "source_weights": Setting(
        "packing.weights",
        TRAINING,
        'Share of the windows of each source, as JSON such as `{"web": 7, "code": 3}`; by size if '
        "empty.",
    ),
    "dataset": Setting(
        "data.folder",
        (*TRAINING, *COMPARE, *EVALUATE),
        "Name, folder or address of a finished dataset; a name without its key is the newest of "
        "that name.",
    ),
    "initial_weights": Setting(
        "model.initial_weights",
        (*TRAINING, *PREPROCESS),
        "Pretrained Llama, Qwen, Mistral, … to begin from: a Hugging Face folder, or a name on the "
        "Hub such as meta-llama/Llama-3.2-1B. The presets uptrain and fine-tune need it.",
    ),
    "dataset_name": Setting(
        "data.name",
        ("pipeline", *PREPROCESS),
        "First part of the dataset folder's name; if empty, the preset's, or that of the folder of "
        "your documents.",
    ),
    "tokenizer": Setting("data.tokenizer.spec", ("pipeline", *PREPROCESS)),
    "keep": Setting(
        "data.keep",
        PREPROCESS,
        "Datasets of this name to keep, those used last. Older ones that no run refers to are "
        "removed at the end; all are kept if empty.",
    ),
    "steps": Setting("training.max_steps", (*TRAINING, *COMPARE), "Total optimizer steps."),
    "learning_rate": Setting("training.learning_rate", TRAINING),
    "batch_size": Setting("training.batch_size", (*TRAINING, *COMPARE)),
    "context_length": Setting("packing.context_length", TRAINING),
    "tasks": Setting("evaluation.tasks", EVALUATE),
    "windows": Setting(
        "evaluation.max_windows", EVALUATE, "Maximum number of windows to score in each split."
    ),
    "devices": Setting("launch.gpus", (*TRAINING, *COMPARE, *EVALUATE)),
    "resume": Setting(
        "run.name",
        TRAINING,
        "Name of a run folder to resume, or latest. Its own settings and dataset replace those of "
        "the preset.",
    ),
    "branch_of": Setting(
        "training.branch_of",
        TRAINING,
        "Name of a run whose newest checkpoint a new run begins from, or name@step. Its settings "
        "and dataset replace those of the preset; the other fields change them.",
    ),
    "name": Setting(
        "run.name", TRAINING, "Name of the run folder; if empty, the preset's name and a number."
    ),
    "force": Setting("launch.force", (*TRAINING, *COMPARE)),
    "seed": Setting("run.seed", TRAINING),
}

# Pairs of which only one can be given.
EXCLUSIVE = (
    ("name", "resume"),
    ("branch_of", "resume"),
    *((one, other) for one in ("documents", "sources") for other in ("resume", "dataset")),
    ("documents", "sources"),
)


def settings_of(flow_name: str) -> list[str]:
    """The names of the settings that a flow takes, in the order of the form."""
    return [name for name, setting in SETTINGS.items() if flow_name in setting.flows]


def invoked(
    preset: str | list[str] | None = DEFAULT_PRESET,
    advanced: Mapping[str, Any] | None = None,
    **named: Any,
) -> Invocation:
    """Resolve a flow's parameters; without a preset, over the library's defaults.

    `preset` is a name, as in the form, or a list of names, as a command line hands them on.

    Raises `ConfigError` in one line if a value is invalid, or is given twice, or two exclude each
    other; `UserError` if there is no such run.
    """
    preset, advanced, named = map(unwrapped, (preset, advanced, named))
    if advanced is not None and not isinstance(advanced, Mapping):
        raise ConfigError(f"Advanced: got {advanced!r}: takes a mapping of sections")
    run = (advanced or {}).get("run")
    if preset is not None and isinstance(run, Mapping) and "preset" in run:
        raise ConfigError("run.preset: set Preset instead")
    given = {name: value for name, value in named.items() if value is not None}
    for one, other in EXCLUSIVE:
        if one in given and other in given:
            raise ConfigError(f"{_title(other)}: excludes {_title(one)}; leave one of them empty")
    branch_of = given.pop("branch_of", None)
    typed = merge_typed([advanced or {}, *itertools.starmap(_change, given.items())])
    if "resume" in given:
        return Invocation({}, _resumed(typed))
    if branch_of is not None:
        return Invocation({}, _branched(str(branch_of), typed))
    presets = preset if isinstance(preset, list) else [] if preset is None else [preset]
    return Invocation.of([str(name) for name in presets], None, typed)


def _change(name: str, value: Any) -> Tree:
    """A named setting as a part of the configuration tree."""
    change = nested(SETTINGS[name].key, value)
    return merge(change, {"data": {"source": {"kind": "files"}}}) if name == "documents" else change


def _resumed(typed: Tree) -> Config:
    """The settings of the run that is named, with what was typed applied over them."""
    places = load_config(overrides=[{"run": typed["run"]}]).run
    run_dir = find_run_folder(places, places.name)
    name = nested("run.name", run_dir.name)
    return resume_config(run_dir, [typed, places_of(run_dir, places), name])


def _branched(branch_of: str, typed: Tree) -> Config:
    """Resolve a branch of `NAME` or `NAME@STEP`, with what was typed over its settings."""
    asked = load_config(
        overrides=[{"run": typed.get("run", {})}, nested("training.branch_of", branch_of)]
    )
    parent, step = parent_of(asked)
    run_dir = find_run_folder(asked.run, parent.name)
    return branch_config(run_dir, step, [typed, places_of(run_dir, asked.run)])


def _without(node: Tree, *keys: str) -> Tree:
    return {key: value for key, value in node.items() if key not in keys}


_whole_schema = functools.cache(Config.model_json_schema)


def _partial(node: Tree) -> Tree:
    """A part of the configuration's JSON schema: nothing is required, nothing has a default."""
    if reference := node.get("$ref"):
        definition = _whole_schema()["$defs"][reference.rpartition("/")[2]]
        return _partial(definition | _without(node, "$ref"))
    kept = _without(node, "default", "required", "discriminator", "oneOf", "$defs")
    # With nothing required, a partial source may match more than one kind.
    if choices := node.get("oneOf", node.get("anyOf")):
        kept["anyOf"] = [_partial(choice) for choice in choices]
    if node.get("type") == "integer" and kept.pop("exclusiveMinimum", None) == 0:
        kept["minimum"] = 1  # The UI's inputs understand it, and word the error better.
    if isinstance(node.get("additionalProperties"), dict):
        kept["additionalProperties"] = _partial(node["additionalProperties"])
    if "properties" in node:
        kept["properties"] = {key: _partial(value) for key, value in node["properties"].items()}
    return kept


@functools.cache
def _tree_schema() -> Tree:
    tree = _partial(_whole_schema())
    # The preset has its own parameter; here it would only change a name.
    del tree["properties"]["run"]["properties"]["preset"]
    return tree


def _json_editor(schema: Tree) -> Tree:
    """The schema of an object that the UI shows as one JSON editor, and checks all the same.

    That is what an object without properties is shown as; `then` has no type, so that null is
    accepted as it is for the other settings.
    """
    return {"type": "object", "if": True, "then": _without(schema, "type", "title")}


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _parameter(name: str, schema: Tree, description: str) -> Any:
    """A parameter that accepts anything, for `Config` to check, and shows `schema` to Prefect."""
    # Without the extra, Prefect takes the parameter's name as the title.
    extra: JsonDict = {"title": _title(name), "description": description}
    return Annotated[Any, WithJsonSchema(schema), Field(json_schema_extra=extra)]


def _annotations(flow_name: str) -> dict[str, Any]:
    presets: Tree = {"type": "string", "enum": list(preset_names())}
    about = (
        "Laid over the settings of the run; empty for the run's own."
        if flow_name in EVALUATE
        else "Source of all settings left empty. stable, a remedy for NaN losses, and long-context "
        "apply over quickstart."
    )
    annotations = {"preset": _parameter("preset", presets, about)}
    for name in settings_of(flow_name):
        key, _, own = SETTINGS[name]
        node = _partial(schemas()[key])
        # Without null: an unset parameter is left out.
        (typed,) = [choice for choice in node.get("anyOf", [node]) if choice["type"] != "null"]
        typed = _json_editor(typed) if "additionalProperties" in typed else _without(typed, "title")
        annotations[name] = _parameter(name, typed, own or node["description"])
    about = (
        "Any other settings, applied over the preset, as JSON such as "
        '`{"model": {"num_hidden_layers": 6}, "training": {"warmup_steps": 50}}`.'
    )
    annotations["advanced"] = _parameter("advanced", _json_editor(_tree_schema()), about)
    return annotations


def _signature(flow_name: str, annotations: Mapping[str, Any], empty: Any) -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    defaults = {} if flow_name in EVALUATE else {"preset": DEFAULT_PRESET}
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=defaults.get(name, empty), annotation=shown)
            for name, shown in annotations.items()
        ]
    )


def as_flow(function: Callable[[Any], R]) -> Flow[..., R]:
    """Make a flow of a function that takes a `Config`: with parameters, and reporting failures.

    A function of `asked` takes the whole `Invocation`.
    """
    takes_all = "asked" in inspect.signature(function).parameters

    @functools.wraps(function)
    def with_parameters(**parameters: Any) -> R:
        engine.mark_as_engine(flow_run.id)
        end_earlier_attempt()
        asked = invoked(**parameters)
        return function(asked if takes_all else asked.config)

    name = function.__name__
    annotations = _annotations(name)
    with_parameters.__signature__ = _signature(name, annotations, None)  # type: ignore[attr-defined]
    with_parameters.__annotations__ = annotations
    made: Flow[..., R] = flow(**FLOW)(report_failure(with_parameters))
    # Prefect reads this signature for the form, and the function's own for a run. With a default of
    # null, each input would be a choice between a type and "None", set to "None".
    made.__signature__ = _signature(name, annotations, MISSING)  # type: ignore[attr-defined]
    return made
