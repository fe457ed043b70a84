"""Settings of a training run: the sections `training`, `launch`, `logging` and `checkpoint`.

They are named after Hugging Face's `TrainingArguments`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, StrictBool

from infini_model.config.locations import LocalFolder
from infini_model.config.section import (
    MOST,
    NAME,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Schedule,
    Section,
    takes,
)

# The name of a run, and a step.
BRANCH = re.compile(rf"({NAME.pattern})(?:@(\d{{1,9}}))?")
GPUS = re.compile(r"auto|all|cpu|\d+(,\d+)*")
Gpus = Annotated[str, takes("auto, all, cpu, or device numbers such as 0,3", GPUS.fullmatch)]


def _is_range(value: str) -> bool:
    least, _, most = value.partition("-")
    return bool(re.fullmatch(r"\d+(-\d+)?", value)) and 1 <= int(least) <= int(most or least)


Nodes = Annotated[str, takes("a number of nodes, or a range such as 2-4", _is_range)]


def _recomputed(value: object) -> object:
    text = str(value).lower()
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    if text in ("true", "false"):
        return text == "true"
    raise ValueError("takes auto, true, false, or a number of layers")


Recomputed = Annotated[StrictBool | NonNegativeInt | Literal["auto"], BeforeValidator(_recomputed)]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SavedModule = Literal[
    "embed_tokens",
    "lm_head",
    "norm",
    "q_norm",
    "k_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
]
AttentionBackend = Literal["auto", "flash", "sdpa"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class LoraConfig(Section):
    """Low-rank adaptation (Hu et al., arXiv 2106.09685), with the names of `peft.LoraConfig`."""

    r: PositiveInt = 16
    """Rank of the trained product beside each matrix."""
    lora_alpha: PositiveInt = 32
    """Scale of that product: it is multiplied by lora_alpha / r."""
    use_rslora: bool = False
    """Whether it is lora_alpha / √r instead (Kalajdzievski, arXiv 2312.03732), so that products of
    large ranks learn as fast as those of small ones."""
    use_dora: bool = False
    """Whether the rows of the adapted matrices keep their norms, which are trained by themselves
    (DoRA, Liu et al., arXiv 2402.09353): closer to training all weights, and slower."""
    lora_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of what enters the product that is zeroed in each step. Each process draws its own: a
    run resumes to the same bits with as many processes."""
    target_modules: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layers of every decoder layer that are adapted. With [] only the memory is trained,
    and modules_to_save."""
    modules_to_save: tuple[SavedModule, ...] = ()
    """Modules trained whole, and saved with the adapter, by the end of their names: norm stands for
    all norms. Long contexts need [embed_tokens, norm]."""


class EarlyStoppingConfig(Section):
    """The end of a training whose validation loss no longer improves."""

    patience: PositiveInt = 5
    """Validations without an improvement after which the training ends."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest improvement of the loss that counts, in nats per token."""


