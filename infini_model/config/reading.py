"""Reads presets, files and overrides into the tree, and explains mistakes in one line.

`load_config` merges, from the weakest to the strongest: the defaults of the tree, a preset or a
file, and dotted overrides such as `training.max_steps=20`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infini_model.config.tree import Config, source_kind
from infini_model.runtime.errors import ConfigError


def _presets() -> Traversable:
    return files("deployments") / "presets"


def preset_names() -> list[str]:
    """The presets that come with the project, in alphabetical order."""
    return sorted(Path(f.name).stem for f in _presets().iterdir() if f.name.endswith(".yaml"))


def _parse_yaml(text: str) -> Any:
    """Read YAML. Raises `ValueError`; a machine that reads JSON alone needs no PyYAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _parse_mapping(text: str, origin: str) -> dict[str, Any]:
    try:
        tree = json.loads(text) if origin.endswith(".json") else _parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: holds {type(tree).__name__}, needs a mapping of sections")
    return tree


def _read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigError(f"preset {name!r} is unknown; there are: {', '.join(preset_names())}")
    text = (_presets() / f"{name}.yaml").read_text(encoding="utf-8")
    return merge(_parse_mapping(text, f"{name}.yaml"), {"run": {"preset": name}})


def read_file(path: Path) -> dict[str, Any]:
    """The sections of a YAML or JSON file, unchecked. Raises `ConfigError` in one line."""
    try:
        return _parse_mapping(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `change` laid over it; neither is altered.

    A source of another kind takes the place of the one in `base`: they have other keys.
    """
    if change.get("kind", source_kind(base)) != source_kind(base):
        return dict(change)
    merged = dict(base)
    for key, value in change.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`training.max_steps=20` as a nested mapping; the value is read as YAML.

    Raises `ConfigError` where there is no `=` or the value is no YAML.
    """
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} is not of the form section.key=value")
    try:
        tree: Any = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {value!r} is no YAML value") from error
    *sections, leaf = key.split(".")
    change = {leaf: tree}
    for part in reversed(sections):
        change = {part: change}
    return change


def _one_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    # A discriminated union puts its tag (`files`, `hub`) into the path; the user never wrote it.
    key = ".".join(str(part) for part in first["loc"] if part not in ("files", "hub"))
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "union_tag_invalid":
        return f"{key}.kind: got {first['ctx']['tag']!r}: takes {first['ctx']['expected_tags']}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):
        return f"{key}: {message}" if key else message
    return f"{key}: got {first['input']!r}: {message[:1].lower()}{message[1:]}"


def validate(tree: Mapping[str, Any]) -> Config:
    """The tree as a `Config`. Raises `ConfigError`, one line that names the first wrong key."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error


def load_config(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Iterable[str | Mapping[str, Any]] = (),
) -> Config:
    """Read a preset or a file (not both), lay the overrides over it in turn, and check the whole.

    Raises `ConfigError` in one line: an unknown preset, a missing file, an unknown key, or a
    value of a wrong type or range.
    """
    if preset is not None and file is not None:
        raise ConfigError("give --preset or --config, not both")
    tree: dict[str, Any] = {}
    if preset is not None:
        tree = _read_preset(preset)
    elif file is not None:
        tree = read_file(file)
    for override in overrides:
        change = parse_override(override) if isinstance(override, str) else override
        tree = merge(tree, change)
    return validate(tree)


def dump_config(config: Config) -> str:
    """The whole tree as YAML, which `load_config` reads back to an equal `Config`."""
    import yaml

    tree = config.model_dump(mode="json")
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
