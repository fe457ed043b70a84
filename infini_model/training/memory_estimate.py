"""The memory that a training needs: what it holds for certain, and what a step takes besides.

The weights, gradients and moments are counted, from the model itself on the meta device. What a
step takes besides is a formula, which `benchmarks.memory_estimate` compares with what PyTorch's
MemTracker counts. A training is refused only if the first alone do not fit, or if both together
are many times what there is. If both just do not fit, there is only a warning: a training that runs
out of memory divides its micro-batches.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from infini_model.config import Config, LoraConfig, ModelConfig
from infini_model.runtime.errors import ConfigError
from infini_model.runtime.machine import available_memory
from infini_model.training.launch.devices import choose_gpus

Device = Literal["cpu", "cuda"]

GIB = 1 << 30
FLOAT, HALF = 4, 2
# What a process takes besides tensors: Python and libraries in main memory, more of them with CUDA;
# and on a GPU the CUDA context.
LIBRARIES: dict[Device, int] = {"cpu": GIB // 2, "cuda": 2 * GIB}
CONTEXT = GIB // 2
# Settings are recommended if they fit into this share of the memory: the rest is for fragmentation
# and for errors of the estimate.
KEPT = 0.9
# No division of micro-batches helps a training that needs so many times the memory.
HOPELESS = 10.0
SMALLER = "a smaller model or packing.context_length needs less, as does fsdp on more GPUs"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """Where the processes of a training run.

    Attributes:
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
class MemoryEstimate:
    """Bytes of the tensors of one process.

    Attributes:
        weights: The parameters; under FSDP this process's shards.
        gradients: Of the trained parameters, float32.
        moments: AdamW's two, or the one of Muon's matrices, float32.
        activations: What the fullest moment of a step takes besides those: what is kept for the
            backward pass, logits, weights in 16 bits, and what FSDP has gathered.
    """

    weights: int
    gradients: int
    moments: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.moments + self.activations

    def __str__(self) -> str:
        """The total and the parts in GiB, such as "3.1 GiB (weights 0.4, …)"."""
        parts = ", ".join(f"{name} {gib(size)}" for name, size in vars(self).items() if size)
        return f"{gib(self.total)} GiB ({parts})"


def gib(size: int) -> str:
    """A number of bytes in GiB, with two digits or more."""
    number = size / GIB
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"


class _Parameters(NamedTuple):
    """Bytes of a layer, of what is outside the layers, of all, and of each trained tensor.

    `moments` are those of each tensor that the optimizer keeps.
    """

    layer: int
    root: int
    all: int
    trained: Sequence[int]
    moments: Sequence[int]


@functools.cache
def _parameters(model: ModelConfig, lora: LoraConfig | None, optimizer: str) -> _Parameters:
    import torch

    from infini_model.model.llama import InfiniLlama
    from infini_model.training.optimizer import group_of

    with torch.device("meta"):
        whole = InfiniLlama(model, lora=lora)
    everything = sum(p.nbytes for p in whole.parameters())
    layer = sum(p.nbytes for p in whole.model.layers[0].parameters())
    root = everything - model.num_hidden_layers * layer
    trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    moments = list[int]()
    for name, parameter in trained.items():
        has_one = optimizer == "muon" and group_of(name, parameter) == "layers"
        moments += [parameter.nbytes] * (1 if has_one else 2)
    sizes = [parameter.nbytes for parameter in trained.values()]
    return _Parameters(layer, root, everything, sizes, moments)


def _parameters_of(config: Config) -> _Parameters:
    return _parameters(config.model, config.training.lora, config.training.optimizer)


