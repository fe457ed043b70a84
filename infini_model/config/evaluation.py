"""What is measured of a trained run: the evaluation tasks, the settings of each, and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from infini_model.config.section import Section

EvaluationTaskName = Literal[
    "loss",
    "loss_by_position",
    "likelihood_bound",
    "heads",
    "passkey",
    "needles",
    "recall",
    "throughput",
    "lm_eval",
    "sample",
]


class LossByPositionConfig(Section):
    """The task loss_by_position: what the memory contributes along long documents."""

    segments: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Segments to score from the start of each document; shorter documents are left "
        "out. null (default) is the number of segments of packing.context_length.",
    )
    max_documents: Annotated[int, Field(ge=2)] = Field(
        64, description="Documents to score: a fixed sample of those that are long enough."
    )


class LikelihoodBoundConfig(Section):
    """The task likelihood_bound: what masked diffusion bounds, estimated by Monte Carlo."""

    max_windows: PositiveInt = Field(16, description="Windows of the split to score.")
    draws: Annotated[int, Field(ge=2)] = Field(
        128, description="Draws of the noise per window, spread evenly over the numbers of masks."
    )


class HeadsConfig(Section):
    """The task heads: what the memory of each layer and head contributes."""

    max_windows: PositiveInt = Field(
        16,
        description="Windows to score, once for each memory that is knocked out; at most "
        "evaluation.max_windows.",
    )
    max_heads: NonNegativeInt | None = Field(
        16,
        description="Heads whose memory is knocked out one by one: those with the largest share of "
        "memory in their output. Layers are all knocked out. null does it for every head.",
    )


class ThroughputConfig(Section):
    """The task throughput: speed and peak memory by length, one sequence at a time."""

    lengths: list[PositiveInt] = Field(
        default=[1, 2, 8, 32],
        min_length=1,
        description="Lengths of the prompt, as multiples of packing.context_length.",
    )
    new_tokens: Annotated[int, Field(ge=2)] = Field(
        32, description="Tokens to generate after each prompt."
    )
    max_seconds: PositiveFloat = Field(
        3.0,
        description="Time for a length, besides a first trial that does not count. A length that "
        "would take longer for a single trial is left out.",
    )


class LmEvalConfig(Section):
    """The task lm_eval: tasks of EleutherAI's lm-evaluation-harness; the names are its own."""

    tasks: list[str] = Field(
        default=[], description="Tasks and groups of the harness to run, by name, in this order."
    )
    include_path: Path | None = Field(
        None,
        description="Folder with YAML files of tasks of your own. It is searched first; the "
        "harness's own tasks are listed only for names that it does not have. Use files that you "
        "trust: a task can run code.",
    )
    num_fewshot: NonNegativeInt | None = Field(
        None,
        description="Examples in front of each question; null (default) is what the task says. A "
        "task that sets 0 keeps it.",
    )
    limit: PositiveInt | None = Field(
        None, description="Documents of each task to score, the first ones; null scores all."
    )


class PasskeyConfig(Section):
    """The task passkey: a number, hidden in filler, is asked for at the end."""

    lengths: list[PositiveInt] = Field(
        default=[1, 4],
        min_length=1,
        description="Lengths of the sequences, in multiples of packing.context_length.",
    )
    depths: list[Annotated[float, Field(ge=0.0, le=100.0)]] = Field(
        default=[5.0 * step for step in range(21)],
        min_length=1,
        description="Where the needle is: percent of the filler that stands before it.",
    )
    trials: PositiveInt = Field(10, description="Answers per length and depth.")
    digits: Annotated[int, Field(le=18, gt=0)] = Field(5, description="Digits of a pass key.")
    filler: Literal["repeated", "random", "documents"] = Field(
        "random",
        description="What the needle is hidden in: the same five sentences over and over, random "
        "sentences, or documents of the dataset's test split.",
    )


class NeedlesConfig(PasskeyConfig):
    """The task needles: several numbers in the same filler, each asked for."""

    needles: Annotated[int, Field(ge=2, le=16)] = Field(
        4, description="Needles in a sequence, at different depths."
    )

    @model_validator(mode="after")
    def _depths_differ(self) -> Self:
        if self.needles > len(set(self.depths)):
            raise ValueError(
                f"{self.needles} needles in a sequence need as many depths, got "
                f"{len(set(self.depths))}"
            )
        return self


class RecallConfig(Section):
    """The task recall: keys with values are written among fillers, and asked for at the end."""

    lengths: list[Annotated[int, Field(ge=2)]] = Field(
        default=[2, 8, 32],
        min_length=1,
        description="Lengths of the sequences, in segments; the last one holds the questions.",
    )
    pairs: Annotated[int, Field(ge=1, le=32)] = Field(
        8, description="Pairs of key and value in a sequence."
    )
    sequences: PositiveInt = Field(32, description="Sequences per length.")


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
