"""Whether a training fits into the memory of this machine, and which settings would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infini_model.config import Config, LoraConfig, ModelConfig
from infini_model.runtime.errors import ConfigError, DeviceError
from infini_model.runtime.machine import available_memory, lacking_on_gpu
from infini_model.training.launch.devices import choose_gpus
from infini_model.training.sizing.estimate import (
    GIB,
    Device,
    MemoryEstimate,
    checkpoint_copy,
    estimate_memory,
    gib,
)

# What a process takes besides tensors: Python and libraries in main memory, more of them with CUDA;
# and on a GPU the CUDA context.
LIBRARIES: dict[Device, int] = {"cpu": GIB // 2, "cuda": 2 * GIB}
CONTEXT = GIB // 2
# Settings are recommended if they leave this share of the memory for fragmentation and for errors
# of the estimate.
MARGIN = 0.1
# GPUs that a remedy may ask for.
GPU_COUNTS = tuple(2**power for power in range(1, 11))
SMALLER = "a smaller model or packing.context_length needs less"

Change = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """Where the processes of a training run.

    Attributes:
        device: What they compute on.
        processes: All of them, on all machines.
        local: Those on this machine.
        is_first: Whether the process that writes checkpoints is on this machine.
        gpu_bytes: Memory of the smallest of the GPUs; 0 on the CPU.
        main_bytes: Main memory that is available here.
    """

    device: Device
    processes: int
    local: int
    is_first: bool
    gpu_bytes: int
    main_bytes: int

    @classmethod
    def of(cls, config: Config) -> Machine:
        """This machine, with the devices that `config.launch` selects. Raises `DeviceError`."""
        gpus = choose_gpus(config.launch.gpus)
        local = config.launch.processes or max(1, len(gpus))
        return cls(
            device="cuda" if gpus else "cpu",
            processes=local * config.launch.num_nodes,
            local=local,
            is_first=config.launch.node_rank == 0,
            gpu_bytes=min((gpu.total_bytes for gpu in gpus[:local]), default=0),
            main_bytes=available_memory(),
        )


@dataclass(frozen=True)
class Need:
    """What a training needs on a machine: each process by name, and main memory in all."""

    process: MemoryEstimate
    gpu: int
    main: int

    @classmethod
    def of(cls, config: Config, machine: Machine) -> Need:
        """The need of a training whose `config.model` is that of the model itself."""
        process = estimate_memory(config, machine.processes, machine.device)
        copy = checkpoint_copy(config, machine.device) if machine.is_first else 0
        main = machine.local * LIBRARIES[machine.device] + copy
        if machine.device == "cpu":
            return cls(process, 0, main + machine.local * process.total)
        return cls(process, process.total + CONTEXT, main)

    def exceeds(self, machine: Machine, margin: float = 0.0) -> bool:
        """Whether it is more than the machine has, less a share."""
        share = 1.0 - margin
        return self.gpu > share * machine.gpu_bytes or self.main > share * machine.main_bytes

    def __str__(self) -> str:
        """The need of a process with its parts, and the main memory."""
        return f"{self.process} a process; {gib(self.main)} GiB of main memory"


def check_memory(config: Config, machine: Machine, *, is_pretrained: bool = False) -> Need:
    """What the training needs; `config.model` is that of the model itself.

    `is_pretrained` says whether its weights are given, so that LoRA could take its place. Raises
    `ConfigError`, with settings that would fit, if it is more than the machine has and
    `launch.force` is false.
    """
    need = Need.of(config, machine)
    if need.exceeds(machine) and not config.launch.force:
        raise ConfigError(
            f"{shortage(need, machine)}; {remedy(config, machine, is_pretrained=is_pretrained)}; "
            "launch.force=true runs it anyway"
        )
    return need


def check_kernels(model: ModelConfig, device: str, *, compiled: bool | None = None) -> None:
    """Raise `DeviceError` if the first step or batch on `device` would find no kernels.

    On a GPU, Triton builds those of the memory; `compiled`, which is `launch.compile`, needs some
    for the layers as well, and null does without what is missing.
    """
    if device != "cuda" or (model.memory == "none" and not compiled):
        return
    if (lack := lacking_on_gpu()) is not None:
        raise DeviceError(
            f"the kernels of a GPU cannot be built: there is no {lack.what}; {lack.remedy}; or "
            "launch.gpus=cpu, which needs none"
        )


def shortage(need: Need, machine: Machine) -> str:
    """What does not fit where."""
    if need.gpu > machine.gpu_bytes:
        has = f"a GPU has {gib(machine.gpu_bytes)} GiB"
        return f"not enough memory: a training process needs {need.process}, and {has}"
    has = f"{gib(machine.main_bytes)} GiB are available"
    return f"not enough memory: the training needs {need}, of which {has}"


def remedy(config: Config, machine: Machine, *, is_pretrained: bool = False) -> str:
    """The settings that would fit, for a message; for `is_pretrained` see `check_memory`."""
    adapted = _adapted(config, machine) if is_pretrained else ""
    for machines in (machine, *_with_more_gpus(machine)):
        if (change := _fitting(config, machines)) is not None:
            words = _words(change)
            if machines == machine:
                return f"{words} would fit"
            return f"{words or 'the same'} on {machines.processes} such GPUs would fit{adapted}"
    return f"no setting makes it fit; {SMALLER}{adapted}"


def _adapted(config: Config, machine: Machine) -> str:
    """The settings that would fit on `machine` with pretrained weights frozen, as another hint."""
    if config.training.lora is not None:
        return ""
    lora: Change = {"training.lora": LoraConfig()}
    change = _fitting(changed(config, lora), machine)
    if change is None:
        return ""
    return f", or here {_words({**lora, **change})}, which freezes the pretrained weights"


def _fitting(config: Config, machine: Machine) -> Change | None:
    """The first of `_changes` that fits, with a margin; None if none does."""
    for change in _changes(config, machine):
        if not Need.of(changed(config, change), machine).exceeds(machine, MARGIN):
            return change
    return None


def lighter(config: Config, machine: Machine) -> str:
    """The cheapest settings of the same training that need clearly less memory, in words."""

    def need(change: Change) -> int:
        found = Need.of(changed(config, change), machine)
        return found.gpu or found.main

    now = need({})
    for change in _changes(config, machine):
        if need(change) < (1.0 - MARGIN) * now:
            return f"with {_words(change)} it needs {gib(need(change))} GiB, not {gib(now)}"
    return SMALLER


def _with_more_gpus(machine: Machine) -> Iterator[Machine]:
    """The machine with more of its GPUs."""
    if machine.device == "cuda":
        for count in GPU_COUNTS:
            if count > machine.processes:
                yield replace(machine, processes=count, local=min(count, 8))


def _changes(config: Config, machine: Machine) -> Iterator[Change]:
    """Settings of the same training that need less, those that cost least first."""
    training, launch = config.training, config.launch
    strategies: list[Change] = [{}]
    if machine.processes > 1 and launch.strategy == "ddp":
        strategies.append({"launch.strategy": "fsdp"})
    recomputations: list[Change] = [{}]
    if not launch.gradient_checkpointing:
        recomputations.append({"launch.gradient_checkpointing": True})
    for size in range(training.batch_size, 0, -1):
        if training.batch_size % size:
            continue
        steps = training.gradient_accumulation_steps * (training.batch_size // size)
        batch = {"training.batch_size": size, "training.gradient_accumulation_steps": steps}
        for recomputation in recomputations:
            for strategy in strategies:
                smaller = batch if size < training.batch_size else {}
                yield {**strategy, **recomputation, **smaller}


def changed(config: Config, change: Change) -> Config:
    """`config` with values by their dotted keys."""
    for key, value in change.items():
        section, _, name = key.partition(".")
        config = config.updated(**{section: {name: value}})
    return config


def _words(change: Change) -> str:
    return " ".join(f"{key}={_shown(value)}" for key, value in change.items())


def _shown(value: object) -> str:
    if isinstance(value, LoraConfig):
        return "{}"
    return str(value).lower() if isinstance(value, bool) else str(value)
