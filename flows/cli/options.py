"""The options that the `infini` commands share, and the settings that they mean.

An option is a short name for a key of the configuration tree; all other keys are set by dotted
overrides such as `training.learning_rate=3e-4`.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from flows.presets import DEFAULT_PRESET, Invocation
from flows.sweep import values_of
from infini_model.config import Config, load_config, merge, merge_typed, nested, parse_override
from infini_model.config.explaining import NAMES, meant_by
from infini_model.config.locations import expanded, is_url
from infini_model.runtime.errors import ConfigError, UserError

P = ParamSpec("P")
R = TypeVar("R")
Tree = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """An option of the command line, perhaps a short name for the setting `key`.

    One without `help` is taken for the guides' sake, and not listed. `value` is what a flag sets,
    `kind` the type of all other values. `used_by` are the commands that have it; None is all.
    """

    help: str = ""
    key: str | None = None
    value: Any = True
    used_by: tuple[str, ...] | None = None
    kind: Any = str | None
    names: tuple[str, ...] = ()
    metavar: str | None = None

    def parameter(self, name: str) -> inspect.Parameter:
        """Of the function that typer makes a command of."""
        shown = typer.Option(
            *(self.names or (f"--{name.replace('_', '-')}",)),
            help=self.help,
            metavar=self.metavar,
            hidden=not self.help,
        )
        default = False if self.kind is bool else None
        annotation = Annotated[self.kind, shown]  # type: ignore[name-defined]
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


_TRAIN = ("run", "train", "compare")
_WRITE = ("generate", "chat")
_MODEL = (*_TRAIN, "evaluate", *_WRITE)
_FLOWS = (*_TRAIN, "preprocess", "evaluate")
# `doctor` estimates the memory of a training.
_ESTIMATED = (*_TRAIN, "doctor")
# What decides how many windows the first batch has, which `show` prints.
_BATCHED = (*_ESTIMATED, "show")
_DEVICES = (*_MODEL, "preprocess", "doctor")
_training = functools.partial(Option, used_by=_TRAIN)
# In the order of the help. What a few of them set depends on more than their value: see
# `_single_keys`, `_devices` and `_data`.
OPTIONS = {
    "preset": Option(
        "Preset to start from (default: quickstart). Repeat it to apply several in order; stable "
        "applies over any other, and over --config.",
        kind=list[str] | None,
        metavar="NAME",
    ),
    "config": Option(
        "YAML or JSON file to start from.",
        kind=Path | None,
        names=("--config", "--config-file", "-c"),
    ),
    "output_dir": Option(
        "Folder for datasets, runs and records (default: outputs), or an address.",
        key="run.output_dir",
    ),
    "data_dir": Option(
        "Folder or address of datasets, or one finished dataset, also by its name.",
        used_by=(*_FLOWS, "show"),
        names=("--data-dir", "-d"),
    ),
    "gpus": Option(
        "GPUs to use: auto, all, cpu, or numbers such as 0,3.", used_by=(*_MODEL, "doctor")
    ),
    "gpu": Option(
        "Use one GPU, by its number.",
        used_by=_DEVICES,
        kind=int | None,
        names=("--gpu", "--gpu-id", "-g"),
    ),
    "no_gpu": Option("Use only the CPU.", used_by=_DEVICES, kind=bool),
    "batch_size": Option(
        "Windows per process and micro-batch.",
        key="training.batch_size",
        used_by=(*_BATCHED, "preprocess"),
        kind=int | None,
    ),
    "gpu_device": Option(
        "Device for tokenization, such as cuda:0.", used_by=(*_TRAIN, "preprocess")
    ),
    "disable_flash_attn": Option(
        "Use PyTorch's attention where flash-attn is installed.",
        key="launch.attention_backend",
        value="sdpa",
        used_by=(*_MODEL, "doctor"),
        kind=bool,
    ),
    "tensorboard_dir": _training(
        "Folder for TensorBoard logs.",
        key="logging.tensorboard_dir",
        names=("--tensorboard-dir", "-t"),
    ),
    "skip_preprocessing": Option("Use the newest finished dataset.", used_by=_FLOWS, kind=bool),
    "distributed": Option("Train on all GPUs, one process each.", used_by=_ESTIMATED, kind=bool),
    "num_nodes": Option(
        "Number of machines to train on.",
        key="launch.num_nodes",
        used_by=_BATCHED,
        kind=int | None,
    ),
    "max_steps": _training("Total optimizer steps.", key="training.max_steps", kind=int | None),
    "tasks": Option(
        "What to measure, separated by commas, such as loss,sample.",
        key="evaluation.tasks",
        used_by=("run", "evaluate"),
    ),
    "force": _training(
        "Train even if the memory estimate says it cannot fit.", key="launch.force", kind=bool
    ),
    "debug": Option(
        "Enable debug logs and checks; the default preset is then debug.",
        key="logging.debug",
        used_by=(*_FLOWS, *_WRITE, "doctor"),
        kind=bool,
    ),
    "use_gpu_dataloader": _training(kind=bool),
    "fp16": Option(
        key="training.precision",
        used_by=(*_ESTIMATED, *_WRITE),
        kind=bool | None,
        names=("--fp16/--no-fp16",),
    ),
    "epochs": _training(key="training.epochs"),
    "learning_rate": _training(key="training.learning_rate"),
    "nproc_per_node": Option(key="launch.processes", used_by=_BATCHED),
    "save_dir": Option(key="run.output_dir"),
    **{
        name: Option(text, key=f"evaluation.sample.{name}", used_by=_WRITE, kind=kind)
        for name, kind, text in (
            ("max_new_tokens", int | None, "Maximum number of tokens to generate."),
            ("temperature", float | None, "Sampling temperature; 0 picks the most likely token."),
            ("top_k", int | None, "Sample from this many of the most likely tokens."),
            ("top_p", float | None, "Sample from the fewest tokens with this total probability."),
        )
    },
    "seed": Option("Seed for sampling.", key="run.seed", used_by=_WRITE, kind=int | None),
    "sweep": Option(
        "First run all combinations of the settings with several values.",
        used_by=("compare",),
        kind=bool,
    ),
}
# The arguments of a command.
ANY_SETTINGS = typer.Argument(
    metavar="KEY=VALUE", help="Any settings, such as training.max_steps=20."
)
RUNS_OR_SETTINGS = typer.Argument(
    metavar="RUN or KEY=VALUE",
    help="Names or folders of runs to compare, and any settings. With --sweep, a setting with "
    "several values, such as model.memory=linear,none, is one to vary.",
)
DATASET_OR_SETTINGS = typer.Argument(
    metavar="[DATASET] KEY=VALUE",
    help="Name, folder or address of a dataset (default: the newest), and any settings.",
)
ARGUMENTS = {"compare": RUNS_OR_SETTINGS, "show": DATASET_OR_SETTINGS}
OutputDir = Annotated[str | None, typer.Option(help=OPTIONS["output_dir"].help)]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir", "-d", help="Folder or address of datasets (default: in the output folder)."
    ),
]
RunOrNewest = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Name or folder of a run (default: the newest)."),
]
# Of a `typer.Typer`: an option may be written with underscores, as in the guides.
UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}


def unknown(option: str, listed: Iterable[str], *, with_settings: bool) -> str:
    """One line for an option that a command does not have, whose help lists others.

    `with_settings` says whether the command takes KEY=VALUE.
    """
    name = option.lstrip("-").replace("-", "_")
    meant = NAMES.get(name)
    if meant is None and name in OPTIONS:
        return f"{option}: this command does not use it"
    # What `run.output_dir` is to a command is its option, also where the setting cannot change.
    if meant not in (None, "run.output_dir") and with_settings:
        return f"{option}: unknown option; {meant if ' ' in meant else f'it is {meant}=VALUE'}"
    names = {other.lstrip("-").replace("-", "_"): other for other in listed}
    near = meant_by((meant or name).rpartition(".")[2], names)
    return f"{option}: unknown option" + (f"; did you mean {names[near]}?" if near else "")


def _devices(given: Mapping[str, Any], command: str) -> Tree:
    names = ("no_gpu", "gpu", "gpus", "distributed")
    # 0 is a GPU.
    chosen = [name for name in names if given[name] is not None and given[name] is not False]
    if chosen[1:] and chosen != ["gpus", "distributed"]:
        both = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise ConfigError(f"{both}: both choose the devices; give one of them")
    gpus, device = given["gpus"], given["gpu_device"]
    if given["gpu"] is not None:
        gpus, device = str(given["gpu"]), device or f"cuda:{given['gpu']}"
    if given["no_gpu"]:
        gpus, device = "cpu", "cpu"
    if given["distributed"] and gpus is None:
        gpus = "all"
    change: Tree = {}
    if gpus is not None and command != "preprocess":
        change["launch"] = {"gpus": gpus}
    if device is not None:
        change["data"] = {"device": device}
    return change


def _data(given: Mapping[str, Any], command: str) -> Tree:
    if given["data_dir"] is None:
        return {}
    folder = given["data_dir"] if is_url(given["data_dir"]) else str(expanded(given["data_dir"]))
    if command in ("train", "evaluate") or given["skip_preprocessing"]:
        return {"data": {"folder": folder}}
    if not is_url(folder):
        from infini_model.data.lookup import datasets_place, is_dataset

        if command in ("run", "compare", "show") and is_dataset(folder):
            return {"data": {"folder": folder}}
        # The folder of preprocess --output-dir is one above the datasets.
        folder = datasets_place(folder) or folder
    return {"run": {"data_dir": folder}}


def _single_keys(given: Mapping[str, Any]) -> Iterator[Tree]:
    """What each option sets that is a short name for a key."""
    for name, option in OPTIONS.items():
        value: Any = given[name]
        key = option.key
        if key is None or value is None or (option.kind is bool and not value):
            continue
        if name == "fp16":
            value = "fp16" if value else "fp32"
        elif name == "tasks":
            value = [task.strip() for task in value.split(",")]
        else:
            value = option.value if option.kind is bool else str(value)
        yield nested(key, value)
    if given["debug"]:
        yield {"run": {"log_level": "debug"}}


def read(given: Mapping[str, Any], command: str) -> Invocation:
    """What a command line describes. Raises `ConfigError` in one line."""
    given = {**dict.fromkeys(OPTIONS), **given}
    presets = given["preset"] or []
    # What a run is evaluated with is its own, unless a preset is named.
    if not presets and given["config"] is None and command != "evaluate":
        presets = ["debug" if given["debug"] else DEFAULT_PRESET]
    changes = [*_single_keys(given), _devices(given, command), _data(given, command)]
    words = list(given["overrides"] or ())
    if command == "show" and (names := [word for word in words if "=" not in word]):
        words.remove(names[0])
        changes.append({"data": {"folder": names[0]}})
    if command == "compare":
        words, comparison = _comparison(words, sweep=given["sweep"])
        changes.append(comparison)
    for word in words:
        if "=" not in word and ("*" in word or "/" in word) and command in ("run", "preprocess"):
            advice = f"documents are named by data.source.paths={shlex.quote(word)}"
            raise ConfigError(f"{word}: settings are written section.key=value; {advice}")
    typed = merge_typed([*changes, *map(parse_override, words)])
    if isinstance(typed.get("run"), Mapping) and "preset" in typed["run"]:
        raise ConfigError("run.preset: cannot be set; choose a preset with --preset NAME")
    asked = Invocation.of(presets, given["config"], typed)
    is_open = given["preset"] is None and given["config"] is None and not given["debug"]
    if is_open and command in ("run", "preprocess") and _is_own_text(asked.config, typed):
        from flows.own_text import configure_own_text

        asked, line = configure_own_text(typed, asked.config)
        typer.echo(f"note: {line}", err=True)
    data, run = asked.config.data, asked.config.run
    named = data.model_fields_set & {"source", "sources", "folder"}
    if command in ("run", "preprocess") and not (named or given["skip_preprocessing"]):
        raise ConfigError(
            "data.source: missing; name a --preset, or documents: data.source.paths='TEXTS/*.txt'"
        )
    if given["skip_preprocessing"] and data.folder is None:
        newest = {"data": {"folder": run.datasets_store or str(run.datasets_dir)}}
        presets, advanced = asked.parameters["preset"] or [], asked.parameters["advanced"] or {}
        return Invocation.of(presets, None, merge(advanced, newest))
    return asked


def _is_own_text(config: Config, typed: Mapping[str, Any]) -> bool:
    """Whether documents were typed that this machine reads and trains on from random weights."""
    is_new = config.data.folder is None and config.model.initial_weights is None
    return bool({"source", "sources"} & typed.get("data", {}).keys()) and is_new


def _comparison(words: list[str], *, sweep: bool) -> tuple[list[str], dict[str, Any]]:
    """The overrides among the arguments of `compare`, and what the others ask for."""
    runs = [word for word in words if "=" not in word]
    swept = [word for word in words if sweep and len(values_of(word)) > 1]
    if sweep and not swept:
        raise UserError("--sweep: no setting has several values, as model.memory=linear,none has")
    overrides = [word for word in words if word not in (*runs, *swept)]
    asked = {"runs": runs, "sweep": swept}
    return overrides, {"comparison": {name: given for name, given in asked.items() if given}}


def configured(command: Callable[Concatenate[Invocation, P], R]) -> Callable[..., R]:
    """Give `command`, which takes an `Invocation`, its options among those of `OPTIONS`."""
    name = command.__name__
    kind = Annotated[list[str] | None, ARGUMENTS.get(name, ANY_SETTINGS)]
    words = inspect.Parameter(
        "overrides", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
    )
    options = [
        option.parameter(each)
        for each, option in OPTIONS.items()
        if option.used_by is None or name in option.used_by
    ]
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**given: Any) -> R:
        rest = {parameter.name: given.pop(parameter.name) for parameter in own}
        return command(read(given, name), **rest)  # type: ignore[call-arg]

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in [words, *options, *own]]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def config_at(
    output_dir: str | None, data_dir: str | None = None, overrides: Iterable[str] = ()
) -> Config:
    """Return the defaults, but for the output folder, the folder of datasets and `overrides`.

    Raises `ConfigError` in one line.
    """
    given = {"output_dir": output_dir, "data_dir": data_dir}
    places = {key: folder for key, folder in given.items() if folder is not None}
    return load_config(overrides=[{"run": places}, *overrides])
