"""The form of a deployment: a preset, the settings that people change, and one box for the rest.

`settings` gives a flow, whose function takes a `Config`, the parameters of `flows.parameters`; they
become a `Config` again inside the flow run. `form` shows them in the UI. Their JSON schema is cut
out of the configuration tree, so that Prefect refuses a wrong value on Submit; what only the whole
tree shows to be wrong fails the run in its first second. The parameters themselves have no types:
`infini_model.config` says in one line what is wrong with a value, Prefect in many.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from prefect.flows import Flow
from prefect.runtime import flow_run
from pydantic import Field, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import MISSING

from flows.parameters import SETTINGS, Tree, resolve
from flows.presets import DEFAULT_PRESET, preset_choices
from flows.serving import engine
from infini_model.config import Config

R = TypeVar("R")


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
        if node.get("type") == "integer" and kept.pop("exclusiveMinimum", None) == 0:
            kept["minimum"] = 1  # What the UI's inputs know, and refuse in plainer words.
        if "properties" in node:
            kept["properties"] = {key: part(value) for key, value in node["properties"].items()}
        return kept

    tree = part(whole)
    # The preset is a parameter of its own; here it would change a name and nothing else.
    del tree["properties"]["run"]["properties"]["preset"]
    return tree


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
    presets: Tree = {"type": "string", "enum": preset_choices()}
    # An object without properties is one JSON editor in the UI; `then` is checked all the same,
    # without its type, so that null is taken as it is for the other settings.
    advanced: Tree = {"type": "object", "if": True, "then": _without(_tree_schema(), "type")}
    annotations = {
        "preset": _shown(
            "Preset",
            "Where the settings that are left empty come from; `+stable` lays the remedy for NaN "
            "over a preset.",
            presets,
        )
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
            engine.hold(flow_run.id)
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
