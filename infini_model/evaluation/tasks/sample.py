"""A continuation of a held-out document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from infini_model.config import SampleConfig
from infini_model.data.manifest import Manifest
from infini_model.data.shards.stream import open_split
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.markdown import fenced
from infini_model.evaluation.subject import Pass, Subject
from infini_model.evaluation.tasks.task import TaskResult
from infini_model.model.generation import generate
from infini_model.model.llama import InfiniLlama


class Task:
    """Continues a document of the test split."""

    title = "A sample"

    def scores(self, subject: Subject) -> set[Pass]:  # noqa: ARG002 - it scores none
        """None."""
        return set()

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

    The document is the first one longer than the prompt length, or the longest one.
    """
    held_out = [split for split in ("test", "validation") if _tokens(manifest, split) > 1]
    if not held_out:
        return None
    stream = open_split(dataset_dir, held_out[0])
    lengths = np.diff(stream.document_offsets)
    long_enough = np.flatnonzero(lengths > config.prompt_tokens + 1)
    number = int(long_enough[0] if len(long_enough) else lengths.argmax())
    document = stream.document(number)[:-1]  # without its end-of-text token
    if len(document) == 0:
        return None
    prompt = document[: config.prompt_tokens]
    original = document[len(prompt) : len(prompt) + config.max_new_tokens]
    (new,) = generate(
        model,
        [prompt.tolist()],
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=seed,
        eos_token_id=manifest.tokenizer.eos_token_id,
    )
    tokenizer = load_dataset_tokenizer(dataset_dir)
    return Sample(
        split=held_out[0],
        document=number,
        prompt_tokens=len(prompt),
        prompt=tokenizer.decode(prompt),
        continuation=tokenizer.decode(new),
        original=tokenizer.decode(original),
    )


def _tokens(manifest: Manifest, split: str) -> int:
    return sum(record.tokens for name, record in manifest.splits.items() if name == split)
