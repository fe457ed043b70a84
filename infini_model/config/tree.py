"""One tree of settings: the YAML presets, the Prefect form and the command-line overrides.

Unknown keys are refused, and every value is checked before any work starts. Nothing here imports
torch, so that a worker or the UI loads the tree in a blink.

Names follow Hugging Face's `LlamaConfig` (model) and `TrainingArguments` (training).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

MEBIBYTE = 1 << 20


class _DecidesWeights:
    """Marks a field that decides the weights in a section whose other fields do not."""


DECIDES_WEIGHTS = _DecidesWeights()


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are finite and do not change.

    YAML reads `launch.gpus=0` as a number; where text is wanted it is taken as text.

    Attributes:
        decides_weights: Whether another value of its fields gives other weights at the end of a
            run; an interrupted run resumes under any change of the others. Every section of
            `Config` says so of itself, and its own sections follow it.
    """

    decides_weights: ClassVar[bool]

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    )


def _check_gpus(value: str) -> str:
    if value in ("auto", "all", "cpu") or re.fullmatch(r"\d+(,\d+)*", value):
        return value
    raise ValueError("takes auto, all, cpu, or device numbers such as 0,3")


def _check_device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?|mixed", value):
        return value
    raise ValueError("takes auto, cpu, cuda, cuda:N, or mixed")


# For the form; the validators say more than that a pattern does not match.
GPUS_SCHEMA = {"type": "string", "pattern": r"^(auto|all|cpu|\d+(,\d+)*)$"}
DEVICE_SCHEMA = {"type": "string", "pattern": r"^(auto|cpu|cuda(:\d+)?|mixed)$"}
Gpus = Annotated[str, AfterValidator(_check_gpus), WithJsonSchema(GPUS_SCHEMA)]
Device = Annotated[str, AfterValidator(_check_device), WithJsonSchema(DEVICE_SCHEMA)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
AttentionBackend = Literal["auto", "flash_attn", "flash", "cudnn", "efficient", "math", "tiled"]


class FilesSource(Section):
    """Text in files: local ones are read in place, remote ones are brought down first."""

    kind: Literal["files"] = "files"
    paths: list[str] = Field(
        default=["{stdlib}/**/*.py"],
        min_length=1,
        description="Globs or URLs (http, https, s3, … by fsspec); {stdlib} is the folder of "
        "Python's own sources. .txt .md .rst .py hold one document a file; .jsonl (.gz, .zst), "
        ".parquet and .arrow one a row.",
    )
    column: str = Field("text", description="Column of .jsonl, .parquet and .arrow files to read.")
    errors: Literal["fail", "skip", "replace"] = Field(
        "fail",
        description="What to do about a document that is not UTF-8: stop and name it, leave it "
        "out, or put U+FFFD where it is broken.",
    )
    separator: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Text between the documents of a .txt, .md, .rst or .py file, such as a blank "
        "line; None takes a file as one document.",
    )
    min_characters: NonNegativeInt = Field(
        0, description="Shortest document to keep, in characters."
    )


class HubSource(Section):
    """A dataset of the Hugging Face hub, streamed into raw partitions."""

    kind: Literal["hub"] = "hub"
    repository: str = Field(description="Name on the hub, such as ccdv/arxiv-summarization.")
    configuration: str | None = Field(None, description="Configuration (subset) of the dataset.")
    split: str = Field("train", description="Split of the hub's dataset to read.")
    revision: str | None = Field(
        None, description="Commit, tag or branch; pinned to a commit when the download starts."
    )
    column: str = Field("text", description="Column that holds the text.")
    limit: PositiveInt | None = Field(None, description="Rows to read; None reads all of them.")
    min_characters: NonNegativeInt = Field(
        0, description="Shortest document to keep, in characters (applied after `limit`)."
    )


def source_kind(value: Any) -> Any:
    """The kind of source that a section of the tree describes."""
    if isinstance(value, Mapping):
        return value.get("kind", "files")
    return getattr(value, "kind", None)


