"""The configuration tree behind the YAML presets, the Prefect form and command-line overrides.

Unknown keys are rejected, and every value is checked before any work starts. Nothing here imports
torch, so that a worker or the UI loads the tree quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from infini_model.config.data import DataConfig, PackingConfig
from infini_model.config.evaluation import EvaluationConfig
from infini_model.config.locations import SplitFolder, StoreAddress, split_addresses
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS, ModelConfig
from infini_model.config.section import DECIDES_WEIGHTS, Section
from infini_model.config.training import (
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    TrainingConfig,
)

# The value of `data.tokenizer.spec` that stands for the tokenizer of `model.initial_weights`.
MODEL_SPEC = "model"


class TrackingConfig(Section):
    """Experiment tracking: MLflow and TensorBoard."""

    decides_weights = False

    mlflow: bool = True
    """Whether to record runs in MLflow."""
    tracking_uri: str | None = None
    """MLflow tracking URI; null (default) is a SQLite file in run.output_dir."""
    experiment_name: str = "infini-llama"
    """MLflow experiment to record runs in."""
    log_model: bool = True
    """Whether to log the final model to MLflow, so that it can be loaded from there; stores a copy
    of the weights, four bytes per parameter."""
    registered_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name to register the logged model under in MLflow; the alias best points to the version with
    the lowest validation loss. null (default) does not register it."""
    tensorboard: bool = True
    """Whether to write TensorBoard files."""

    @model_validator(mode="after")
    def _registered_model_is_logged(self) -> Self:
        if self.registered_model is not None and not (self.mlflow and self.log_model):
            raise ValueError("registered_model needs mlflow and log_model")
        return self


class StageConfig(Section):
    """Retries and timeout of a Prefect task."""

    retries: NonNegativeInt = 2
    """Retries after a failure."""
    retry_delay_seconds: NonNegativeFloat = 2.0
    """Seconds before the first retry; doubled for each further one, with jitter."""
    timeout_seconds: PositiveFloat | None = None
    """Seconds after which the stage and all its processes are killed; null (default) is no
    limit."""


class FetchStageConfig(StageConfig):
    """The same for a stage that fetches over the network."""

    retries: NonNegativeInt = 4


class CleanStageConfig(StageConfig):
    """The same for the cleaning, which is not worth a retry."""

    retries: NonNegativeInt = 0


class FlowStageConfig(StageConfig):
    """The same for a stage with a flow of its own, which a worker elsewhere can run."""

    deployment: Annotated[str, Field(pattern=r"^[^/]+(/[^/]+)?$")] | None = None
    """Deployment of the stage's flow, NAME or FLOW/NAME: the pipeline and a sweep run the stage as
    a flow run of it, in its work pool; null (default) runs it in place."""


class StagesConfig(Section):
    """Retries, timeouts and places of the stages of the pipeline and of the cleaning after them.

    `shard` is the flow preprocess: the download, the plan and the shards.
    """

    decides_weights = False

    weights: FetchStageConfig = FetchStageConfig()
    download: FetchStageConfig = FetchStageConfig()
    shard: FlowStageConfig = FlowStageConfig()
    train: FlowStageConfig = FlowStageConfig()
    evaluate: FlowStageConfig = FlowStageConfig()
    clean: CleanStageConfig = CleanStageConfig()

    @property
    def in_place(self) -> Self:
        here = {"deployment": None}
        return self.updated(shard=here, train=here, evaluate=here)


class ComparisonConfig(Section):
    """What `infini compare` compares: existing runs, and those of a sweep, which it runs first."""

    decides_weights = False

    runs: list[str] = []
    """Names or folders of runs to compare. The losses of the others are compared with those of the
    first one that is evaluated."""
    sweep: list[str] = []
    """Settings whose combinations are run first, one after another, each as KEY=VALUE,VALUE such as
    model.memory=linear,none."""


