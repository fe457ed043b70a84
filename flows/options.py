"""The options that the `infini` commands share, and the overrides that they stand for.

An option is a short name for a key of the configuration tree; all other keys are set by dotted
overrides such as `training.learning_rate=3e-4`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from flows.presets import DEFAULT_PRESET, Invocation
from flows.sweep import values_of
from infini_model.config import Config, check_typed, merge, parse_override
from infini_model.config.explaining import NAMES, meant_by
from infini_model.config.places import is_url
from infini_model.runtime.errors import ConfigError, UserError

P = ParamSpec("P")
R = TypeVar("R")
# An option of the guides' scripts that has another name here.
OfGuides = Annotated[str | None, typer.Option(hidden=True)]


def common(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Any settings, such as training.max_steps=20.",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Preset to start from (default: quickstart). Repeat it to apply several in order; "
            "stable applies over any other, and over --config.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "--config-file", "-c", help="YAML or JSON file to start from."),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder for datasets, runs and records (default: outputs), or an address."
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            "-d",
            help="Folder or address of datasets, or one finished dataset, also by its name.",
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs to use: auto, all, cpu, or numbers such as 0,3.")
    ] = None,
    gpu: Annotated[
        int | None, typer.Option("--gpu", "--gpu-id", "-g", help="Use one GPU, by its number.")
    ] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Use only the CPU.")] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Windows per process and micro-batch (preprocess: documents)."),
    ] = None,
    gpu_device: Annotated[
        str | None, typer.Option(help="Device for tokenization, such as cuda:0.")
    ] = None,
    disable_flash_attn: Annotated[
        bool, typer.Option("--disable-flash-attn", help="Use PyTorch's memory-efficient attention.")
    ] = False,
    tensorboard_dir: Annotated[
        str | None, typer.Option("--tensorboard-dir", "-t", help="Folder for TensorBoard logs.")
    ] = None,
    skip_preprocessing: Annotated[
        bool, typer.Option("--skip-preprocessing", help="Use the newest finished dataset.")
    ] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Train on all GPUs, one process each.")
    ] = False,
    num_nodes: Annotated[int | None, typer.Option(help="Number of machines to train on.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Total optimizer steps.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="What to measure, separated by commas, such as loss,sample."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Train even if the memory estimate says it cannot fit."),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Enable debug logs and checks; the default preset is then debug.",
        ),
    ] = False,
    use_gpu_dataloader: Annotated[bool, typer.Option("--use-gpu-dataloader", hidden=True)] = False,
    fp16: Annotated[bool | None, typer.Option("--fp16/--no-fp16", hidden=True)] = None,
    epochs: OfGuides = None,
    learning_rate: OfGuides = None,
    nproc_per_node: OfGuides = None,
    save_dir: OfGuides = None,
) -> None:
    """Hold the signature that every command shares; never called."""


def sampling(
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens to generate.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 always picks the most likely token."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from this many of the most likely tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample from the fewest tokens with this total probability."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None,
) -> None:
    """Hold the signature of `generate`'s and `chat`'s additional options; never called."""


def comparing(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN or KEY=VALUE",
            help="Names or folders of runs to compare, and any settings. With --sweep, a setting "
            "with several values, such as model.memory=linear,none, is one to vary.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep", help="First run all combinations of the settings with several values."
        ),
    ] = False,
) -> None:
    """Hold the signature of `compare`'s own arguments; never called."""


def sharing(
    share: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Make the I-th of N shares of the partitions, on one of N machines or jobs; the "
            "last one assembles the dataset.",
        ),
    ] = None,
) -> None:
    """Hold the signature of `preprocess`'s own option; never called."""


# What a command takes besides the options that all commands share, or instead of them.
OWN: dict[str, Callable[..., None]] = {
    "generate": sampling,
    "chat": sampling,
    "compare": comparing,
    "preprocess": sharing,
}
_TRAIN = ("run", "train", "compare")
_WRITE = ("generate", "chat")
_MODEL = (*_TRAIN, "evaluate", *_WRITE)
_FLOWS = (*_TRAIN, "preprocess", "evaluate")
# `doctor` estimates the memory of a training.
_ESTIMATED = (*_TRAIN, "doctor")
# The commands that use an option, and list it; one that is not here is used by all.
USED_BY: dict[str, tuple[str, ...]] = {
    "data_dir": _FLOWS,
    "gpus": (*_MODEL, "doctor"),
    "gpu": (*_MODEL, "preprocess", "doctor"),
    "no_gpu": (*_MODEL, "preprocess", "doctor"),
    "batch_size": (*_ESTIMATED, "preprocess"),
    "gpu_device": ("run", "compare", "preprocess"),
    "disable_flash_attn": (*_MODEL, "doctor"),
    "tensorboard_dir": _TRAIN,
    "skip_preprocessing": _FLOWS,
    "distributed": _ESTIMATED,
    "num_nodes": _ESTIMATED,
    "max_steps": _TRAIN,
    "tasks": ("run", "evaluate"),
    "force": _TRAIN,
    "debug": (*_FLOWS, *_WRITE, "doctor"),
    "epochs": _TRAIN,
    "learning_rate": _TRAIN,
    "fp16": (*_ESTIMATED, *_WRITE),
    "nproc_per_node": _ESTIMATED,
}
# Of a `typer.Typer`: an option may be written with underscores, as in the guides.
UNDERSCORES = {"token_normalize_func": lambda name: name.replace("_", "-")}


