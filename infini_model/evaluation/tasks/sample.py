"""A continuation of a held-out document."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from infini_model.data.loading.stream import TokenStream, open_split
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.context import HELD_OUT, EvalContext
from infini_model.evaluation.pages import fenced
from infini_model.evaluation.prompt import new_tokens
from infini_model.evaluation.task import EvaluationTask, TaskResult


class Sample(EvaluationTask):
    """Continues a document of the test split, or of validation if test is empty."""

    title = "A sample"

    def run(self, context: EvalContext) -> TaskResult:
        """Generate with the settings in `evaluation.sample` and the run's seed.

        The document is the first one longer than the prompt length, or the longest one. Of
        conversations it is the first whose beginning, up to what is learned, fits the context.
        """
        nothing = TaskResult(section="There is no held-out document to continue.")
        splits = context.manifest.splits
        split = next((each for each in reversed(HELD_OUT) if splits[each].tokens > 1), None)
        if split is None:
            return nothing
        settings = context.config.evaluation.sample
        stream = open_split(context.dataset_dir, split)
        longest, most = _lengths(context)
        if stream.conversations:
            # A causal model reads prompts of any length.
            limit = longest if context.model.config.bidirectional else math.inf
            found = _first(_prompts(stream), lambda tokens: (tokens > 0) & (tokens <= limit))
            number, longest = found or (0, 0)
        elif found := _first(stream.lengths(), lambda tokens: tokens > settings.prompt_tokens + 1):
            number, _ = found
        else:
            number = _longest(stream.lengths())
        document = stream.document(number)[:-1]  # without its end-of-text token
        prompt, rest = document[:longest], document[longest:]
        if len(prompt) == 0:
            return nothing
        tokenizer = load_dataset_tokenizer(context.dataset_dir)
        new = new_tokens(
            context.model,
            prompt.tolist(),
            settings.updated(max_new_tokens=most),
            context.config.run.seed,
            tokenizer.end_token_ids,
        )
        texts = {
            "prompt": tokenizer.decode(prompt),
            "continuation": tokenizer.decode(list(new)),
            "original": tokenizer.decode(rest[:most]),
        }
        parts = [
            f"Prompt: the first {len(prompt):,} tokens of document {number} of the {split} split.",
            fenced(texts["prompt"]),
            "Model's continuation:",
            fenced(texts["continuation"]) if texts["continuation"] else "(end of text)",
            "Original continuation:",
            fenced(texts["original"]) if texts["original"] else "(end of document)",
        ]
        where = {"split": split, "document": number, "prompt_tokens": len(prompt)}
        return TaskResult(section="\n\n".join(parts), details=where | texts)


def _lengths(context: EvalContext) -> tuple[int, int]:
    """The tokens of the prompt and the new ones: both fit the context of masked diffusion."""
    model, settings = context.model.config, context.config.evaluation.sample
    if not model.bidirectional or model.has_past:
        return settings.prompt_tokens, settings.max_new_tokens
    most = min(settings.max_new_tokens, model.segment_length // 2)
    return min(settings.prompt_tokens, model.segment_length - most), most


def _prompts(stream: TokenStream) -> Iterator[np.ndarray]:
    """The number of tokens of each conversation before those that are learned: int64 [1] each."""
    for number in range(stream.documents):
        yield np.array([stream.learnt_of(number).argmax()])


def _first(
    chunks: Iterable[np.ndarray], fits: Callable[[np.ndarray], np.ndarray]
) -> tuple[int, int] | None:
    """The number and the length of the first document whose length fits, if there is one."""
    first = 0
    for lengths in chunks:
        if (found := fits(lengths)).any():
            here = int(found.argmax())
            return first + here, int(lengths[here])
        first += len(lengths)
    return None


def _longest(chunks: Iterable[np.ndarray]) -> int:
    """The number of the first of the longest documents."""
    first = longest = most = 0
    for lengths in chunks:
        here = int(lengths.argmax())
        if lengths[here] > most:
            longest, most = first + here, int(lengths[here])
        first += len(lengths)
    return longest
