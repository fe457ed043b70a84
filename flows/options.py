"""The options that the `infini` commands share, and how each becomes an override.

An option is a shorter name for a key of the configuration tree; whatever has no option is set by a
dotted override such as `training.learning_rate=3e-4`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from flows.presets import DEFAULT_PRESET, configure
from infini_model.config import Config, merge, parse_override

P = ParamSpec("P")
R = TypeVar("R")


def common(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as training.max_steps=20."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            help="Preset to begin from; the default is quickstart. Several are laid one over the "
            "other; stable is laid over anything, a --config too."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "--config-file", "-c", help="YAML or JSON file to begin from."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for datasets, runs and records. [outputs]")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", "-d", help="Folder of the datasets, or one finished dataset."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="auto, all, cpu, or numbers such as 0,3.")
    ] = None,
    gpu: Annotated[
        int | None, typer.Option("--gpu", "--gpu-id", "-g", help="One GPU, by its number.")
    ] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="Use the CPU alone.")] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Windows a process reads at once (preprocess: documents)."),
    ] = None,
    use_gpu_dataloader: Annotated[
        bool,
        typer.Option("--use-gpu-dataloader", help="What always happens: batches wait on the GPU."),
    ] = False,
    gpu_device: Annotated[
        str | None, typer.Option(help="Device that tokenises, such as cuda:0.")
    ] = None,
    disable_flash_attn: Annotated[
        bool, typer.Option("--disable-flash-attn", help="Use PyTorch's plain attention.")
    ] = False,
    tensorboard_dir: Annotated[
        Path | None, typer.Option("--tensorboard-dir", "-t", help="Folder for TensorBoard.")
    ] = None,
    skip_preprocessing: Annotated[
        bool, typer.Option("--skip-preprocessing", help="Take the newest dataset as it is.")
    ] = False,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="One process for each GPU.")
    ] = False,
    num_nodes: Annotated[int | None, typer.Option(help="Machines that train together.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps in all.")] = None,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Debug logs and checks; alone, the debug preset."),
    ] = False,
) -> None:
    """Hold the signature that every command has; nothing calls it."""


def sampling(
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to add at most.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; above it, a draw.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the fewest likeliest tokens of this probability."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw.")] = None,
) -> None:
    """Hold the signature that `generate` has besides; nothing calls it."""


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
    folder: Path | None = given["data_dir"]
    if folder is None:
        return {}
    if command in ("train", "evaluate") or given["skip_preprocessing"]:
        return {"data": {"folder": str(folder)}}
    return {"run": {"data_dir": str(folder)}}


def _plain(given: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The options that are another name for one key."""
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
    }
    change: dict[str, Any] = {}
    for option, key in keys.items():
        if given.get(option) is not None:
            section, leaf = key.split(".")
            change = merge(change, {section: {leaf: str(given[option])}})
    if given["disable_flash_attn"]:
        change = merge(change, {"launch": {"attention_backend": "math"}})
    if given["debug"]:
        change = merge(change, {"logging": {"debug": True}, "run": {"log_level": "debug"}})
    return change


def read(given: Mapping[str, Any], command: str) -> Config:
    """The configuration that a command line asks for. Raises `ConfigError` in one line."""
    presets = given["preset"] or []
    if not presets and given["config"] is None:
        presets = ["debug" if given["debug"] else DEFAULT_PRESET]
    changes = [make(given, command) for make in (_plain, _devices, _data)]
    overrides = [parse_override(text) for text in given["overrides"] or ()]
    config = configure(presets, given["config"], [*changes, *overrides])
    if given["skip_preprocessing"] and config.data.folder is None:
        data = config.data.model_copy(update={"folder": config.run.datasets_dir})
        config = config.model_copy(update={"data": data})
    return config


def configured(command: Callable[Concatenate[Config, P], R]) -> Callable[..., R]:
    """Give `command`, which takes a `Config`, the options that all commands share.

    `generate` gets those of the draw, too.
    """
    sources = (common, sampling) if command.__name__ == "generate" else (common,)
    shared = [p for f in sources for p in inspect.signature(f, eval_str=True).parameters.values()]
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def with_options(**given: Any) -> R:
        rest = {name: given.pop(name) for name in [parameter.name for parameter in own]}
        return command(read(given, command.__name__), **rest)  # type: ignore[call-arg]

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword) for p in [*shared, *own]]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options
