"""What is measured of a trained run: the evaluation tasks, the settings of each, and samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from infini_model.config.locations import FilePath
from infini_model.config.section import MOST, NonEmptyList, NonNegativeInt, PositiveInt, Section

AtLeastTwo = Annotated[int, Field(ge=2, le=MOST)]
Percent = Annotated[float, Field(ge=0.0, le=100.0)]
EvaluationTaskName = Literal[
    "loss",
    "loss_by_position",
    "passkey",
    "lm_eval",
    "sample",
]


class LossByPositionConfig(Section):
    """The task loss_by_position: what the memory contributes along long documents."""

    segments: AtLeastTwo | None = None
    """Segments to score from the start of each document; shorter documents are left out. null
    (default) is the number of segments of packing.context_length."""
    max_documents: AtLeastTwo = 64
    """Documents to score: a fixed sample of those that are long enough."""


class LmEvalConfig(Section):
    """The task lm_eval: tasks of EleutherAI's lm-evaluation-harness; the names are its own."""

    tasks: list[str] = []
    """Tasks and groups of the harness to run, by name, in this order."""
    include_path: FilePath | None = None
    """Folder with YAML files of tasks of your own. It is searched first; the harness's own tasks
    are listed only for names that it does not have. Use files that you trust: a task can run
    code."""
    num_fewshot: NonNegativeInt | None = None
    """Examples in front of each question; null (default) is what the task says. A task that sets 0
    keeps it."""
    limit: PositiveInt | None = None
    """Documents of each task to score, the first ones, of RULER those of the first length; null
    scores all."""
    lengths: NonEmptyList[Annotated[int, Field(ge=1024, le=MOST)]] | None = None
    """Tokens of the texts of RULER, which makes 500 of each length with the run's tokenizer;
    BABILong takes the longest, as 4k for 4096. null (default) is 4096, and 0k."""


class PasskeyConfig(Section):
    """The task passkey: numbers, hidden in random sentences, are asked for at the end."""

    lengths: NonEmptyList[PositiveInt] = [1, 4]
    """Lengths of the sequences, in multiples of packing.context_length."""
    depths: NonEmptyList[Percent] = [5.0 * step for step in range(21)]
    """Where a needle is: percent of the filler that stands before it."""
    needles: Annotated[int, Field(ge=1, le=16)] = 1
    """Needles in a sequence, at depths that take turns. Several belong to different people, and
    each is asked for."""
    trials: PositiveInt = 10
    """Answers per length and depth."""
    digits: Annotated[int, Field(le=18, gt=0)] = 5
    """Digits of a pass key."""


class UnmaskingConfig(Section):
    """How a model of masked diffusion generates text; the names are those of LLaDA."""

    block_length: PositiveInt = 32
    """Tokens of a block: blocks are generated from left to right, the tokens within one in any
    order."""
    steps: PositiveInt | None = None
    """Passes of the model over all new tokens; null (default) is one per token. Fewer are faster
    and worse."""


class SampleConfig(Section):
    """How text is generated: the sample of the report, and `infini generate`."""

    prompt_tokens: PositiveInt = 256
    """Length of the prompt of the report's sample, in tokens."""
    max_new_tokens: PositiveInt = 200
    """Maximum number of tokens to generate."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: PositiveInt | None = 50
    """Sample from the k most likely tokens only; null samples from all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample from the smallest set of most likely tokens with at least this total probability; null
    (default) is off."""
    unmasking: UnmaskingConfig = UnmaskingConfig()


class DuringConfig(Section):
    """Measurements while the model trains, by the first process."""

    tasks: list[Literal["loss_by_position", "passkey", "lm_eval"]] = []
    """Tasks whose metrics are recorded at these steps, with the settings below."""
    steps: PositiveInt = 500
    """Steps between them, a multiple of logging.eval_steps."""


class EvaluationConfig(Section):
    """What is scored, and what the report contains."""

    max_windows: PositiveInt | None = None
    """Windows of the validation and of the test split to score: a fixed sample over the whole
    split, as many of each named source, the same during training and in the report. null (default)
    scores all."""
    batch_size: PositiveInt = 8
    """Windows, or requests of lm_eval, per batch in the evaluate stage."""
    tasks: NonEmptyList[EvaluationTaskName] = ["loss", "loss_by_position", "sample"]
    """What the evaluate stage measures, in the order of the report."""
    during: DuringConfig = DuringConfig()
    loss_by_position: LossByPositionConfig = LossByPositionConfig()
    lm_eval: LmEvalConfig = LmEvalConfig()
    passkey: PasskeyConfig = PasskeyConfig()
    sample: SampleConfig = SampleConfig()
