"""Turns a validation error into one line that names the key and the values it takes."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infini_model.config.names import NAMES
from infini_model.config.tree import Config

# What the user is to give for a key that a preset leaves open.
WHAT_TO_GIVE = {
    "model.initial_weights": "a pretrained Llama: model.initial_weights=FOLDER or "
    "meta-llama/Llama-3.2-1B"
}


def one_line(error: ValidationError) -> str:
    """The first error of a tree that `Config` rejected, as one line."""
    first = error.errors(include_url=False)[0]
    # A discriminated union adds its tag (`files`, `hub`) to the path; the user did not write it.
    key = ".".join(str(part) for part in first["loc"] if part not in ("files", "hub"))
    if first["type"] == "extra_forbidden":
        return _unknown(key, first["input"])
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "union_tag_invalid":
        return f"{key}.kind: got {first['ctx']['tag']!r}: takes {first['ctx']['expected_tags']}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key}: got {first['input']!r}: {message[:1].lower()}{message[1:]}"


def left_open(key: str, tree: Mapping[str, Any]) -> str:
    """One line for a key that a tree leaves to the user: what needs it, and what to give."""
    run = tree.get("run")
    preset = run.get("preset") if isinstance(run, Mapping) else None
    needs = "give" if preset is None else f"the preset {preset} needs"
    return f"{key}: missing; {needs} {WHAT_TO_GIVE.get(key, f'a value: {key}=VALUE')}"


def meant_by(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` somebody who typed `name` meant; None if that is a guess.

    That is one nearly of the same letters, or the only one that has all of its words.
    """
    known, words = list(names), set(name.split("_"))
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
        return near[0]
    longer = [each for each in known if words <= set(each.split("_"))]
    return longer[0] if len(longer) == 1 else None


@functools.cache
def all_keys() -> tuple[str, ...]:
    """Full name of every setting, such as `training.max_steps`, in tree order."""
    return tuple(dict.fromkeys(_keys_below(Config, "")))


def _keys_below(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        below = list(_sections(field.annotation))
        for inner in below:
            yield from _keys_below(inner, f"{prefix}{name}.")
        if not below:
            yield f"{prefix}{name}"


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections that a field may hold: none for a plain value, two for a source."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def _unknown(key: str, value: Any) -> str:
    """Message for an unknown key, or for the first key in an unknown section."""
    if key in all_keys():
        return f"{key}: unknown key for this kind of source"
    section, _, name = key.rpartition(".")
    near = meant_by(name, _names_in(section))
    if isinstance(value, Mapping) and value and not near:
        inner = next(iter(value))
        return _unknown(f"{key}.{inner}", value[inner])
    if meant := NAMES.get(key, NAMES.get(name)):
        return f"{key}: unknown key; {f'it is {meant}' if meant in all_keys() else meant}"
    others = _keys_like(key)
    if namesakes := [known for known in others if known.rpartition(".")[2] == name]:
        return f"{key}: unknown key; it is {_either(namesakes)}"
    if near:
        return f"{key}: unknown key; did you mean {section and section + '.'}{near}?"
    leaves = {known.rpartition(".")[2]: known for known in reversed(others)}
    if near := meant_by(name, leaves):
        return f"{key}: unknown key; did you mean {leaves[near]}?"
    return f"{key}: unknown key"


def _keys_like(key: str) -> list[str]:
    """The keys below the section of a key and as deep elsewhere; all if there is no such section.

    Who knows the section of a setting does not mean one far below another.
    """
    section, depth = key.rpartition(".")[0], key.count(".")
    below = [known for known in all_keys() if known.startswith(f"{section}.")]
    return [
        known for known in all_keys() if not below or known in below or known.count(".") == depth
    ]


def _either(names: list[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _names_in(section: str) -> list[str]:
    """Keys and subsections directly in a section; empty if the section does not exist."""
    prefix = f"{section}." if section else ""
    below = (key[len(prefix) :] for key in all_keys() if key.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in below))
