"""The presets: whole settings to begin from, and remedies that are laid over any settings.

A preset is a file of `deployments/presets`. One that names no data is a remedy, such as `stable`:
alone it lies over the default preset, beside others or beside a file it lies over those. What a
configuration began from is written `arxiv+stable`, in `run.preset` as in the form.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from infini_model.config import Config, load_config, read_tree
from infini_model.runtime.errors import ConfigError

DEFAULT_PRESET = "quickstart"
JOIN = "+"
_FOLDER = Path(str(files("deployments"))) / "presets"


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The presets that come with the project, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@functools.cache
def remedy_names() -> tuple[str, ...]:
    """The presets that change how a training is done, not what is trained on what."""
    return tuple(name for name in preset_names() if "data" not in _read(name))


def preset_choices() -> list[str]:
    """What a form offers: each preset, then each whole one with a remedy laid over it."""
    whole = [name for name in preset_names() if name not in remedy_names()]
    return [*preset_names(), *(f"{one}{JOIN}{over}" for one in whole for over in remedy_names())]


def is_preset(text: str | None) -> bool:
    """Whether `run.preset` names presets that are still there, in the form that it is recorded."""
    names = (text or "").split(JOIN)
    return set(names) <= set(preset_names()) and not set(names) <= set(remedy_names())


def configure(
    presets: Iterable[str] = (),
    file: Path | None = None,
    overrides: Iterable[str | Mapping[str, Any]] = (),
) -> Config:
    """The settings of the file or else of the presets, the overrides laid over them in turn.

    Presets are laid one over the other in their order, `arxiv+stable` being two of them. Over a
    file only remedies are laid. With neither presets nor a file, the library's defaults.

    Raises `ConfigError` in one line: an unknown preset, a whole preset beside a file, and whatever
    `load_config` refuses.
    """
    names = [name for preset in presets for name in preset.split(JOIN)]
    layers = [_read(name) for name in names]
    whole = [name for name in names if name not in remedy_names()]
    if whole and file is not None:
        remedies = ", ".join(remedy_names())
        raise ConfigError(
            f"give --preset or --config, not both: {whole[0]} would replace the settings of "
            f"{file} (what can be laid over a file: {remedies})"
        )
    if names and not whole and file is None:
        names.insert(0, DEFAULT_PRESET)
        layers.insert(0, _read(DEFAULT_PRESET))
    if file is not None:
        tree = read_tree(file)
        layers.insert(0, tree)
        names = [*_recorded(tree), *names]
    origin = [{"run": {"preset": JOIN.join(names)}}] if names else []
    return load_config(overrides=[*layers, *origin, *overrides])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ConfigError(f"preset {name!r} is unknown; there are: {', '.join(preset_names())}")
    return read_tree(_FOLDER / f"{name}.yaml")


def _recorded(tree: Mapping[str, Any]) -> list[str]:
    """The presets that a file says it began from, if it does."""
    run = tree.get("run")
    preset = run.get("preset") if isinstance(run, Mapping) else None
    return [str(preset)] if preset else []
