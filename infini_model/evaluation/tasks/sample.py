"""A continuation of a held-out document."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infini_model.config import SampleConfig
from infini_model.data.loading.stream import TokenStream, open_split
from infini_model.data.manifest import Manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.prompt import new_tokens
from infini_model.evaluation.reporting.markdown import fenced
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, TaskResult
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import check_guidance


class Task(EvaluationTask):
    """Continues a document of the test split."""

    title = "A sample"

    def check(self, subject: Subject) -> None:
        """Refuse guidance that does not fit the model."""
        if subject.model.config.bidirectional:
            check_guidance(subject.model.config, subject.config.evaluation.sample.unmasking)

    def run(self, subject: Subject) -> TaskResult:
        """Generate with the settings in `evaluation.sample` and the run's seed."""
        config = subject.config
        sample = draw_sample(
            subject.model,
            subject.dataset_dir,
            subject.manifest,
            config.evaluation.sample,
            config.run.seed,
        )
        if sample is None:
            return TaskResult(section="There is no held-out document to continue.")
        return TaskResult(section=_section(sample), details=sample.model_dump())


def _section(sample: Sample) -> str:
    """Prompt, continuation and original."""
    parts = [
        f"Prompt: the first {sample.prompt_tokens:,} tokens of document {sample.document} of the "
        f"{sample.split} split.",
        fenced(sample.prompt),
        "Model's continuation:",
        fenced(sample.continuation) if sample.continuation else "(end of text)",
        "Original continuation:",
        fenced(sample.original) if sample.original else "(end of document)",
    ]
    return "\n\n".join(parts)


class Sample(BaseModel):
    """A prompt from a document, the model's continuation and the original one.

    Attributes:
        split: Split of the document.
        document: Its number in the split.
        prompt_tokens: Number of tokens in the prompt.
        prompt: The prompt as text.
        continuation: The model's text.
        original: The document's text after the prompt, at most `max_new_tokens` tokens.
    """

    model_config = ConfigDict(frozen=True)

    split: str
    document: int
    prompt_tokens: int
    prompt: str
    continuation: str
    original: str


def draw_sample(
    model: InfiniLlama, dataset_dir: Path, manifest: Manifest, config: SampleConfig, seed: int
) -> Sample | None:
    """Continue a document of the test split, or of validation if test is empty, else None.

    The document is the first one longer than the prompt length, or the longest one. Where documents
    are prompts and answers, it is the first prompt that fits the context.
    """
    held_out = [split for split in ("test", "validation") if _tokens(manifest, split) > 1]
    if not held_out:
        return None
    stream = open_split(dataset_dir, held_out[0])
    longest, most = _lengths(model, config)
    if stream.pairs:
        number, longest = _first_prompt(stream, longest if model.config.bidirectional else None)
    else:
        number = _first_longer(stream, config.prompt_tokens + 1)
    document = stream.document(number)[:-1]  # without its end-of-text token
    prompt = document[:longest]
    if len(prompt) == 0:
        return None
    original = document[len(prompt) : len(prompt) + most]
    new = new_tokens(
        model,
        prompt.tolist(),
        max_new_tokens=most,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=seed,
        eos_token_id=manifest.tokenizer.eos_token_id,
        unmasking=config.unmasking,
    )
    tokenizer = load_dataset_tokenizer(dataset_dir)
    return Sample(
        split=held_out[0],
        document=number,
        prompt_tokens=len(prompt),
        prompt=tokenizer.decode(prompt),
        continuation=tokenizer.decode(list(new)),
        original=tokenizer.decode(original),
    )


def _lengths(model: InfiniLlama, config: SampleConfig) -> tuple[int, int]:
    """The tokens of the prompt and the new ones: both fit the context of masked diffusion."""
    if not model.config.bidirectional or model.config.memory != "none":
        return config.prompt_tokens, config.max_new_tokens
    context = model.config.segment_length
    most = min(config.max_new_tokens, context // 2)
    return min(config.prompt_tokens, context - most), most


def _first_longer(stream: TokenStream, tokens: int) -> int:
    """The first document of more than `tokens` tokens, or the longest one."""
    first = longest = most = 0
    for lengths in stream.lengths():
        here = int(lengths.argmax())
        if lengths[here] > most:
            longest, most = first + here, int(lengths[here])
        if most > tokens:
            return first + int((lengths > tokens).argmax())
        first += len(lengths)
    return longest


def _first_prompt(stream: TokenStream, longest: int | None) -> tuple[int, int]:
    """The first document with a prompt of at most `longest` tokens, and how many it has.

    None has any number. If there is no such document, the first with no tokens.
    """
    first = 0
    for lengths in stream.prompts():
        fits = (lengths > 0) & (lengths <= (longest or lengths))
        if fits.any():
            here = int(fits.argmax())
            return first + here, int(lengths[here])
        first += len(lengths)
    return 0, 0


def _tokens(manifest: Manifest, split: str) -> int:
    return sum(record.tokens for name, record in manifest.splits.items() if name == split)
