"""The configuration tree behind the YAML presets, the Prefect form and command-line overrides.

Unknown keys are rejected, and every value is checked before any work starts. Nothing here imports
torch, so that a worker or the UI loads the tree quickly.
"""

from __future__ import annotations

import os
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
from infini_model.config.model import ModelConfig
from infini_model.config.section import DECIDES_WEIGHTS, Section
from infini_model.config.training import (
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    TrainingConfig,
)


class TrackingConfig(Section):
    """Experiment tracking: MLflow and TensorBoard."""

    decides_weights = False

    mlflow: bool = Field(True, description="Whether to record runs in MLflow.")
    tracking_uri: str | None = Field(
        None,
        description="MLflow tracking URI; null (default) is a SQLite file in run.output_dir.",
    )
    experiment_name: str = Field("infini-llama", description="MLflow experiment to record runs in.")
    log_model: bool = Field(
        True,
        description="Whether to log the final model to MLflow, so that it can be loaded from "
        "there; stores a copy of the weights, four bytes per parameter.",
    )
    registered_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None,
        description="Name to register the logged model under in MLflow; the alias best points to "
        "the version with the lowest validation loss. null (default) does not register it.",
    )
    tensorboard: bool = Field(True, description="Whether to write TensorBoard files.")

    @model_validator(mode="after")
    def _registered_model_is_logged(self) -> Self:
        if self.registered_model is not None and not (self.mlflow and self.log_model):
            raise ValueError("registered_model needs mlflow and log_model")
        return self


class StageConfig(Section):
    """Retries and timeout of a Prefect task."""

    retries: NonNegativeInt = Field(2, description="Retries after a failure.")
    retry_delay_seconds: NonNegativeFloat = Field(
        2.0,
        description="Seconds before the first retry; doubled for each further one, with jitter.",
    )
    timeout_seconds: PositiveFloat | None = Field(
        None,
        description="Seconds after which the stage and all its processes are killed; null "
        "(default) is no limit.",
    )


class StagesConfig(Section):
    """Retries and timeouts of the four stages of the pipeline."""

    decides_weights = False

    download: StageConfig = StageConfig(retries=4)
    shard: StageConfig = StageConfig()
    train: StageConfig = StageConfig()
    evaluate: StageConfig = StageConfig()


class RunConfig(Section):
    """Name, folders, seed and log level of a run."""

    decides_weights = False

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = Field(
        None,
        description="Name of the run folder in runs/; null (default) resumes an interrupted run of "
        "the same settings or numbers a new one after the preset.",
    )
    preset: str | None = Field(None, description="Preset the settings are based on.")
    output_dir: Path = Field(
        default_factory=lambda: Path(os.environ.get("INFINI_OUTPUT_DIR", "outputs")),
        description="Folder for datasets/, runs/ and the tracking records; the default is outputs, "
        "or the environment variable INFINI_OUTPUT_DIR.",
    )
    data_dir: Path | None = Field(
        None, description="Folder for datasets; null (default) is datasets/ in output_dir."
    )
    seed: Annotated[NonNegativeInt, DECIDES_WEIGHTS] = Field(
        0,
        description="Seed of the initial weights, the window order, what an objective draws, and "
        "samples.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity of messages to print."
    )

    @property
    def datasets_dir(self) -> Path:
        """Folder that contains the dataset folders."""
        return self.data_dir or self.output_dir / "datasets"

    @property
    def runs_dir(self) -> Path:
        """Folder that contains the run folders."""
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
            raise ValueError("launch.num_nodes over 1 needs run.name, the same on every machine")
        return self

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