Source = Annotated[
    Annotated[FilesSource, Tag("files")] | Annotated[HubSource, Tag("hub")],
    Discriminator(source_kind),
]


class TokenizerConfig(Section):
    """How text becomes token ids."""

    spec: str = Field(
        "bytes",
        min_length=1,
        description="bytes (each UTF-8 byte is a token), train (a byte-level BPE trained on the "
        "corpus), a path to a tokenizer.json, or the name of a tokenizer on the hub.",
    )
    vocab_size: Annotated[int, Field(ge=257, le=1 << 24)] = Field(
        4096, description="Entries of the vocabulary that `spec: train` makes."
    )


class SplitsConfig(Section):
    """Shares of the documents; a document's split is chosen by a hash of its content."""

    train: Fraction = Field(0.9, description="Share of the documents to train on.")
    validation: Fraction = Field(0.05, description="Share of the documents to validate on.")
    test: Fraction = Field(0.05, description="Share of the documents for the final test.")

    @model_validator(mode="after")
    def _sum_to_one(self) -> Self:
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        if self.train == 0.0:
            raise ValueError("train must be more than 0")
        return self


class DataConfig(Section):
    """From text to a dataset folder."""

    # What it decides is in the dataset's key, which depends on content alone.
    decides_weights = False

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(
        "corpus", description="First part of the dataset folder's name; the content key follows."
    )
    source: Source = Field(FilesSource(errors="skip"), description="Where the text comes from.")
    tokenizer: TokenizerConfig = TokenizerConfig()
    splits: SplitsConfig = SplitsConfig()
    folder: Path | None = Field(
        None, description="A finished dataset folder to use instead of making one."
    )
    partition_megabytes: PositiveInt = Field(
        32,
        description="Text in one partition at most, in MiB, the unit of parallel work and of "
        "reuse; there are a power of two of them, and a small corpus has smaller ones. Each "
        "thread needs five to ten times as much memory.",
    )
    workers: NonNegativeInt = Field(
        0,
        description="Threads that read and tokenise; 0 is one for each core, and to tokenise one "
        "more.",
    )
    device: Device = Field(
        "auto",
        description="Where to tokenise: cpu, which is auto as well; cuda, which is every GPU, or "
        "cuda:N; mixed is every GPU and the other cores. The tokens are the same everywhere.",
    )
    batch_size: PositiveInt = Field(
        1 << 16, description="Documents tokenised at once at most, of 16 MiB or one of any size."
    )


class PackingConfig(Section):
    """How the token stream is cut into windows; it never costs a new tokenisation."""

    decides_weights = True

    mode: Literal["packed", "document", "aligned"] = Field(
        "packed",
        description="packed cuts the token stream into windows; document cuts each document by "
        "itself; aligned starts each document on a segment boundary and resets the memory there.",
    )
    context_length: PositiveInt = Field(512, description="Tokens the model sees in one window.")
    remainder: Literal["drop", "pad"] = Field(
        "drop", description="document mode: what becomes of the tokens after the last full window."
    )


class RopeScaling(Section):
    """Rotary frequencies as Llama 3.1 stretches them, for contexts longer than the pretraining's.

    Wavelengths longer than original_max_position_embeddings / low_freq_factor become `factor` times
    as long, those shorter than … / high_freq_factor stay, and between them the change is gradual.
    """

    rope_type: Literal["llama3"] = Field("llama3", description="How frequencies are changed.")
    factor: Annotated[float, Field(ge=1.0)] = Field(
        description="How many times longer the longest wavelengths become."
    )
    low_freq_factor: PositiveFloat = Field(
        description="Where the full change ends: original length / wavelength."
    )
    high_freq_factor: PositiveFloat = Field(
        description="Where the change has faded out: original length / wavelength."
    )
    original_max_position_embeddings: PositiveInt = Field(
        description="Context length of the pretraining, in tokens."
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be below "
                f"high_freq_factor {self.high_freq_factor:g}"
            )
        return self


