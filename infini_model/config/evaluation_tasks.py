"""The evaluation tasks and the settings of each; those of generation are in `evaluation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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
