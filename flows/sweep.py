"""The runs of a sweep: all combinations of the values that it gives to some settings."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from infini_model.config import Config, merge, nested, parse_override, validate
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.runs import name_prefix

# How much of a value goes into the name of a run.
VALUE_LENGTH = 40
# What runs of one sweep have in common; all others of these sections cannot be swept.
SHARED_SECTIONS = ("run", "comparison")
SEED = "run.seed"


class Dimension(NamedTuple):
    key: str
    values: list[Any]


def values_of(text: str) -> list[Any]:
    """The values of `KEY=VALUE,VALUE`, each read as YAML; empty if that is not its form.

    A comma within brackets or quotes belongs to a value.
    """
    import yaml

    _, equals, values = text.partition("=")
    try:
        return list(yaml.safe_load(f"[{values}]")) if equals else []
    except yaml.YAMLError:
        return []


def runs_of(config: Config) -> list[Config]:
    """The settings of each run of `comparison.sweep`, with its name; empty without a sweep.

    The values of the first key vary slowest. Names begin with `run.name` if it is set.

    Raises `ConfigError` in one line that names the key.
    """
    if not config.comparison.sweep:
        return []
    if config.launch.num_nodes > 1:
        raise ConfigError("launch.num_nodes: a sweep runs on one machine")
    dimensions = [_dimension(text) for text in config.comparison.sweep]
    keys = [key for key, _ in dimensions]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice}: is given twice; give all its values at once")
    base = merge(config.model_dump(mode="json"), {"comparison": {"runs": [], "sweep": []}})
    combinations = list(itertools.product(*(values for _, values in dimensions)))
    names = _names(config.run.name or name_prefix(config), keys, combinations)
    return [
        _variant(base, dict(zip(keys, values, strict=True)), name)
        for values, name in zip(combinations, names, strict=True)
    ]


def _dimension(text: str) -> Dimension:
    """A dimension of the sweep. Raises `ConfigError` if the text is not of that form."""
    key, equals, given = text.partition("=")
    parse_override(f"{key}{equals}")  # Says what is wrong with its form.
    values = values_of(text)
    if not values:
        raise ConfigError(f"{key}: got {given!r}: takes values with commas between them")
    shown = [json.dumps(value, default=str, sort_keys=True) for value in values]
    if twice := next((each for each in shown if shown.count(each) > 1), None):
        raise ConfigError(f"{key}: {twice} is given twice")
    return Dimension(key, values)


def _variant(base: dict[str, Any], values: dict[str, Any], name: str) -> Config:
    """The settings with these values, and the name of the run."""
    config = validate(functools.reduce(merge, itertools.starmap(nested, values.items()), base))
    for key in values:
        if key.partition(".")[0] in SHARED_SECTIONS and key != SEED:
            raise ConfigError(f"{key}: cannot be swept; it is the same for all runs of a sweep")
    return config.updated(run={"name": name})


def _names(prefix: str, keys: Sequence[str], combinations: Sequence[Sequence[Any]]) -> list[str]:
    """A name for each combination, such as `debug-memory-linear-seed-0`."""
    leaves = [key.rpartition(".")[2] for key in keys]
    parts = leaves if len(set(leaves)) == len(leaves) else list(keys)

    def name(values: Sequence[Any]) -> str:
        named = [f"{part}-{_slug(value)}" for part, value in zip(parts, values, strict=True)]
        return "-".join([prefix, *named])

    names = [name(values) for values in combinations]
    if len(set(names)) == len(names):
        return names
    # Values that differ only in what a name cannot contain.
    return [f"{each}-{number}" for number, each in enumerate(names, 1)]


def _slug(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    without_plus = text.replace("e+", "e")  # A hyphen for the plus sign would be another number.
    return re.sub(r"[^A-Za-z0-9._]+", "-", without_plus).strip("-._")[:VALUE_LENGTH]