def unknown(option: str, listed: Iterable[str], *, with_settings: bool) -> str:
    """One line for an option that a command does not have, whose help lists others.

    `with_settings` says whether the command takes KEY=VALUE.
    """
    name = option.lstrip("-").replace("-", "_")
    meant = NAMES.get(name)
    # What `run.output_dir` is to a command is its option, also where the setting cannot change.
    if meant not in (None, "run.output_dir") and with_settings:
        return f"{option}: unknown option; {meant if ' ' in meant else f'it is {meant}=VALUE'}"
    names = {other.lstrip("-").replace("-", "_"): other for other in listed}
    near = meant_by((meant or name).rpartition(".")[2], names)
    return f"{option}: unknown option" + (f"; did you mean {names[near]}?" if near else "")


def _devices(given: Mapping[str, Any], command: str) -> dict[str, Any]:
    gpus, device = given["gpus"], given["gpu_device"]
    if given["gpu"] is not None:
        gpus, device = str(given["gpu"]), device or f"cuda:{given['gpu']}"
    if given["no_gpu"]:
        gpus, device = "cpu", "cpu"
    if given["distributed"] and gpus is None:
        gpus = "all"
    change: dict[str, Any] = {}
    if gpus is not None and command != "preprocess":
        change["launch"] = {"gpus": gpus}
    if device is not None:
        change["data"] = {"device": device}
    return change


def _data(given: Mapping[str, Any], command: str) -> dict[str, Any]:
    folder: str | None = given["data_dir"]
    if folder is None:
        return {}
    if command in ("train", "evaluate") or given["skip_preprocessing"]:
        return {"data": {"folder": folder}}
    if not is_url(folder):
        from infini_model.data.keeping.named import datasets_place, is_dataset

        if command in ("run", "compare") and is_dataset(folder):
            return {"data": {"folder": folder}}
        # The folder of preprocess --output-dir is one above the datasets.
        folder = datasets_place(folder) or folder
    return {"run": {"data_dir": folder}}


def _single_keys(given: Mapping[str, Any], command: str) -> Iterator[dict[str, Any]]:
    """What each option that has its own keys sets, one after another."""
    batch = "data.batch_size" if command == "preprocess" else "training.batch_size"
    keys = {
        "output_dir": "run.output_dir",
        "batch_size": batch,
        "tensorboard_dir": "logging.tensorboard_dir",
        "num_nodes": "launch.num_nodes",
        "max_steps": "training.max_steps",
        "max_new_tokens": "evaluation.sample.max_new_tokens",
        "temperature": "evaluation.sample.temperature",
        "top_k": "evaluation.sample.top_k",
        "top_p": "evaluation.sample.top_p",
        "seed": "run.seed",
        "share": "data.share",
        "epochs": "training.epochs",
        "learning_rate": "training.learning_rate",
        "nproc_per_node": "launch.processes",
        "save_dir": "run.output_dir",
    }
    for option, key in keys.items():
        if given.get(option) is not None:
            tree: Any = str(given[option])
            for part in reversed(key.split(".")):
                tree = {part: tree}
            yield tree
    if given.get("tasks") is not None:
        tasks = [name.strip() for name in given["tasks"].split(",")]
        yield {"evaluation": {"tasks": tasks}}
    if given["fp16"] is not None:
        yield {"training": {"precision": "fp16" if given["fp16"] else "fp32"}}
    if given["disable_flash_attn"]:
        yield {"launch": {"attention_backend": "efficient"}}
    if given["force"]:
        yield {"launch": {"force": True}}
    if given["debug"]:
        yield {"logging": {"debug": True}, "run": {"log_level": "debug"}}


