"""The configuration tree behind the YAML presets, the Prefect form and command-line overrides.

Unknown keys are rejected, and every value is checked before any work starts. Nothing here imports
torch, so that a worker or the UI loads the tree quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from infini_model.config.data import DataConfig, PackingConfig
from infini_model.config.evaluation import EvaluationConfig
from infini_model.config.locations import SplitFolder, StoreAddress, is_store, working_folder
from infini_model.config.model import BESIDE_INITIAL_WEIGHTS, ModelConfig
from infini_model.config.section import Name, Section
from infini_model.config.training import (
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    TrainingConfig,
)

# The settings that decide the weights, by section. With other values a run cannot be resumed; what
# `data` decides, the dataset's own key says.
DECIDE_WEIGHTS = {
    "run": {"seed"},
    # A limit refuses a training, and changes none.
    "packing": {*PackingConfig.model_fields} - {"max_epochs"},
    "model": {*ModelConfig.model_fields},
    "training": {*TrainingConfig.model_fields},
}
# The value of `data.tokenizer.spec` that stands for the tokenizer of `model.initial_weights`.
MODEL_SPEC = "model"
# Prefect takes no more.
Retries = Annotated[int, Field(ge=0, le=50)]


class TrackingConfig(Section):
    """Experiment tracking: MLflow, TensorBoard, Weights & Biases and trackio."""

    mlflow: bool = True
    """Whether to record runs in MLflow."""
    tracking_uri: str | None = None
    """MLflow tracking URI; null (default) is MLFLOW_TRACKING_URI, or SQLite in run.output_dir."""
    experiment_name: str = "infini-llama"
    """MLflow experiment of the runs; the default is infini-llama, or MLFLOW_EXPERIMENT_NAME."""
    log_model: bool = True
    """Whether to log the final model to MLflow, so that it can be loaded from there; stores a copy
    of the weights, four bytes per parameter."""
    registered_model: Name | None = None
    """Name to register the logged model under in MLflow; the alias best points to the version with
    the lowest validation loss. null (default) does not register it."""
    tensorboard: bool = True
    """Whether to write TensorBoard files."""
    wandb: Name | None = None
    """Project of Weights & Biases to record runs in too, which needs the package wandb and a login
    or WANDB_API_KEY; null (default) is none."""
    trackio: bool = False
    """Whether to record runs in trackio too, in the project experiment_name; needs the
    package trackio."""

    @model_validator(mode="before")
    @classmethod
    def _take_experiment(cls, values: Any) -> Any:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        return {"experiment_name": name} | values if name and isinstance(values, dict) else values

    def conflicts(self) -> Iterator[str]:
        if self.registered_model is not None and not (self.mlflow and self.log_model):
            yield "registered_model needs mlflow and log_model"


class StagesConfig(Section):
    """Retries of the stages of the pipeline."""

    retries: Retries = 2
    """Retries of a stage after a failure."""
    fetch_retries: Retries = 4
    """The same of the stages weights and download, which fetch over the network."""
    retry_delay_seconds: NonNegativeFloat = 2.0
    """Seconds before the first retry; doubled for each further one, with jitter."""

    def retries_of(self, stage: str) -> int:
        """The retries of a stage of this name."""
        return self.fetch_retries if stage in ("weights", "download") else self.retries


class ComparisonConfig(Section):
    """What `infini compare` compares: existing runs, and those of a sweep, which it runs first."""

    runs: list[str] = []
    """Names or folders of runs to compare. The losses of the others are compared with those of the
    first one that is evaluated."""
    sweep: list[str] = []
    """Settings whose combinations are run first, one after another, each as KEY=VALUE,VALUE such as
    model.memory=linear,none; finished runs are reused."""


class RunConfig(Section):
    """Name, folders, seed and log level of a run."""

    name: Name | None = None
    """Name of the run folder in runs/; null (default) resumes an interrupted run of the same
    settings or numbers a new one after the preset."""
    preset: str | None = None
    """Presets the settings are based on, with hyphens between several."""
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
    seed: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] = 0
    """Seed of the initial weights, the window order, what an objective draws, and samples."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity of messages to print."""

    @model_validator(mode="before")
    @classmethod
    def _split_addresses(cls, values: Any) -> Any:
        """Divide folders that are addresses into the store and its local working folder."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        if output_dir := os.environ.get("INFINI_OUTPUT_DIR"):
            values.setdefault("output_dir", output_dir)
        for folder, store in (("output_dir", "store"), ("data_dir", "data_store")):
            address = values.get(folder)
            if is_store(address):
                values |= {folder: working_folder(address), store: address.rstrip("/")}
        return values

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

    run: RunConfig = Field(default_factory=RunConfig)  # INFINI_OUTPUT_DIR may change meanwhile.
    data: DataConfig = DataConfig()
    packing: PackingConfig = PackingConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    launch: LaunchConfig = LaunchConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    comparison: ComparisonConfig = ComparisonConfig()
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    stages: StagesConfig = StagesConfig()

    @model_validator(mode="before")
    @classmethod
    def _objectives_have_defaults_of_their_own(cls, values: Any) -> Any:
        """Those of the model: masked diffusion sees whole windows, without a memory.

        Block diffusion has nothing but the memory to see what lies before a segment, so half of the
        output is memory at first, unless the weights are those of a model without one.
        """
        if not isinstance(values, Mapping):
            return values
        sections = [values.get(name, {}) for name in ("training", "model", "packing")]
        if not all(isinstance(section, Mapping) for section in sections):
            return values
        training, model, packing = sections
        objective, is_new = training.get("objective"), model.get("initial_weights") is None
        shape: dict[str, Any] = {}
        if objective == "masked_diffusion":
            shape["memory"] = "none"
            if is_new:
                whole = packing.get("context_length", PackingConfig().context_length)
                shape["segment_length"] = whole
        if objective == "block_diffusion" and is_new and model.get("memory") in ("linear", "delta"):
            shape["read_weight_start"] = 0.0
        return {**values, "model": shape | dict(model)} if shape else values

    def conflicts(self) -> Iterator[str]:
        yield from self._conflicts_with_the_sources()
        yield from self._conflicts_with_the_weights()
        yield from self._conflicts_with_the_objective()
        yield from self._conflicts_while_training()
        if self.launch.num_nodes > 1 and self.run.name is None:
            yield "launch.num_nodes over 1 needs run.name, the same on every machine"

    def _conflicts_while_training(self) -> Iterator[str]:
        during, every = self.evaluation.during, {"logging.sample_steps": self.logging.sample_steps}
        every["evaluation.during.steps"] = during.steps if during.tasks else None
        between = self.logging.eval_steps
        for key, steps in every.items():
            if steps is not None and steps % between:
                yield f"{key}: {steps} is not a multiple of logging.eval_steps {between}"
            if steps is not None and self.launch.strategy != "ddp":
                yield f"{key}: needs launch.strategy=ddp, under which a process has all weights"

    def _conflicts_with_the_weights(self) -> Iterator[str]:
        model = self.model
        if model.initial_weights is not None:
            for name in type(model).model_fields:
                if name in model.model_fields_set - BESIDE_INITIAL_WEIGHTS:
                    yield f"model.{name}: comes from model.initial_weights; leave it out"
            cuts_windows = self.training.objective != "masked_diffusion"
            if cuts_windows and "segment_length" not in model.model_fields_set:
                yield (
                    "model.segment_length: missing; model.initial_weights does not say where its "
                    "context is to be cut"
                )
            lora = self.training.lora
            if lora and not (lora.target_modules + lora.modules_to_save) and model.memory == "none":
                yield "training.lora: target_modules=[] trains the memory alone, and there is none"
            return
        if self.data.tokenizer.spec == MODEL_SPEC:
            yield (
                "data.tokenizer.spec: model is the tokenizer of model.initial_weights, which is "
                "not set"
            )
        if self.training.lora is not None:
            yield (
                "training.lora: adapts model.initial_weights, which is not set; set it, or "
                "training.lora=null"
            )

    def _conflicts_with_the_sources(self) -> Iterator[str]:
        phases = len(self.packing.context_schedule or [0])
        for name, weights in (self.packing.weights or {}).items():
            if len(weights) not in (1, phases):
                yield (
                    f"packing.weights.{name}: has {len(weights)} weights; takes one, or one for "
                    f"each phase of packing.context_schedule ({phases})"
                )
        if self.data.folder is not None or self.data.sources is None:
            return  # The dataset, which may be the newest, has sources of its own.
        names = self.data.sources.keys()
        for setting in ("weights", "max_epochs"):
            if unknown := (getattr(self.packing, setting) or {}).keys() - names:
                yield f"packing.{setting}.{min(unknown)}: is not a source in data.sources"
        if self.packing.weights is not None and (missing := names - self.packing.weights.keys()):
            yield f"packing.weights: has no weight for {min(missing)}"

    def _conflicts_with_the_objective(self) -> Iterator[str]:
        objective, model = self.training.objective, self.model
        length, schedule = self.packing.context_length, self.packing.context_schedule
        if objective == "masked_diffusion":
            for name in ("window_segments", "window_sinks"):
                if getattr(model, name):
                    yield f"model.{name}: masked_diffusion sees whole windows; leave it out"
            if schedule is not None:
                yield "packing.context_schedule: masked_diffusion has no segments"
            if model.memory != "none":
                yield (
                    f"model.memory: {model.memory} does not combine with "
                    "training.objective=masked_diffusion; set it to none"
                )
            if "segment_length" in model.model_fields_set and model.segment_length < length:
                yield (
                    f"model.segment_length: {model.segment_length} is less than "
                    f"packing.context_length {length}; masked_diffusion sees whole windows"
                )
            return
        if length % model.segment_length:
            yield (
                f"packing.context_length {length} is not a multiple of "
                f"model.segment_length {model.segment_length}"
            )
        if schedule is not None:
            longest = [*schedule.values()][-1] * model.segment_length
            if longest != length:
                yield (
                    f"packing.context_schedule: ends with windows of {longest} tokens, not of "
                    f"packing.context_length {length}"
                )
        if objective == "causal" and model.bidirectional:
            yield (
                "model.bidirectional: needs training.objective=masked_diffusion or block_diffusion"
            )
        if objective == "block_diffusion" and not model.has_past:
            yield "model.memory: none, but block_diffusion needs it or a window of earlier segments"

    @property
    def data_to_tokenize(self) -> DataConfig:
        """The section `data`, with the tokenizer that `spec: model` stands for."""
        tokenizer = self.data.tokenizer
        if tokenizer.spec != MODEL_SPEC:
            return self.data
        return self.data.updated(tokenizer={"spec": self.model.initial_weights})

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that decide the weights, by section; commands with equal ones share a run.

        The dataset is not part of it: its own key, which depends on content only, identifies it.
        """
        return self.model_dump(mode="json", include=DECIDE_WEIGHTS)

    @property
    def tracking_uri(self) -> str:
        """MLflow tracking URI, with the default resolved."""
        chosen = self.tracking.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        return chosen or self.database("mlflow/mlflow.db")

    def database(self, name: str, driver: str = "sqlite") -> str:
        """The address of a SQLite database in the output folder, whatever that is called."""
        from sqlalchemy import URL

        return str(URL.create(driver, database=str(self.run.output_dir.resolve() / name)))
