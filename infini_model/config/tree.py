"""One tree of settings: the YAML presets, the Prefect form and the command-line overrides.

Unknown keys are refused, and every value is checked before any work starts. Nothing here imports
torch, so that a worker or the UI loads the tree in a blink.
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
