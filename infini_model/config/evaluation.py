"""The settings of what is scored, during training and after it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from infini_model.config.evaluation_tasks import (
    EvaluationTaskName,
    HeadsConfig,
    LikelihoodBoundConfig,
    LmEvalConfig,
    LossByPositionConfig,
    NeedlesConfig,
    PasskeyConfig,
    RecallConfig,
    ThroughputConfig,
)
from infini_model.config.section import Section


class UnmaskingConfig(Section):
    """How a model of masked diffusion generates text; the names are those of LLaDA."""

    block_length: PositiveInt = Field(
        32,
        description="Tokens of a block: blocks are generated from left to right, the tokens within "
        "one in any order.",
    )
    steps: PositiveInt | None = Field(
        None,
        description="Passes of the model over all new tokens; null (default) is one per token. "
        "Fewer are faster and worse.",
    )
    remasking: Literal["low_confidence", "random"] = Field(
        "low_confidence",
        description="Which of the predicted tokens stay masked for a later step: those of lowest "
        "probability, or random ones.",
    )
    confidence_threshold: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="Probability from which on a predicted token is always kept, which saves "
        "steps; null (default) is off.",
    )
    cfg_scale: NonNegativeFloat = Field(
        0.0,
        description="Scale of classifier-free guidance by the prompt; 0 (default) is off. Doubles "
        "the work.",
    )


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
    unmasking: UnmaskingConfig = UnmaskingConfig()


class EvaluationConfig(Section):
    """What is scored, and what the report contains."""

    decides_weights = False

    max_windows: PositiveInt | None = Field(
        None,
        description="Windows of the validation and of the test split to score: a fixed sample over "
        "the whole split, the same during training and in the report. null (default) scores all.",
    )
    batch_size: PositiveInt = Field(
        8, description="Windows, or requests of lm_eval, per batch in the evaluate stage."
    )
    tasks: list[EvaluationTaskName] = Field(
        default=["loss", "loss_by_position", "heads", "sample"],
        min_length=1,
        description="What the evaluate stage measures, in the order of the report.",
    )
    loss_by_position: LossByPositionConfig = LossByPositionConfig()
    likelihood_bound: LikelihoodBoundConfig = LikelihoodBoundConfig()
    lm_eval: LmEvalConfig = LmEvalConfig()
    needles: NeedlesConfig = NeedlesConfig()
    passkey: PasskeyConfig = PasskeyConfig()
    recall: RecallConfig = RecallConfig()
    sample: SampleConfig = SampleConfig()
    heads: HeadsConfig = HeadsConfig()
    throughput: ThroughputConfig = ThroughputConfig()
