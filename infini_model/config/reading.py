"""Reads files and overrides into a `Config`.

`load_config` merges, in increasing precedence: the defaults, a file, and overrides, which are
partial trees or dotted strings such as `training.max_steps=20`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from infini_model.config.data import source_kind
from infini_model.config.explaining import key_of, left_open, one_line, types_of
from infini_model.config.locations import expanded
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS, ModelConfig
from infini_model.config.tree import DECIDE_WEIGHTS, Config
from infini_model.runtime.errors import ConfigError

log = logging.getLogger(__name__)

# What stands in a preset or a file for a value that has to be given over it, as in OmegaConf.
LEFT_OPEN = "???"
# Of which one is given, by their section.
EXCLUSIVE = (("training", "epochs", "max_steps"), ("data", "source", "sources"))
# Sections of which every key decides the weights.
WHOLLY_DECISIVE = DECIDE_WEIGHTS.keys() - {"run"}
# A string, which may contain `//` (a URL), or a comment.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which refuses what would lose the first of two values."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _once_each((key.value, None) for key, _ in node.value if isinstance(key.value, str))
        return super().construct_mapping(node, deep)


def _once_each(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of these pairs. Raises `ValueError` for a key that stands twice."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key} stands twice in one section")
        found[key] = value
    return found


def read_tree(path: Path) -> dict[str, Any]:
    """The unvalidated tree in a YAML or JSON file; JSON may have comments, and the guides' names.

    Raises `ConfigError` that names the file, and the line of a syntax error.
    """
    try:
        text = expanded(path).read_text(encoding="utf-8")
        parse = _parse_json if path.suffix == ".json" else _parse_yaml
        tree = parse(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, needs a mapping of sections")
    _rename(tree)
    return tree


def read_recorded(path: Path) -> dict[str, Any]:
    """The tree in a file that this or another version has written, without the keys unknown here.

    A warning names them. Raises `ConfigError` that names the file if a section that decides the
    weights has some, or another value is wrong.
    """
    tree, unknown = read_tree(path), []
    try:
        Config.model_validate(tree)
    except ValidationError as error:
        unknown = [
            each["loc"]
            for each in error.errors(include_url=False)
            if each["type"] == "extra_forbidden" and each["loc"][0] not in WHOLLY_DECISIVE
        ]
    for *above, name in unknown:
        section: Any = tree
        for part in above:
            section = section.get(part, section)  # A kind of source is no key of the tree.
        section.pop(name, None)
    if unknown:
        warn_of_unknown(str(path), ", ".join(map(key_of, unknown)))
    try:
        validate(tree)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return tree


@functools.cache
def warn_of_unknown(place: str, keys: str) -> None:
    """Log, once in a process, that keys of a recorded file are not read."""
    log.warning("%s: %s: unknown here, written by another version; left out", place, keys)


def _parse_json(text: str) -> Any:
    return json.loads(_STRING_OR_COMMENT.sub(_blank_comment, text), object_pairs_hook=_once_each)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - it is a `SafeLoader`


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
        launch = tree.get("launch") or {}
        tree["launch"] = {"gpus": gpus} | launch if isinstance(launch, dict) else launch


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `base` with the leaves of `change` applied.

    A source of another kind replaces the one in `base`, since its keys differ. Setting one of
    `epochs` and `max_steps`, or of `source` and `sources`, removes the other; setting
    `initial_weights` removes the shape. A schedule replaces the one in `base`.
    """
    of_one_kind = change.keys() & {"kind", "paths", "repository"}
    if of_one_kind and source_kind(change) != source_kind(base):
        return dict(change)
    merged = dict(base)
    for _, *pair in EXCLUSIVE:
        for given, other in (pair, pair[::-1]):
            if change.get(given) is not None:
                merged.pop(other, None)
    if change.get("initial_weights") is not None:
        for name in ModelConfig.model_fields.keys() - BESIDE_INITIAL_WEIGHTS:
            merged.pop(name, None)
    for key, value in change.items():
        below = None if key.endswith("_schedule") else merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """Parse `training.max_steps=20` into a nested mapping; `read_typed` reads the value.

    Raises `ConfigError` if there is no `=` or the value is not valid YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    return nested(key, read_typed(key, value))


def read_typed(key: str, text: str) -> Any:
    r"""The value that somebody typed for a setting: YAML, except where the setting is text.

    Text is kept as it was typed, unless it is in YAML's quotes; `null` and nothing are null where
    the setting may be. A list of text is in YAML's brackets, or text that is its only item. In what
    stands between texts, `\n` is a newline.

    Raises `ConfigError` if it is not valid YAML where it has to be.
    """
    types, is_listed = types_of(key), text[:1] + text[-1:] == "[]"
    try:
        if types.isdisjoint({"string", "list of string"}):
            return _parse_yaml(text)
        if "null" in types and text in ("", "null"):
            return None
        if is_listed and "list of string" in types:
            return yaml.load(text, yaml.BaseLoader)  # noqa: S506 - it reads nothing but text
    except (ValueError, yaml.YAMLError) as error:
        if types:
            raise ConfigError(f"{key}: {text!r} is not valid YAML") from error
        return text  # An unknown key, which validation explains.
    quoted = None
    if text.startswith(("'", '"')):
        with contextlib.suppress(ValueError, yaml.YAMLError):
            quoted = _parse_yaml(text)
    if isinstance(quoted, str):
        text = quoted
    elif key.endswith((".separator", ".template")):
        text = text.replace("\\n", "\n")
    return text if "string" in types else [text]


def nested(key: str, value: Any) -> dict[str, Any]:
    """The tree with one value, such as `{"training": {"max_steps": 20}}`."""
    return functools.reduce(lambda below, part: {part: below}, reversed(key.split(".")), value)


def merge_typed(changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge what a user typed: options, overrides, fields of a form.

    Raises `ConfigError` if one key is given twice with different values, or two exclude another:
    one would be dropped.
    """
    tree, typed = dict[str, Any](), dict[str, Any]()
    for change in changes:
        tree = merge(tree, change)
        for key, value in leaves(change):
            if key in typed and not _is_same(typed[key], value):
                raise ConfigError(f"{key}: is given twice, as {typed[key]} and as {value}")
            typed[key] = value
    given = {tuple(key.split(".")[:2]) for key, value in typed.items() if value is not None}
    for section, one, other in EXCLUSIVE:
        if {(section, one), (section, other)} <= given:
            raise ConfigError(f"{section}.{one}: cannot be combined with {section}.{other}")
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree of settings by their dotted keys."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves in which two trees of settings differ: their keys and both values."""
    for key in {**one, **other}:
        value, another = one.get(key), other.get(key)
        if isinstance(value, Mapping) and isinstance(another, Mapping):
            yield from differences(value, another, f"{above}{key}.")
        elif value != another:
            yield f"{above}{key}", value, another


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe the first leaf in which the settings `one` differ from those recorded, `other`."""
    key, value, recorded = next(differences(one, other))
    return f"{key} is {recorded!r}, not {value!r}"


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
    for key, value in leaves(tree):
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

    Raises `ConfigError` in one line.
    """
    tree = {} if file is None else read_tree(file)
    for override in overrides:
        change = parse_override(override) if isinstance(override, str) else override
        tree = merge(tree, change)
    return validate(tree)


def dump_config(config: Config) -> str:
    """The tree as YAML; `load_config` reads it back to an equal `Config`."""
    tree = config.model_dump(mode="json")
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
