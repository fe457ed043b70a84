"""Reads files and overrides into a `Config`.

`load_config` merges, in increasing precedence: the defaults, a file, and overrides, which are
partial trees or dotted strings such as `training.max_steps=20`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infini_model.config.data import source_kind
from infini_model.config.explaining import left_open, one_line
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS, ModelConfig
from infini_model.config.tree import Config
from infini_model.runtime.errors import ConfigError

# What stands in a preset or a file for a value that has to be given over it, as in OmegaConf.
LEFT_OPEN = "???"
# A string, which may contain `//` (a URL), or a comment.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def read_tree(path: Path) -> dict[str, Any]:
    """The unvalidated tree in a YAML or JSON file; JSON may have comments, and the guides' names.

    Raises `ConfigError` that names the file, and the line of a syntax error.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse = _parse_json if path.suffix == ".json" else _parse_yaml
        tree = parse(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, needs a mapping of sections")
    _rename(tree)
    return tree


def _parse_json(text: str) -> Any:
    return json.loads(_STRING_OR_COMMENT.sub(_blank_comment, text))


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _blank_comment(found: re.Match[str]) -> str:
    """Spaces for a comment, so that lines and columns keep their numbers."""
    return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])


def _rename(tree: dict[str, Any]) -> None:
    """Put the keys here in place of the names of the guides' own files.

    `training.num_workers` has no key: finished shards need no loader workers.
    """
    training, system = tree.get("training"), tree.get("system")
    if isinstance(training, dict):
        training.pop("num_workers", None)
        if "grad_accum_nums" in training:
            training["gradient_accumulation_steps"] = training.pop("grad_accum_nums")
    if isinstance(system, dict) and system.keys() <= {"device", "device_id"}:
        del tree["system"]
        device = str(system.get("device", "cuda"))
        gpus = str(system.get("device_id", "auto")) if device == "cuda" else device
        tree["launch"] = {"gpus": gpus} | dict(tree.get("launch") or {})


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `base` with the leaves of `change` applied.

    A source of another kind replaces the one in `base`, since its keys differ. Setting one of
    `epochs` and `max_steps` removes the other; setting `initial_weights` removes the shape. A
    schedule replaces the one in `base`.
    """
    of_one_kind = change.keys() & {"kind", "paths", "repository"}
    if of_one_kind and source_kind(change) != source_kind(base):
        return dict(change)
    merged = dict(base)
    for given, other in (("epochs", "max_steps"), ("max_steps", "epochs")):
        if change.get(given) is not None:
            merged.pop(other, None)
    if change.get("initial_weights") is not None:
        for name in ModelConfig.model_fields.keys() - BESIDE_INITIAL_WEIGHTS:
            merged.pop(name, None)
    for key, value in change.items():
        below = None if key == "context_schedule" else merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """Parse `training.max_steps=20` into a nested mapping; the value is read as YAML.

    Raises `ConfigError` if there is no `=` or the value is not valid YAML.
    """
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is not valid YAML") from error
    return nested(key, tree)


def nested(key: str, value: Any) -> dict[str, Any]:
    """The tree with one value, such as `{"training": {"max_steps": 20}}`."""
    return functools.reduce(lambda below, part: {part: below}, reversed(key.split(".")), value)


def check_typed(changes: Iterable[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` if one key is given twice with different values, or two exclude another.

    `changes` are what a user typed: options, overrides, fields of a form. One would be dropped.
    """
    typed: dict[str, Any] = {}
    for change in changes:
        for key, value in _leaves(change):
            if key in typed and not _is_same(typed[key], value):
                raise ConfigError(f"{key}: is given twice, as {typed[key]} and as {value}")
            typed[key] = value
    if None not in (typed.get("training.epochs"), typed.get("training.max_steps")):
        raise ConfigError("training.epochs: cannot be combined with training.max_steps")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same setting: 3 and "3", or 0.0003 and "3e-4"."""
    if str(one) == str(other):
        return True
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return False


def validate(tree: Mapping[str, Any]) -> Config:
    """Validate a tree. Raises `ConfigError`: one line that names the first wrong key.

    A key whose value is `???` is missing: whoever wrote the tree left it to whoever uses it.
    """
    for key, value in _leaves(tree):
        if value == LEFT_OPEN:
            raise ConfigError(left_open(key, tree))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(one_line(error)) from error


def load_config(
    file: Path | None = None, overrides: Iterable[str | Mapping[str, Any]] = ()
) -> Config:
    """Read a file, if given, apply the overrides in order, and validate the result.

    Raises `ConfigError`, one line long, for an unreadable file, an unknown key, or a value of the
    wrong type or out of range.
    """
    tree = {} if file is None else read_tree(file)
    for override in overrides:
        change = parse_override(override) if isinstance(override, str) else override
        tree = merge(tree, change)
    return validate(tree)


def dump_config(config: Config) -> str:
    """The tree as YAML; `load_config` reads it back to an equal `Config`."""
    import yaml

    tree = config.model_dump(mode="json")
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