def _share_of_a_head(fields: dict[str, Any]) -> int:
    return int(fields["hidden_size"] // fields["num_attention_heads"])


class ModelConfig(Section):
    """The shape of an Infini-Llama."""

    decides_weights = True

    vocab_size: PositiveInt | None = Field(
        None, description="Entries of the embedding; None takes the tokenizer's."
    )
    hidden_size: PositiveInt = Field(128, description="Width of the residual stream.")
    num_hidden_layers: PositiveInt = Field(2, description="Decoder layers.")
    num_attention_heads: PositiveInt = Field(4, description="Query heads of a layer.")
    num_key_value_heads: PositiveInt | None = Field(
        None, description="Key-value heads of a layer; None is one for each query head."
    )
    head_dim: PositiveInt = Field(
        default_factory=_share_of_a_head,
        description="Width of one head; the default is hidden_size / num_attention_heads.",
    )
    intermediate_size: PositiveInt = Field(384, description="Width of the SwiGLU feed-forward.")
    rope_theta: PositiveFloat = Field(10_000.0, description="Base of the rotary embedding.")
    rope_scaling: RopeScaling | None = Field(
        None, description="Change of the rotary frequencies as in Llama 3.1; None leaves them."
    )
    rms_norm_eps: PositiveFloat = Field(1e-5, description="Epsilon of RMSNorm.")
    tie_word_embeddings: bool = Field(
        False, description="Whether the output layer is the embedding itself."
    )
    initializer_range: PositiveFloat = Field(
        0.02, description="Standard deviation of the first weights."
    )
    segment_length: PositiveInt = Field(
        128, description="Tokens of a segment: exact attention inside, memory beyond."
    )
    memory: Literal["linear", "delta", "none"] = Field(
        "linear",
        description="Update rule of the compressive memory: linear adds, delta overwrites what "
        "stands under the same keys; none keeps segments apart.",
    )
    memory_key_shift: bool = Field(
        True,
        description="Whether values are filed under a learned mix of their own key and the one "
        "before, so that the memory can answer what came after; false is the paper's form.",
    )

    @property
    def key_value_heads(self) -> int:
        """Key-value heads of a layer, resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @model_serializer(mode="wrap")
    def _without_the_default_head_dim(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Leave out what follows from other fields: they may be overridden in a written tree."""
        tree = serialize(self)
        if "head_dim" not in self.model_fields_set:
            tree.pop("head_dim", None)
        return tree

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, not {self.head_dim}")
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.key_value_heads}"
            )
        return self


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
    eval_batches: PositiveInt | None = Field(
        None, description="Batches of one validation or test; None takes the whole split."
    )
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


class EvaluationConfig(Section):
    """What is measured after training."""

    decides_weights = False

    max_batches: PositiveInt | None = Field(
        None, description="Batches of each split to score; None takes all."
    )
    batch_size: PositiveInt = Field(8, description="Windows scored at once.")
    prompt_tokens: PositiveInt = Field(
        256, description="Tokens of a test document that the sample continues."
    )
    max_new_tokens: PositiveInt = Field(200, description="Tokens of the sample.")
    temperature: NonNegativeFloat = Field(0.8, description="0 takes the likeliest token.")
    top_k: PositiveInt | None = Field(50, description="Likeliest tokens to draw from.")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Draw from the fewest likeliest tokens that have this probability."
    )