def estimate_memory(
    config: Config,
    processes: int,
    device: Device,
    local: int | None = None,
    recomputed: int | None = None,
) -> MemoryEstimate:
    """What one of `processes` processes needs in a step of the training that `config` describes.

    `config.model` is that of the model itself, its vocabulary included (see
    `infini_model.training.model_shape`). `local` is the number of processes on a machine, None for
    all of them, and `recomputed` that of the layers that are recomputed, None as `config` says.
    What Python, libraries, the CUDA context and fragmentation take comes on top.
    """
    parameters = _parameters_of(config)
    shards = _shards(config, processes, local or processes)
    gradients, moments = sum(parameters.trained) // shards, sum(parameters.moments) // shards
    if recomputed is None:
        recomputed = config.launch.may_recompute(config.model.num_hidden_layers)[0]
    batches = (config.training.batch_schedule or {0.0: 1}).values()
    taken = _activations(config, parameters, device, recomputed, is_sharded=shards > 1)
    if shards > 1:
        # Two layers and all that is outside them, of which half has a gradient to be reduced.
        taken += 2 * parameters.layer + 3 * parameters.root // 2
    elif processes == config.training.gradient_accumulation_steps == max(batches) == 1:
        # The gradients come while the activations go.
        taken = max(0, taken - gradients)
    return MemoryEstimate(parameters.all // shards, gradients, moments, taken)


def _shards(config: Config, processes: int, local: int) -> int:
    """The processes among which model and optimizer are divided."""
    return {"ddp": 1, "fsdp": processes, "hsdp": local}[config.launch.strategy]


def _activations(
    config: Config, parameters: _Parameters, device: Device, recomputed: int, *, is_sharded: bool
) -> int:
    """Bytes that a micro-batch takes when the loss is computed.

    A layer keeps of each token the input of each norm in float32; in the dtype of products what the
    norms return, several times the heads, as the attention and the memory read and write them, and
    four widths of the feed-forward. The memory keeps states of each segment.
    """
    from infini_model.model.loss import LOGITS_AT_ONCE
    from infini_model.model.memory import RULES

    model, training = config.model, config.training
    auto = HALF if device == "cuda" else FLOAT
    products = {"auto": auto, "fp32": FLOAT, "bf16": HALF, "fp16": HALF}[training.precision]
    hidden, head, layers = model.hidden_size, model.head_dim, model.num_hidden_layers
    tokens = training.batch_size * config.packing.context_length
    rows = tokens * (2 if training.objective == "block_diffusion" else 1)
    # PyTorch's RMSNorm saves what it has normalised on a CPU.
    saved = 2 if device == "cpu" else 1
    heads = head * (model.num_attention_heads + model.key_value_heads)
    normed = 2 * hidden + (0 if model.qk_norm == "none" else heads)
    rule = RULES.get(model.memory)
    times, states = (3, 0) if rule is None else (rule.activations, rule.states_kept)
    inner = 2 * hidden + times * heads + 4 * model.intermediate_size
    kept = rows * (FLOAT * saved * normed + products * inner)
    segments = training.batch_size * math.ceil(config.packing.context_length / model.segment_length)
    # Older keys and values in sight, each of which a segment has anew, before and after rotation.
    in_sight = model.window_segments * model.segment_length + model.window_sinks
    kept += 3 * segments * in_sight * model.key_value_heads * head * products
    kept += states * segments * model.key_value_heads * (head + 1) * head * FLOAT
    if device == "cpu" and model.memory != "none":
        # Autograd keeps the features in float32, and what they read and write.
        read, written = 4 * rows * model.num_attention_heads, 3 * tokens * model.key_value_heads
        kept += FLOAT * head * (read + written)
    # The first layers are recomputed one by one, when the backward pass is through the others.
    kept = max(1, layers - recomputed) * kept + recomputed * rows * hidden * FLOAT
    if products == HALF and training.lora is None and not is_sharded:
        kept += layers * (parameters.layer // 2)  # autocast keeps them until the loss is computed
    logits = min(tokens * (model.vocab_size or 0), LOGITS_AT_ONCE)
    return kept + logits * (FLOAT + FLOAT - products) + 2 * tokens * hidden * FLOAT


@dataclass(frozen=True)
class Need:
    """The needs of a training on a machine.

    Attributes:
        copy: Bytes of main memory for the copies from which checkpoints are written.
        recomputed: Layers that are recomputed in the backward pass; where that is `auto`, as few as
            fit.
    """

    process: MemoryEstimate
    copy: int
    machine: Machine
    recomputed: int

    @classmethod
    def of(cls, config: Config, machine: Machine) -> Need:
        """The need of a training whose `config.model` is that of the model itself."""
        copy, sizes = _copied(config, machine), (machine.processes, machine.device, machine.local)
        for recomputed in config.launch.may_recompute(config.model.num_hidden_layers):
            process = estimate_memory(config, *sizes, recomputed)
            need = cls(process, copy, machine, recomputed)
            if not need.shortage(KEPT):
                break
        return need

    @property
    def main(self) -> int:
        """Bytes of main memory, of all processes on the machine."""
        tensors = self.process.total if self.machine.device == "cpu" else 0
        return self.machine.local * (LIBRARIES[self.machine.device] + tensors) + self.copy

    def shortage(self, share: float = 1.0, qualifier: str = "about") -> str:
        """What does not fit into a share of the memory; empty if all does.

        `qualifier` says how sure the figures are: "about" or "at least".
        """
        process, machine = self.process, self.machine
        if machine.device == "cuda" and process.total + CONTEXT > share * machine.gpu_bytes:
            has = gib(machine.gpu_bytes)
            return f"a training process needs {qualifier} {process}, and a GPU has {has} GiB"
        if self.main > share * machine.main_bytes:
            needs = f"{qualifier} {gib(self.main)} GiB of main memory, {process} a process"
            return f"the training needs {needs}, and {gib(machine.main_bytes)} GiB are available"
        return ""

    def __str__(self) -> str:
        """The need of a process with its parts, and the main memory."""
        again = f", {self.recomputed} layers recomputed" if self.recomputed else ""
        return f"{self.process} a process{again}; {gib(self.main)} GiB of main memory"


def _copied(config: Config, machine: Machine) -> int:
    """Bytes of main memory that the processes of a machine copy for a checkpoint.

    Each copies its shard, with hsdp on the first machine only, where rank 0 has the whole model at
    the start; without shards rank 0 copies all.
    """
    parameters, strategy = _parameters_of(config), config.launch.strategy
    shards = _shards(config, machine.processes, machine.local)
    copied = [-(-size // shards) for size in (*parameters.trained, *parameters.moments)]
    if machine.device == "cuda":
        # The copy is page-locked, and PyTorch rounds each of its tensors up to a power of two.
        copied = [1 << (size - 1).bit_length() for size in copied]
    copies = machine.local if strategy == "fsdp" else min(shards, machine.local) * machine.is_first
    return max(copies * sum(copied), parameters.all * (shards > 1 and machine.is_first))


def check_memory(config: Config, machine: Machine, *, is_pretrained: bool = False) -> Need:
    """What the training needs; `config.model` is that of the model itself.

    Warns where that is probably more than the machine has. `is_pretrained` says whether its weights
    are given, so that LoRA could take its place. Raises `ConfigError`, with settings that would
    fit, where it is certainly more, or `HOPELESS` times as much, and `launch.force` is false.
    """
    need = Need.of(config, machine)
    certain = replace(need, process=replace(need.process, activations=0))
    remedy = functools.partial(advice, config, machine, is_pretrained=is_pretrained)
    lack = certain.shortage(qualifier="at least") or need.shortage(HOPELESS)
    if lack and not config.launch.force:
        raise ConfigError(
            f"not enough memory: {lack}; {remedy()}; launch.force=true runs it anyway"
        )
    if lack := need.shortage():
        log.warning("the memory may not suffice: %s; %s", lack, remedy())
    return need


def advice(config: Config, machine: Machine, *, is_pretrained: bool = False) -> str:
    """Settings with which a training needs clearly less, and fits, for a message.

    They are the first that do, of those of the same training on this machine, the cheapest first.
    For `is_pretrained` see `check_memory`.
    """
    now, hint = Need.of(config, machine).process.total, ""
    if is_pretrained and config.training.lora is None:
        hint = "; training.lora={} needs less, and freezes the pretrained weights"
    for change in _changes(config, machine):
        need = Need.of(config.updated(**change), machine)
        if need.process.total < KEPT * now and not need.shortage(KEPT):
            words = " ".join(
                f"{section}.{name}={str(value).lower()}"
                for section, settings in change.items()
                for name, value in settings.items()
            )
            return f"{words} would need {gib(need.process.total)} GiB a process{hint}"
    return f"{SMALLER}{hint}"


def _changes(config: Config, machine: Machine) -> Iterator[dict[str, dict[str, Any]]]:
    """Settings of the same training that need less, those that cost least first."""
    shards = {"strategy": "fsdp"} if machine.processes > 1 else {}
    *_, recomputed = config.launch.may_recompute(config.model.num_hidden_layers)
    recomputes = {}
    if recomputed < config.model.num_hidden_layers:
        recomputes = {"gradient_checkpointing": True}
    batch, steps = config.training.batch_size, config.training.gradient_accumulation_steps
    small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
    for divisor in sorted({*small, *(batch // n for n in small)}):
        smaller = {"batch_size": batch // divisor, "gradient_accumulation_steps": steps * divisor}
        for launch in ({}, shards, recomputes, shards | recomputes):
            yield {"launch": launch, "training": smaller if divisor > 1 else {}}