class RunConfig(Section):
    """Name, folders, seed and log level of a run."""

    decides_weights = False

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the run folder in runs/; null (default) resumes an interrupted run of the same
    settings or numbers a new one after the preset."""
    preset: str | None = None
    """Preset the settings are based on."""
    chosen_for: str | None = None
    """Key of the typed settings for which infini run chose the preset; infini run sets it, so that
    the same command resumes."""
    output_dir: SplitFolder = Path("outputs")
    """Folder for datasets/, runs/ and the tracking records; the default is outputs, or the
    environment variable INFINI_OUTPUT_DIR. An address (s3://, gs:// or az://) sets store, and a
    working folder in ~/.cache/infini-llama."""
    data_dir: SplitFolder | None = None
    """Folder for datasets; null (default) is datasets/ in output_dir. An address sets
    data_store."""
    store: StoreAddress | None = None
    """Address of an object store that keeps datasets and runs for all machines; output_dir is then
    a working copy."""
    data_store: StoreAddress | None = None
    """Address for datasets; null (default) is datasets/ in store."""
    seed: Annotated[NonNegativeInt, DECIDES_WEIGHTS] = 0
    """Seed of the initial weights, the window order, what an objective draws, and samples."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of messages to print."""

    @model_validator(mode="before")
    @classmethod
    def _split_addresses(cls, values: Any) -> Any:
        return split_addresses(values)

    @property
    def datasets_dir(self) -> Path:
        return self.data_dir or self.output_dir / "datasets"

    @property
    def datasets_store(self) -> str | None:
        """Address that contains the dataset folders of all machines, if there is one."""
        if self.data_store is None and self.store is not None and self.data_dir is None:
            return f"{self.store}/datasets"
        return self.data_store

    @property
    def runs_dir(self) -> Path:
        return self.output_dir / "runs"


class Config(Section):
    """All settings of a pipeline run."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    tracking: TrackingConfig = TrackingConfig()
    stages: StagesConfig = StagesConfig()

    @model_validator(mode="before")
    @classmethod
    def _objectives_have_defaults_of_their_own(cls, values: Any) -> Any:
        """Those of the model: masked diffusion sees whole windows, without a memory.

        Block diffusion has nothing but the memory to see what lies before a segment, so gates start
        open, unless the weights are those of a model without one.
        """
        if not isinstance(values, Mapping):
            return values
        sections = [values.get(name, {}) for name in ("training", "model", "packing")]
        if not all(isinstance(section, Mapping) for section in sections):
            return values
        training, model, packing = sections
        is_new = model.get("initial_weights") is None
        shape: dict[str, Any] = {}
        if training.get("objective") == "masked_diffusion":
            shape["memory"] = "none"
            if is_new:
                default = PackingConfig.model_fields["context_length"].default
                shape["segment_length"] = packing.get("context_length", default)
        elif training.get("objective") == "block_diffusion" and is_new:
            has_gates = model.get("memory") in ("linear", "delta")
            shape = {"gate_start": 0.0} if has_gates else {}
        return {**values, "model": shape | dict(model)} if shape else values

    @model_validator(mode="after")
    def _shape_comes_with_initial_weights(self) -> Self:
        model = self.model
        if model.initial_weights is None:
            return self
        for name in type(model).model_fields:
            if name in model.model_fields_set and name not in BESIDE_INITIAL_WEIGHTS:
                raise ValueError(f"model.{name}: comes from model.initial_weights; leave it out")
        cuts_windows = self.training.objective != "masked_diffusion"
        if cuts_windows and "segment_length" not in model.model_fields_set:
            raise ValueError(
                "model.segment_length: missing; model.initial_weights does not say where its "
                "context is to be cut"
            )
        return self

    @model_validator(mode="after")
    def _tokenizer_of_the_model_has_a_model(self) -> Self:
        if self.data.tokenizer.spec == MODEL_SPEC and self.model.initial_weights is None:
            raise ValueError(
                "data.tokenizer.spec: model is the tokenizer of model.initial_weights, which is "
                "not set"
            )
        return self

    @model_validator(mode="after")
    def _lora_has_weights_to_adapt(self) -> Self:
        if self.training.lora is not None and self.model.initial_weights is None:
            raise ValueError(
                "training.lora: adapts model.initial_weights, which is not set; set it, or "
                "training.lora=null"
            )
        return self

    @model_validator(mode="after")
    def _segments_fill_the_context(self) -> Self:
        if self.training.objective == "masked_diffusion":
            return self
        if self.packing.context_length % self.model.segment_length:
            raise ValueError(
                f"packing.context_length {self.packing.context_length} is not a multiple of "
                f"model.segment_length {self.model.segment_length}"
            )
        return self

    @model_validator(mode="after")
    def _windows_grow_to_the_context(self) -> Self:
        schedule = self.packing.context_schedule
        if schedule is None:
            return self
        if self.training.objective == "masked_diffusion":
            raise ValueError("packing.context_schedule: masked_diffusion has no segments")
        longest = [*schedule.values()][-1] * self.model.segment_length
        if longest != self.packing.context_length:
            raise ValueError(
                f"packing.context_schedule: ends with windows of {longest} tokens, not of "
                f"packing.context_length {self.packing.context_length}"
            )
        return self

    @model_validator(mode="after")
    def _model_fits_the_objective(self) -> Self:
        model, length = self.model, self.packing.context_length
        if self.training.objective == "causal":
            if model.bidirectional:
                raise ValueError(
                    "model.bidirectional: needs training.objective=masked_diffusion or "
                    "block_diffusion"
                )
            return self
        if self.training.objective == "block_diffusion":
            if model.memory == "none":
                raise ValueError(
                    "model.memory: none, but block_diffusion reads the segments before from it"
                )
            return self
        if model.memory != "none":
            raise ValueError(
                f"model.memory: {model.memory} does not combine with "
                "training.objective=masked_diffusion; set it to none"
            )
        if "segment_length" in model.model_fields_set and model.segment_length < length:
            raise ValueError(
                f"model.segment_length: {model.segment_length} is less than "
                f"packing.context_length {length}; masked_diffusion sees whole windows"
            )
        return self

    @model_validator(mode="after")
    def _nodes_share_a_run(self) -> Self:
        if self.launch.num_nodes > 1 and self.run.name is None:
            raise ValueError("launch.num_nodes over 1 needs run.name, the same on every machine")
        return self

    @property
    def data_to_tokenize(self) -> DataConfig:
        """The section `data`, with the tokenizer that `spec: model` stands for."""
        tokenizer = self.data.tokenizer
        if tokenizer.spec != MODEL_SPEC:
            return self.data
        return self.data.updated(tokenizer={"spec": self.model.initial_weights})

    @property
    def deployments(self) -> dict[str, str]:
        """The deployments as which stages run, by stage; `data.folder` leaves nothing to shard."""
        named = {
            name: stage.deployment
            for name, stage in self.stages
            if isinstance(stage, FlowStageConfig) and stage.deployment is not None
        }
        if self.data.folder is not None:
            named.pop("shard", None)
        return named

    @property
    def in_place(self) -> Self:
        """The same with all stages in place, for the flow of a stage."""
        return self.updated(stages=self.stages.in_place)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that decide the weights, by section; commands with equal ones share a run.

        The dataset is not part of it: its own key, which depends on content only, identifies it.
        """
        return self.model_dump(mode="json", include=_IDENTITY)

    @property
    def tracking_uri(self) -> str:
        """MLflow tracking URI, with the default resolved."""
        if self.tracking.tracking_uri is not None:
            return self.tracking.tracking_uri
        return f"sqlite:///{(self.run.output_dir / 'mlflow' / 'mlflow.db').resolve()}"


def _deciding_fields(section: type[Section]) -> set[str]:
    """Names of the fields of a section of `Config` that decide the weights."""
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


def identity_keys() -> frozenset[str]:
    """The keys that decide the weights, those of nested sections with their own."""
    return frozenset(
        f"{section}.{name}" for section, fields in _IDENTITY.items() for name in fields
    )
