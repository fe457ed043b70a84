"""A training: the sections `training`, `launch`, `logging` and `checkpoint`.

Names follow Hugging Face's `TrainingArguments`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WithJsonSchema,
    model_validator,
)

from infini_model.config.section import Fraction, Section


def _check_gpus(value: str) -> str:
    if value in ("auto", "all", "cpu") or re.fullmatch(r"\d+(,\d+)*", value):
        return value
    raise ValueError("takes auto, all, cpu, or device numbers such as 0,3")


# For the form; the validator says more than that a pattern does not match.
GPUS_SCHEMA = {"type": "string", "pattern": r"^(auto|all|cpu|\d+(,\d+)*)$"}
Gpus = Annotated[str, AfterValidator(_check_gpus), WithJsonSchema(GPUS_SCHEMA)]
AttentionBackend = Literal["auto", "flash_attn", "flash", "cudnn", "efficient", "math", "tiled"]


def _steps_without_epochs(fields: dict[str, Any]) -> int | None:
    return 200 if fields.get("epochs") is None else None


class TrainingConfig(Section):
    """Optimizer, schedule and batches."""

    decides_weights = True

    epochs: PositiveFloat | None = Field(
        None,
        description="Passes over the training split, such as 3 or 0.5, instead of max_steps; the "
        "steps that this takes are known when the training starts.",
    )
    max_steps: PositiveInt | None = Field(
        default_factory=_steps_without_epochs,
        description="Optimizer steps in all; None where epochs is given.",
    )
    batch_size: PositiveInt = Field(
        8,
        description="Windows a process reads at once; the global batch is batch_size × "
        "gradient_accumulation_steps × processes.",
    )
    gradient_accumulation_steps: PositiveInt = Field(
        1, description="Micro-batches whose gradients make one step."
    )
    learning_rate: PositiveFloat = Field(1e-3, description="Peak of AdamW's learning rate.")
    gate_learning_rate: PositiveFloat = Field(
        1e-2, description="Peak learning rate of the memory gates and key shifts."
    )
    min_learning_rate_ratio: Fraction = Field(
        0.1, description="Where the cosine ends, as a share of the peak."
    )
    warmup_steps: NonNegativeInt = Field(20, description="Steps of linear warm-up.")
    weight_decay: NonNegativeFloat = Field(0.1, description="AdamW's decay of the matrices.")
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="AdamW's beta1.")
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.95, description="AdamW's beta2.")
    adam_epsilon: PositiveFloat = Field(1e-8, description="AdamW's epsilon.")
    max_grad_norm: PositiveFloat = Field(1.0, description="Norm to which gradients are clipped.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="Type of the matrix products; auto is bf16 on CUDA and fp32 on a CPU. fp16 is "
        "for GPUs without bf16: the loss is scaled, and a step whose gradients overflow is "
        "skipped. Weights and optimizer stay in float32.",
    )

    @property
    def total_steps(self) -> int:
        """Optimizer steps in all. Raises `ValueError` while only `epochs` says how many."""
        if self.max_steps is None:
            raise ValueError("the steps of training.epochs are known when the training starts")
        return self.max_steps

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError("takes max_steps or epochs, one of the two")
        return self


class LaunchConfig(Section):
    """Where and on what a training runs, and what is done when it hangs or fails."""

    decides_weights = False

    gpus: Gpus = Field(
        "auto", description="auto (the freest first), all, a list such as 0,3, or cpu."
    )
    processes: PositiveInt | None = Field(
        None, description="Processes on this machine; None is one a GPU, or one on a CPU."
    )
    num_nodes: PositiveInt = Field(1, description="Machines that train together.")
    node_rank: NonNegativeInt = Field(0, description="Number of this machine among them.")
    rdzv_endpoint: str | None = Field(
        None, description="host:port of the first machine, for num_nodes over 1."
    )
    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="How processes share the work: ddp gives each a copy of the model; fsdp gives "
        "each a part of it, for models that are too large for one device. It may change between "
        "two halves of a run.",
    )
    attention_backend: AttentionBackend = Field(
        "auto",
        description="Kernel of the attention inside segments: flash_attn is the package, tiled "
        "this library's own for CPUs, the others are PyTorch's; auto takes the fastest there is.",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="Whether a layer's activations are computed again in the backward pass instead "
        "of kept: less memory, about a third more time, the same numbers.",
    )
    deterministic: bool = Field(
        True,
        description="Whether a GPU adds up in a fixed order wherever it can, so that a resumed "
        "training ends with the same bits; false may be faster.",
    )
    hang_timeout_seconds: PositiveFloat | None = Field(
        None,
        description="Seconds without a step after which a training counts as hung and is ended; "
        "None is 20 times the usual step, at least a minute.",
    )
    skip_non_finite: bool = Field(
        False,
        description="Whether a training that ended with NaN or infinity passes over the global "
        "batch that did it when it is tried again.",
    )

    @model_validator(mode="after")
    def _nodes_meet(self) -> Self:
        if self.node_rank >= self.num_nodes:
            raise ValueError(f"node_rank {self.node_rank} must be below num_nodes {self.num_nodes}")
        if self.num_nodes > 1 and self.rdzv_endpoint is None:
            raise ValueError("num_nodes over 1 needs rdzv_endpoint=host:port")
        return self


class LoggingConfig(Section):
    """What a training tells of itself on its way, and how often."""

    decides_weights = False

    logging_steps: PositiveInt = Field(10, description="Steps from one log line to the next.")
    eval_steps: PositiveInt = Field(50, description="Steps from one validation to the next.")
    tensorboard_dir: Path | None = Field(
        None, description="Folder for TensorBoard; None is logs/tensorboard of the run."
    )
    debug: bool = Field(
        False, description="Print the report of the tensors at fault when a number goes wrong."
    )


class CheckpointConfig(Section):
    """How often a training is saved, and what is kept."""

    decides_weights = False

    save_steps: PositiveInt = Field(50, description="Steps from one checkpoint to the next.")
    save_total_limit: PositiveInt = Field(2, description="Newest checkpoints to keep.")
