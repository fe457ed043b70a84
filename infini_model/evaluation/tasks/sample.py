"""A continuation of a held-out document."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from infini_model.data.loading.stream import open_split
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.context import HELD_OUT, EvalContext
from infini_model.evaluation.pages import fenced
from infini_model.evaluation.task import EvaluationTask, TaskResult
from infini_model.model import generate
from infini_model.model.unmask import unmask


class Sample(EvaluationTask):
    """Continues a document of the test split, or of validation if test is empty."""

    title = "A sample"

    def run(self, context: EvalContext) -> TaskResult:
        """Generate with the settings in `evaluation.sample` and the run's seed."""
        if not (found := continue_document(context)):
            return TaskResult(section="There is no held-out document to continue.")
        place, prompt, continuation, original = found
        parts = [
            f"Prompt: {place}.",
            fenced(prompt),
            "Model's continuation:",
            fenced(continuation) if continuation else "(end of text)",
            "Original continuation:",
            fenced(original) if original else "(end of document)",
        ]
        return TaskResult(section="\n\n".join(parts))


def continue_document(context: EvalContext) -> tuple[str, str, str, str] | None:
    """Generate with the settings in `evaluation.sample` and the run's seed; None without a text.

    Returns where the prompt is from, the prompt, its continuation, and the original one.

    The document is the first one longer than the prompt length, or the longest one. Of
    conversations it is the first whose beginning, up to what is learned, fits the context.
    """
    splits = context.manifest.splits
    split = next((each for each in reversed(HELD_OUT) if splits[each].tokens > 1), None)
    if split is None:
        return None
    settings = context.config.evaluation.sample
    stream = open_split(context.dataset_dir, split)
    longest, most = _lengths(context)
    if stream.conversations:
        # A causal model reads prompts of any length.
        limit = longest if context.model.config.bidirectional else math.inf
        asked = (int(stream.learnt_of(n).argmax()) for n in range(stream.documents))
        fitting = ((n, tokens) for n, tokens in enumerate(asked) if 0 < tokens <= limit)
        number, longest = next(fitting, (0, 0))
    else:
        lengths = np.concatenate([*stream.lengths()])
        number = int(np.minimum(lengths, settings.prompt_tokens + 2).argmax())
    document = stream.document(number)[:-1]  # without its end-of-text token
    prompt, rest = document[:longest], document[longest:]
    if len(prompt) == 0:
        return None
    tokenizer = load_dataset_tokenizer(context.dataset_dir)
    new = _new_tokens(context, prompt.tolist(), most, tokenizer.end_token_ids)
    return (
        f"the first {len(prompt):,} tokens of document {number} of the {split} split",
        tokenizer.decode(prompt),
        tokenizer.decode(new),
        tokenizer.decode(rest[:most]),
    )


def _new_tokens(
    context: EvalContext, prompt: list[int], most: int, ends: tuple[int, ...]
) -> list[int]:
    """Generate at most `most` tokens that follow `prompt`, without one that ends the text."""
    settings = context.config.evaluation.sample.updated(max_new_tokens=most)
    model, seed = context.model, context.config.run.seed
    blocks: Iterator[Sequence[int | None]]
    if model.config.bidirectional:
        blocks = unmask(model, prompt, settings, seed, ends)
    else:
        blocks = generate.stream(model, [prompt], settings, seed, ends)
    tokens = (token for block in blocks for token in block if token is not None)
    return [token for token in tokens if token not in ends]


def _lengths(context: EvalContext) -> tuple[int, int]:
    """The tokens of the prompt and the new ones: both fit the context of masked diffusion."""
    model, settings = context.model.config, context.config.evaluation.sample
    if not model.bidirectional or model.has_past:
        return settings.prompt_tokens, settings.max_new_tokens
    most = min(settings.max_new_tokens, model.segment_length // 2)
    return min(settings.prompt_tokens, model.segment_length - most), most
