"""The form of a deployment: a preset, the settings that people change, and one box for the rest.

`settings` gives a flow, whose function takes a `Config`, the parameters of `flows.parameters`; the
flow run turns them into a `Config`. `form` shows them in the UI. Their JSON schema is taken from
the configuration tree, so that Prefect rejects an invalid value on Submit; combinations that only
the whole tree can reject fail the run in its first second. The parameters themselves are untyped:
`infini_model.config` reports an invalid value in one line, Prefect in many.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from prefect.flows import Flow
from prefect.runtime import flow_run
from pydantic import Field, WithJsonSchema
from pydantic.config import JsonDict
from pydantic_core import MISSING

from flows.parameters import SETTINGS, Tree, resolve, settings_of
from flows.presets import DEFAULT_PRESET, preset_choices
from flows.serving import engine
from infini_model.config import Config

R = TypeVar("R")


def _without(node: Tree, *keys: str) -> Tree:
    return {key: value for key, value in node.items() if key not in keys}


@functools.cache
def _tree_schema() -> Tree:
    """JSON schema of a partial configuration: nothing is required, nothing has a default."""
    whole = Config.model_json_schema()
    definitions = whole.pop("$defs")

    def part(node: Tree) -> Tree:
        if reference := node.get("$ref"):
            return part(definitions[reference.rpartition("/")[2]] | _without(node, "$ref"))
        kept = _without(node, "default", "required", "discriminator", "oneOf")
        # With nothing required, a partial source may match more than one kind.
        if choices := node.get("oneOf", node.get("anyOf")):
            kept["anyOf"] = [part(choice) for choice in choices]
        if node.get("type") == "integer" and kept.pop("exclusiveMinimum", None) == 0:
            kept["minimum"] = 1  # The UI's inputs understand it, and word the error better.
        if "properties" in node:
            kept["properties"] = {key: part(value) for key, value in node["properties"].items()}
        return kept

    tree = part(whole)
    # The preset has its own parameter; here it would only change a name.
    del tree["properties"]["run"]["properties"]["preset"]
    return tree


def _schema_at(key: str) -> Tree:
    """JSON schema of one key, without null: an unset parameter is left out."""
    node = _tree_schema()
    for name in key.split("."):
        sections = [choice["properties"] for choice in node.get("anyOf", [node])]
        node = next(section[name] for section in sections if name in section)
    (typed,) = [choice for choice in node.get("anyOf", [node]) if choice["type"] != "null"]
    return _without(typed, "title", "description")


def _parameter(title: str, description: str, schema: Tree, key: str | None = None) -> Any:
    """A parameter that accepts anything, for `Config` to check, and shows `schema` to Prefect.

    By `key`, the setting that it stands for, messages on failures find its title.
    """
    # Without the extra, Prefect takes the parameter's name as the title.
    extra: JsonDict = {"title": title, "description": description, "key": key}
    return Annotated[Any, WithJsonSchema(schema), Field(json_schema_extra=extra)]


def _annotations(names: Iterable[str]) -> dict[str, Any]:
    presets: Tree = {"type": "string", "enum": preset_choices()}
    # The UI shows an object without properties as one JSON editor; `then` is checked all the same.
    # It has no type, so that null is accepted as it is for the other settings.
    advanced: Tree = {"type": "object", "if": True, "then": _without(_tree_schema(), "type")}
    annotations = {
        "preset": _parameter(
            "Preset",
            "Source of all settings left empty. `+stable` adds the settings that avoid NaN losses.",
            presets,
        )
    }
    for name in names:
        setting = SETTINGS[name]
        schema = _schema_at(setting.key)
        annotations[name] = _parameter(setting.title, setting.description, schema, setting.key)
    return annotations | {
        "advanced": _parameter(
            "Advanced",
            "Any other settings, applied over the preset, as JSON such as "
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


def settings(function: Callable[[Config], R]) -> Callable[..., R]:
    """Give a flow's function, which takes a `Config`, the parameters that `SETTINGS` lists for it.

    They are `preset`, the settings that name the flow, and `advanced`.
    """

    @functools.wraps(function)
    def flow_function(**parameters: Any) -> R:
        engine.mark_as_engine(flow_run.id)
        return function(resolve(**parameters))

    annotations = _annotations(settings_of(function.__name__))
    flow_function.__signature__ = _signature(annotations, None)  # type: ignore[attr-defined]
    flow_function.__annotations__ = annotations
    return flow_function


def form(flow: Flow[..., R]) -> Flow[..., R]:
    """Show a flow's settings in the UI as plain inputs that may be left empty.

    With a default of null in the schema, each would be a choice between a type and "None", set to
    "None". Prefect reads this signature for the schema, and the function's own for a run.
    """
    signature = inspect.signature(flow.fn)
    annotations = {name: found.annotation for name, found in signature.parameters.items()}
    flow.__signature__ = _signature(annotations, MISSING)  # type: ignore[attr-defined]
    return flow