class TrainingConfig(Section):
    """Optimizer, schedule and batches."""

    objective: Literal["causal", "masked_diffusion", "block_diffusion"] = "causal"
    """What the model learns: causal predicts each next token; masked_diffusion (LLaDA) fills in
    masked tokens and generates in any order; block_diffusion does so in each segment, and reads
    those before it from the memory."""
    epochs: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Passes over the training split, such as 3 or 0.5; set this or max_steps. Converted to steps
    when training starts."""
    max_steps: PositiveInt | None = Field(
        default_factory=lambda fields: 200 if fields.get("epochs") is None else None
    )
    """Total optimizer steps; the default is 200, or null if epochs is set."""
    batch_size: PositiveInt = 8
    """Windows per process and micro-batch; the global batch is batch_size ×
    gradient_accumulation_steps × processes."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches accumulated per optimizer step."""
    batch_schedule: Schedule | None = None
    """Global batches that a step takes from a fraction of the steps on, such as {0: 1, 0.25: 2,
    0.5: 4}, each at most 16 times the one before; the learning rate keeps its own schedule. null
    (default) is one throughout."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon (Liu et al., arXiv 2502.16982), which makes the steps of the layers' matrices
    orthogonal, keeps one moment of them where AdamW keeps two, and leaves the rest to AdamW;
    learning_rate and weight_decay keep AdamW's scale."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    memory_learning_rate: PositiveFloat = 1e-2
    """Peak learning rate of the memory's own parameters: weights, gates, shifts."""
    min_learning_rate_ratio: Fraction = 0.1
    """Final learning rate of a schedule that decays, as a fraction of the peak."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up: cosine and linear decay from then on; wsd (warm-up, stable,
    decay) keeps the peak until the last decay_steps, and decays linearly in those; constant keeps
    it."""
    warmup_steps: NonNegativeInt = 20
    """Optimizer steps of linear warm-up."""
    decay_steps: PositiveInt | None = None
    """Last optimizer steps of the training, in which the learning rate decays; null (default) is
    all after the warm-up, with wsd a fifth of the training."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, applied to matrices only."""
    adam_beta1: Beta = 0.9
    """AdamW's beta1."""
    adam_beta2: Beta = 0.95
    """AdamW's beta2."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm above which gradients are clipped."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Data type of matrix products; auto is fp32 on the CPU, bf16 on GPUs that have it (compute
    capability 8.0), else fp16, which scales the loss and skips steps whose gradients overflow.
    Weights and optimizer state stay in float32."""
    branch_of: Annotated[str, takes("RUN or RUN@STEP", BRANCH.fullmatch)] | None = None
    """Run of this output folder whose newest checkpoint, or that of STEP, the run begins from: with
    its weights, the optimizer's state and its position in the data. infini branch sets it; null
    (default) begins anew."""
    early_stopping: EarlyStoppingConfig | None = None
    """Ends the training before its last step once the validation loss no longer improves; the
    schedule of the learning rate stays that of all steps. null (default) is off."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters, in peft's format, beside the frozen model.initial_weights; null
    (default) trains all weights."""

    @property
    def total_steps(self) -> int:
        """Total optimizer steps. Raises `ValueError` if only `epochs` is set."""
        if self.max_steps is None:
            raise ValueError("training.epochs is converted to steps when training starts")
        return self.max_steps

    def batches_by(self, step: int) -> int:
        """Count the global batches that the first `step` steps take."""
        schedule = self.batch_schedule or {0.0: 1}
        starts = [math.ceil(fraction * self.total_steps) for fraction in schedule]
        phases = zip(schedule.values(), starts, [*starts[1:], step], strict=True)
        return sum(count * max(0, min(step, end) - start) for count, start, end in phases)

    def steps_of(self, batches: int, first: int = 0) -> int:
        """Find a total of steps that take so many global batches after the `first` steps.

        One step fewer takes less.
        """

        def taken(total: int) -> int:
            whole = self.updated(max_steps=total)
            return whole.batches_by(total) - whole.batches_by(first)

        return bisect_left(range(first + max(batches, 0) + 1), batches, key=taken)

    def conflicts(self) -> Iterator[str]:
        if (self.max_steps is None) == (self.epochs is None):
            yield "takes exactly one of max_steps and epochs"
        counts = [*(self.batch_schedule or {}).values()]
        if any(after > 16 * before for before, after in pairwise(counts)):
            yield "batch_schedule grows more than 16-fold at once, and would look like a hang"
        if self.lora is not None and self.optimizer == "muon":
            yield "optimizer=muon does not support lora; set optimizer=adamw"
        if self.decay_steps is not None:
            if self.schedule == "constant":
                yield "decay_steps needs another schedule; constant does not decay"
            used = self.warmup_steps + self.decay_steps
            if self.max_steps is not None and used > self.max_steps:
                yield (
                    f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} are more "
                    f"than max_steps {self.max_steps}"
                )


