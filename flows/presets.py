"""The presets: complete settings to start from, and remedies that apply over any settings.

A preset is a file in `deployments/presets`. One without data is a remedy, such as `stable`: alone
it applies over the default preset, else over the others and over a file. `run.preset` records those
that a configuration started from, as `arxiv-stable`. `???` stands for what only the user can name.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from infini_model.config import Config, merge, parse_override, read_tree, validate
from infini_model.config.locations import expanded
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.storage import content_key

DEFAULT_PRESET = "quickstart"
_FOLDER = Path(str(files("deployments"))) / "presets"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The presets of the project, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@functools.cache
def remedy_names() -> tuple[str, ...]:
    """The presets that change how to train or to evaluate, not the data."""
    return tuple(name for name in preset_names() if "data" not in _read(name))


@dataclass(frozen=True)
class Invocation:
    """What a command line asks for: the parameters of a flow, and the settings that they mean."""

    parameters: dict[str, Any]
    config: Config

    @classmethod
    def of(cls, presets: Sequence[str], file: Path | None, typed: Mapping[str, Any]) -> Invocation:
        """The presets and what was typed; a file is laid over the presets, and travels whole.

        Raises as `configure` does.
        """
        if file is not None:
            presets, typed = [], merge(_layered(presets, file), _named(typed))
        parameters = {"preset": list(presets) or None, "advanced": dict(typed) or None}
        return cls(parameters, configure(presets, overrides=[typed]))


def configure(presets: Iterable[str], overrides: Iterable[str | Mapping[str, Any]] = ()) -> Config:
    """The settings of the presets, the remedies and the overrides, in that order.

    Each applies over those before it. Without presets, the library's defaults.

    Raises `ConfigError` in one line, also for what a preset leaves to the user and nobody gave.
    """
    changes = [parse_override(text) if isinstance(text, str) else text for text in overrides]
    typed = _named(functools.reduce(merge, changes, {}))
    return validate(merge(_layered(presets), typed))


def _layered(presets: Iterable[str], file: Path | None = None) -> dict[str, Any]:
    """The tree of the presets, the file over them and the remedies over both, with its origin."""
    names = list(presets)
    if names and set(names) <= set(remedy_names()) and file is None:
        names.insert(0, DEFAULT_PRESET)
    trees = {name: _read(name) for name in names}
    tree: dict[str, Any] = {}
    for name in (each for each in trees if each not in remedy_names()):
        tree = _over(tree, trees[name])
    if file is not None:
        own = read_tree(file)
        recorded = _section(own, "run").get("preset")
        names = [str(recorded), *names] if recorded else names
        tree = merge(tree, _named(own))
    for name in (each for each in trees if each in remedy_names()):
        tree = _over(tree, trees[name])
    return merge(tree, {"run": {"preset": "-".join(dict.fromkeys(names))}}) if names else tree


def _named(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """`change` with a name for the dataset if it has a source and no name.

    Under the name of a preset the documents would share the tokenizer that is trained for it.
    """
    data = _section(change, "data")
    source, named = _section(data, "source"), _section(data, "sources")
    origins = [_origins(named[name]) for name in sorted(named)] or [_origins(source)]
    if "name" in data or not any(origins):
        return change
    word, key = "-".join(sorted(named)), content_key(origins)
    if not named:
        paths, key = origins[0], content_key(origins[0])
        word = _word([f"{path}/" for path in paths] if "repository" in source else paths)
    return merge(change, {"data": {"name": f"{word or 'documents'}-{key[:6]}"}})


def _origins(source: Any) -> list[str]:
    """The paths of a source from the root, or its repository; none if it has neither."""
    if not isinstance(source, Mapping):
        return []
    if "repository" in source:
        return [str(source["repository"])]
    paths = source.get("paths", [])
    return [_absolute(str(path)) for path in (paths if isinstance(paths, list) else [paths])]


def _word(origins: Sequence[str]) -> str:
    """The last folder that all paths have in common, before any pattern, or the repository."""
    folders = [re.split(r"[*?\[]", each)[0].split("/")[:-1] for each in origins]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    common = [parts[0] for parts in shared]
    return re.sub(r"[^A-Za-z0-9._-]+", "", common[-1] if common else "").lstrip("._-")


def _absolute(path: str) -> str:
    """A path from the root; a URL or one below `{stdlib}` as it is."""
    return path if "://" in path or path.startswith("{") else str(expanded(path).absolute())


def _over(tree: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """A preset over a tree, whose pretrained weights keep their own shape."""
    below = _section(tree, "model").get("initial_weights")
    laid = merge(tree, preset)
    return laid if below is None else merge(laid, {"model": {"initial_weights": below}})


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigError(f"preset {name!r} is unknown; available: {', '.join(preset_names())}")
    return read_tree(_FOLDER / f"{name}.yaml")