def read(given: Mapping[str, Any], command: str) -> Invocation:
    """What a command line describes. Raises `ConfigError` in one line."""
    presets = given["preset"] or []
    if not presets and given["config"] is None:
        presets = ["debug" if given["debug"] else DEFAULT_PRESET]
    changes = [*_single_keys(given, command), _devices(given, command), _data(given, command)]
    words = list(given["overrides"] or ())
    if command == "compare":
        words, comparison = _comparison(words, sweep=given["sweep"])
        changes.append(comparison)
    changes += [parse_override(text) for text in words]
    check_typed(changes)
    typed = functools.reduce(merge, changes, dict[str, Any]())
    asked = Invocation.of(presets, given["config"], typed)
    is_open = given["preset"] is None and given["config"] is None and not given["debug"]
    if is_open and command in ("run", "preprocess") and _is_own_text(asked.config, typed):
        from flows.own_text import configure_own_text

        asked, lines = configure_own_text(typed, asked.config)
        for line in lines:
            typer.echo(f"note: {line}", err=True)
    data, run = asked.config.data, asked.config.run
    named = data.model_fields_set & {"source", "folder"}
    if command in ("run", "preprocess") and not (named or given["skip_preprocessing"]):
        raise ConfigError(
            "data.source: missing; name a --preset, or documents: data.source.paths='[TEXTS/*.txt]'"
        )
    if given["skip_preprocessing"] and data.folder is None:
        newest = {"data": {"folder": run.datasets_store or str(run.datasets_dir)}}
        return Invocation.of(presets, given["config"], merge(typed, newest))
    return asked


def _is_own_text(config: Config, typed: Mapping[str, Any]) -> bool:
    """Whether documents were typed that this machine reads and trains on from random weights."""
    is_new = config.data.folder is None and config.model.initial_weights is None
    return "source" in typed.get("data", {}) and is_new and not config.deployments


def _comparison(words: list[str], *, sweep: bool) -> tuple[list[str], dict[str, Any]]:
    """The overrides among the arguments of `compare`, and what the others ask for."""
    runs = [word for word in words if "=" not in word]
    swept = [word for word in words if sweep and len(values_of(word)) > 1]
    if sweep and not swept:
        raise UserError("--sweep: no setting has several values, as model.memory=linear,none has")
    overrides = [word for word in words if word not in (*runs, *swept)]
    asked = {"runs": runs, "sweep": swept}
    return overrides, {"comparison": {name: given for name, given in asked.items() if given}}


def notes(given: Mapping[str, Any], command: str, config: Config) -> list[str]:
    """One line for each given option that has no effect, with the reason."""
    options = [name for name, value in given.items() if value is not None and value is not False]
    reasons = {
        option: _overridden_by(option, given) or _why_unused(option, command, config)
        for option in options
    }
    return [
        f"--{option.replace('_', '-')} has no effect: {why}"
        for option, why in reasons.items()
        if why
    ]


def _overridden_by(option: str, given: Mapping[str, Any]) -> str:
    """Which other option chooses the devices instead of this one; empty if none does."""
    stronger = {
        "gpus": ("no_gpu", "gpu"),
        "gpu": ("no_gpu",),
        "gpu_device": ("no_gpu",),
        "distributed": ("no_gpu", "gpu", "gpus"),
    }
    for other in stronger.get(option, ()):
        if given[other] not in (None, False):
            return f"--{other.replace('_', '-')} chooses the devices"
    return ""


def _why_unused(option: str, command: str, config: Config) -> str:
    """Why an option has no effect; empty if it has one."""
    if command not in USED_BY.get(option, (command,)):
        return f"infini {command} does not use it"
    if option == "use_gpu_dataloader":
        return "training reads finished shards and needs no such option"
    if option == "tensorboard_dir" and not config.tracking.tensorboard:
        return "tracking.tensorboard is false"
    if option == "gpu_device" or (option == "gpu" and command == "preprocess"):
        if config.data.folder is not None:
            return "the dataset is already tokenized"
        if config.data.tokenizer.spec == "bytes":
            return "the bytes tokenizer runs on the CPU"
    return ""


def configured(command: Callable[Concatenate[Invocation, P], R]) -> Callable[..., R]:
    """Give `command`, which takes an `Invocation`, the options that all commands share.

    Some also get options of their own. Options that have no effect are reported on stderr.
    """
    name = command.__name__
    shared = dict[str, inspect.Parameter]()
    for source in (common, *([OWN[name]] if name in OWN else [])):
        # Evaluated anew for each command, so that what it hides the others still list.
        shared |= inspect.signature(source, eval_str=True).parameters
    for option in USED_BY:
        if name not in USED_BY[option]:
            # Taken all the same, with a note: the same options may be given to several commands.
            shared[option].annotation.__metadata__[0].hidden = True
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**given: Any) -> R:
        rest = {parameter.name: given.pop(parameter.name) for parameter in own}
        asked = read(given, name)
        for note in notes(given, name, asked.config):
            typer.echo(f"note: {note}", err=True)
        return command(asked, **rest)  # type: ignore[call-arg]

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in [*shared.values(), *own]]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options