class LaunchConfig(Section):
    """Hardware and processes of a training run, and how hangs and failures are handled."""

    gpus: Gpus = "auto"
    """auto (the GPUs with the most free memory, all of them unless processes is set; the CPU if
    there is none), all, GPU numbers such as 0,3, or cpu."""
    processes: PositiveInt | None = None
    """Processes on this machine; null (default) is one per GPU, or one on the CPU."""
    launcher: Literal["local", "ray"] = "local"
    """Where the processes are started: local is this machine, ray the nodes of the Ray cluster that
    it is a node of. With ray, losing a node costs the steps since the last checkpoint; the training
    continues on the remaining nodes."""
    nodes: Nodes | None = None
    """Nodes of the Ray cluster to train on, a number or a range such as 2-4; null (default) is
    one."""
    num_nodes: PositiveInt = 1
    """Number of machines that train together, each with a launcher of its own."""
    node_rank: NonNegativeInt = 0
    """Rank of this machine, from 0 to num_nodes - 1."""
    rdzv_endpoint: str | None = None
    """host:port of the machine of rank 0; required if num_nodes is over 1."""
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """How processes share the model: ddp keeps a full copy in each; fsdp shards it, for models too
    large for one device; hsdp shards it over the processes of each machine, so that only gradients
    pass between machines. May change when a run resumes."""
    attention_backend: AttentionBackend = "auto"
    """Kernel of the exact attention: flash is the package flash-attn, for 16 bits on a GPU; sdpa is
    PyTorch's own choice; auto uses flash where it is installed and suits the GPU."""
    gradient_checkpointing: Recomputed = "auto"
    """Layers that recompute their activations in the backward pass instead of storing them: all
    (true), none (false), a number of them, or as few as memory needs (auto). Less memory, for all
    about a third more time, identical results."""
    deterministic: bool = True
    """Whether GPUs use deterministic kernels only, so that on the same machine a resumed run ends
    bit-identical to an uninterrupted one; an operation without such a kernel ends the training.
    false may be faster, and resumes without that guarantee."""
    compile: bool | None = None
    """Whether torch.compile fuses what a layer computes around its matrix products, in training
    steps only. The first step takes longer, results agree up to rounding. null (default) is yes on
    a GPU where Triton and a C compiler are installed, no on the CPU."""
    hang_timeout_seconds: PositiveFloat | None = None
    """Seconds without a step after which training counts as hung and is killed; null (default) is
    20 times the usual step time, at least 60 s."""
    force: bool = False
    """Whether to train even where the memory estimate says that it cannot fit."""

    def conflicts(self) -> Iterator[str]:
        if self.node_rank >= self.num_nodes:
            yield f"node_rank {self.node_rank} must be below num_nodes {self.num_nodes}"
        if self.num_nodes > 1 and self.rdzv_endpoint is None:
            yield "num_nodes over 1 needs rdzv_endpoint=host:port"
        if self.launcher == "local":
            if self.nodes is not None:
                yield "nodes needs launcher=ray; elsewhere num_nodes is their number"
        elif self.num_nodes > 1:
            yield "num_nodes needs launcher=local; on Ray nodes is their number"
        elif self.gpus not in ("auto", "all", "cpu"):
            yield f"gpus {self.gpus} needs launcher=local; Ray chooses the GPUs of a node"

    def may_recompute(self, layers: int) -> Sequence[int]:
        """The numbers of `layers` that may be recomputed: the one that is set, or all from 0 on."""
        setting = self.gradient_checkpointing
        if setting == "auto":
            return range(layers + 1)
        return [layers if setting is True else min(layers, int(setting))]

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes of a Ray cluster to train on."""
        least, _, most = (self.nodes or "1").partition("-")
        return int(least), int(most or least)


class ProfileConfig(Section):
    """The steps that are profiled, by their numbers."""

    start: Annotated[int, Field(ge=2, le=MOST)] = 20
    """First step; the one before it warms the profiler up."""
    steps: Annotated[int, Field(ge=1, le=100)] = 3
    """Number of steps; fewer if a validation or a checkpoint comes between."""


class LoggingConfig(Section):
    """What a training run reports while it runs, and how often."""

    logging_steps: PositiveInt = 10
    """Steps between log lines."""
    eval_steps: PositiveInt = 50
    """Steps between validations."""
    sample_steps: PositiveInt | None = None
    """Steps between samples in the log, a multiple of eval_steps: a held-out document, continued
    with the settings of evaluation.sample; null (default) is none."""
    tensorboard_dir: LocalFolder | None = None
    """Folder for TensorBoard files; null (default) is logs/tensorboard in the run folder."""
    profile: ProfileConfig | None = None
    """Profiles a few steps: torch.profiler's trace of each rank, and on a GPU the history of its
    memory, in profile in the run folder and in MLflow; the dearest operators in the report. null
    (default) is off."""
    debug: bool = False
    """Whether to print a report of the tensors at fault when a loss or gradient is NaN or
    infinite."""


class CheckpointConfig(Section):
    """How often checkpoints are saved, and how many are kept."""

    save_steps: PositiveInt = 50
    """Steps between checkpoints."""
    save_total_limit: PositiveInt = 2
    """Checkpoints to keep; older ones are deleted."""
