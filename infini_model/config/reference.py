"""A reference of all settings in Markdown: what `infini settings` prints, and docs/settings.md.

It is written from the JSON schema of `Config`, so that it cannot lag behind the code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from infini_model.config.tree import Config, identity_keys

HEADING = """# Settings

Every setting with the values it takes, its default and what it decides. Those with a star decide
the weights: a run cannot be resumed with another value. [Presets, files and
overrides](train.md#presets-files-and-overrides) says where they are set.
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "boolean": "true or false"}

Schema = dict[str, Any]


def reference(prefix: str = "") -> str:
    """The settings at and below `prefix`, all of them by default, with their sections.

    Raises `LookupError` if there are none.
    """
    schema = Config.model_json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    lines = [] if prefix else [HEADING]
    for name, section in schema["properties"].items():
        found: dict[str, Schema] = {}
        for key, leaf in _leaves(name, section, definitions):
            if f"{key}.".startswith(f"{prefix}." if prefix else ""):
                # The kinds of a source have keys in common.
                found.setdefault(key, leaf)
        listed = [_line(key, leaf, definitions) for key, leaf in found.items()]
        if listed:
            about = definitions[_names(section)[0]]["description"]
            lines += [f"## {name}\n", f"{about.splitlines()[0]}\n", *listed, ""]
    if not lines:
        raise LookupError(f"{prefix}: no such setting or section")
    return "\n".join(lines).rstrip()


def _names(schema: Schema) -> list[str]:
    """The definitions of the sections that a value may be."""
    options = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    return [each["$ref"].rpartition("/")[2] for each in options if "$ref" in each]


def _leaves(
    key: str, schema: Schema, definitions: dict[str, Schema]
) -> Iterator[tuple[str, Schema]]:
    """The values below a key, and what may be null or a section."""
    sections = _names(schema)
    if not sections or {"type": "null"} in schema.get("anyOf", []):
        yield key, schema
    for section in sections:
        for name, inner in definitions[section]["properties"].items():
            yield from _leaves(f"{key}.{name}", inner, definitions)


def _line(key: str, schema: Schema, definitions: dict[str, Schema]) -> str:
    star = "\\*" if any(f"{key}.".startswith(f"{each}.") for each in identity_keys()) else ""
    default = ""
    if "default" in schema:
        default = f", default `{json.dumps(schema['default'], ensure_ascii=False)}`"
    return f"- `{key}`{star} ({_type(schema, definitions)}{default}): {schema['description']}"


def _type(schema: Schema, definitions: dict[str, Schema]) -> str:
    """The values of a schema in words."""
    if "anyOf" in schema:
        return " or ".join(_type(each, definitions) for each in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if "const" in schema:  # of one of several kinds
        return "text"
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    kind = schema["type"]
    if kind == "array":
        return f"list of {_type(schema['items'], definitions)}"
    if kind == "object":
        return f"mapping to {_type(schema['additionalProperties'], definitions)}"
    bounds = [f"{sign} {schema[name]:,}" for name, sign in BOUNDS.items() if name in schema]
    if schema.get("format") == "path":
        return "path"
    return " ".join([TYPES.get(kind, str(kind)), *bounds])
