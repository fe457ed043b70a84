"""The settings of what is scored, during training and after it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from infini_model.config.section import Section

EvaluationTaskName = Literal["loss", "loss_by_segment", "sample"]


class SampleConfig(Section):
    """How text is generated: the sample of the report, and `infini generate`."""

    prompt_tokens: PositiveInt = Field(
        256, description="Length of the prompt of the report's sample, in tokens."
    )
    max_new_tokens: PositiveInt = Field(200, description="Maximum number of tokens to generate.")
    temperature: NonNegativeFloat = Field(
        0.8, description="Sampling temperature; 0 always takes the most likely token."
    )
    top_k: PositiveInt | None = Field(
        50, description="Sample from the k most likely tokens only; null samples from all."
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="Sample from the smallest set of most likely tokens with at least this total "
        "probability; null (default) is off.",
    )


class EvaluationConfig(Section):
    """What is scored, and what the report contains."""

    decides_weights = False

    max_windows: PositiveInt | None = Field(
        None,
        description="Windows of the validation and of the test split to score: a fixed sample over "
        "the whole split, the same during training and in the report. null (default) scores all.",
    )
    batch_size: PositiveInt = Field(8, description="Windows per batch in the evaluate stage.")
    tasks: list[EvaluationTaskName] = Field(
        default=["loss", "loss_by_segment", "sample"],
        min_length=1,
        description="What the evaluate stage measures, in the order of the report.",
    )
    sample: SampleConfig = SampleConfig()