class TrackingConfig(Section):
    """Where the record of a run goes."""

    decides_weights = False

    mlflow: bool = Field(True, description="Whether runs are recorded in MLflow.")
    tracking_uri: str | None = Field(
        None, description="MLflow's address; None is a SQLite file in run.output_dir."
    )
    experiment_name: str = Field("infini-llama", description="MLflow experiment of the runs.")
    log_model: bool = Field(
        True,
        description="Whether the model of a finished run is logged in MLflow, from where it can be "
        "loaded; costs a copy of the weights, four bytes a parameter.",
    )
    registered_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None,
        description="Name under which the logged model is registered in MLflow; of its versions "
        "the one with the lowest validation loss has the alias best. None registers nothing.",
    )
    tensorboard: bool = Field(True, description="Whether TensorBoard files are written.")

    @model_validator(mode="after")
    def _registers_what_is_logged(self) -> Self:
        if self.registered_model is not None and not (self.mlflow and self.log_model):
            raise ValueError("registered_model needs mlflow and log_model")
        return self


class StageConfig(Section):
    """How a Prefect task is retried and when it is ended."""

    retries: NonNegativeInt = Field(2, description="Further tries after a failure.")
    retry_delay_seconds: NonNegativeFloat = Field(
        2.0, description="Delay before the first retry in seconds; doubled each time, jittered."
    )
    timeout_seconds: PositiveFloat | None = Field(
        None, description="Seconds after which the stage and all its processes are ended."
    )


class StagesConfig(Section):
    """The four stages of the pipeline."""

    decides_weights = False

    download: StageConfig = StageConfig(retries=4)
    shard: StageConfig = StageConfig()
    train: StageConfig = StageConfig()
    evaluate: StageConfig = StageConfig()


class RunConfig(Section):
    """Names, places and the seed of a run."""

    decides_weights = False

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None, description="Folder of the run below runs/; None numbers runs of the preset."
    )
    preset: str | None = Field(None, description="Preset that the tree began from.")
    output_dir: Path = Field(
        default_factory=lambda: Path(os.environ.get("INFINI_OUTPUT_DIR", "outputs")),
        description="Folder that holds datasets/, runs/ and the records; the environment variable "
        "INFINI_OUTPUT_DIR changes the default.",
    )
    data_dir: Path | None = Field(
        None, description="Folder of the datasets; None is datasets/ in output_dir."
    )
    seed: Annotated[NonNegativeInt, DECIDES_WEIGHTS] = Field(
        0, description="Seed of weights, window order and samples."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message to print."
    )

    @property
    def datasets_dir(self) -> Path:
        """Where dataset folders appear."""
        return self.data_dir or self.output_dir / "datasets"

    @property
    def runs_dir(self) -> Path:
        """Where run folders appear."""
        return self.output_dir / "runs"


class Config(Section):
    """Everything that a pipeline run is told."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()
    stages: StagesConfig = StagesConfig()

    @model_validator(mode="after")
    def _segments_fill_the_context(self) -> Self:
        if self.packing.context_length % self.model.segment_length:
            raise ValueError(
                f"packing.context_length {self.packing.context_length} is not a multiple of "
                f"model.segment_length {self.model.segment_length}"
            )
        return self

    @model_validator(mode="after")
    def _nodes_share_a_run(self) -> Self:
        if self.launch.num_nodes > 1 and self.run.name is None:
            raise ValueError("launch.num_nodes over 1 needs run.name, the same on each machine")
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the weights, by section: equal for two commands that continue one run.

        The data's share is not here but in the dataset's key, which depends on content alone.
        """
        return self.model_dump(mode="json", include=_IDENTITY)

    @property
    def tracking_uri(self) -> str:
        """MLflow's address, resolved."""
        if self.tracking.tracking_uri is not None:
            return self.tracking.tracking_uri
        return f"sqlite:///{(self.run.output_dir / 'mlflow' / 'mlflow.db').resolve()}"


def _deciding_fields(section: type[Section]) -> set[str]:
    """The fields of a section of `Config` that decide the weights."""
    return {
        name
        for name, field in section.model_fields.items()
        if section.decides_weights or DECIDES_WEIGHTS in field.metadata
    }


_IDENTITY = {
    name: fields
    for name, field in Config.model_fields.items()
    if (fields := _deciding_fields(cast("type[Section]", field.annotation)))
}
