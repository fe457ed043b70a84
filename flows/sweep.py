"""The runs of a sweep: all combinations of the values that it gives to some settings."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from flows.presets import Invocation, configure
from infini_model.config import Config, nested, parse_override, read_typed
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.runs import name_prefix

# How much of a value goes into the name of a run.
VALUE_LENGTH = 40
# What runs of one sweep have in common; all others of these sections cannot be swept.
SHARED_SECTIONS = ("run", "comparison")
SEED = "run.seed"


def values_of(text: str) -> list[str]:
    """The values of `KEY=VALUE,VALUE`, as they were typed; empty if that is not its form.

    A comma within brackets or quotes belongs to a value.
    """
    import yaml

    _, equals, values = text.partition("=")
    if not (equals and values):
        return []
    try:
        found: Any = yaml.compose(f"[{values}]", yaml.SafeLoader)
    except yaml.YAMLError:  # Such as *.txt, which is text.
        return values.split(",")
    marks = [(each.start_mark.index, each.end_mark.index) for each in found.value]
    return [values[begin - 1 : end - 1] for begin, end in marks]


def runs_of(asked: Invocation) -> list[Config]:
    """The settings of each run of `comparison.sweep`, with its name; empty without a sweep.

    Each is what `infini run` makes of the same preset, typed settings and values; runs of the same
    settings are one. The values of the first key vary slowest. Names begin with `run.name` if it is
    set.

    Raises `ConfigError` in one line that names the key.
    """
    config = asked.config
    if not config.comparison.sweep:
        return []
    if config.launch.num_nodes > 1:
        raise ConfigError("launch.num_nodes: a sweep runs on one machine")
    dimensions = [_dimension(text) for text in config.comparison.sweep]
    keys = [key for key, _ in dimensions]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice}: is given twice; give all its values at once")
    runs, combinations = list[Config](), list[Sequence[Any]]()
    for values in itertools.product(*(values for _, values in dimensions)):
        run = _variant(asked, dict(zip(keys, values, strict=True)))
        if run not in runs:
            runs.append(run)
            combinations.append(values)
    names = _names(config.run.name or name_prefix(config), keys, combinations)
    return [run.updated(run={"name": name}) for run, name in zip(runs, names, strict=True)]


def _dimension(text: str) -> tuple[str, list[Any]]:
    """A key and its values. Raises `ConfigError` if the text is not of that form."""
    key, equals, given = text.partition("=")
    parse_override(f"{key}{equals}")  # Says what is wrong with its form.
    values = [read_typed(key, value) for value in values_of(text)]
    if not values:
        raise ConfigError(f"{key}: got {given!r}: takes values with commas between them")
    return key, values


def _variant(asked: Invocation, values: dict[str, Any]) -> Config:
    """The settings of a run with these values."""
    presets, advanced = asked.parameters["preset"] or [], asked.parameters["advanced"] or {}
    changes = [advanced, *itertools.starmap(nested, values.items())]
    changes += [nested("comparison", {"runs": [], "sweep": []})]
    config = configure(presets, overrides=changes)
    for key in values:
        if key.partition(".")[0] in SHARED_SECTIONS and key != SEED:
            raise ConfigError(f"{key}: cannot be swept; it is the same for all runs of a sweep")
    return config


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
