"""The continuation of a prompt by a model, streamed as it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from infini_model.config import Config, SampleConfig
from infini_model.data.tokenizers.load import load_dataset_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer, last_ids, prompt_ids
from infini_model.model.generate import stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import (
    CHECKPOINTS,
    MODEL,
    is_started,
    newest_checkpoint,
    read_run,
)
from infini_model.training.export import load_model

# Tokens of the prompt that are decoded in front of new ones, since spaces may depend on them.
CONTEXT = 8


def run_of(model_dir: Path) -> Path | None:
    """The folder of the run that a model folder is part of."""
    return next(filter(is_started, model_dir.resolve().parents), None)


def load_checkpoint(config: Config, checkpoint: Path) -> tuple[Path, InfiniLlama, Tokenizer]:
    """The model folder, the model and the tokenizer of a run, a checkpoint or a model folder.

    Raises `CheckpointError` if there is no model or no tokenizer, `DeviceError` as `load_model`.
    """
    model_dir = checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint
    if (checkpoint / CHECKPOINTS).is_dir():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise CheckpointError(
                f"{checkpoint / CHECKPOINTS}: no checkpoint found; "
                "infini runs lists the runs, --checkpoint names one"
            )
        model_dir = newest / MODEL
    tokenizer = tokenizer_of(model_dir, str(model_dir))
    if tokenizer is None:
        run_dir = run_of(model_dir)
        if run_dir is None:
            raise CheckpointError(f"{model_dir}: has no tokenizer.json and is not part of a run")
        tokenizer = load_dataset_tokenizer(read_run(run_dir).dataset)
    return model_dir, load_model(model_dir, config), tokenizer


def continue_prompt(
    model: InfiniLlama, tokenizer: Tokenizer, prompt: str, settings: SampleConfig, seed: int
) -> Iterator[str]:
    """Stream the model's continuation of `prompt`, up to a token that ends a text.

    Errors are those of `new_tokens`, such as for an empty prompt without a beginning-of-text token.
    """
    ids = prompt_ids(tokenizer, prompt)
    new = new_tokens(model, ids, settings, seed, tokenizer.end_token_ids)
    return decode_pieces(tokenizer, ids, new)


def new_tokens(
    model: InfiniLlama,
    ids: list[int],
    settings: SampleConfig,
    seed: int,
    end_token_ids: tuple[int, ...],
) -> Iterator[int]:
    """Stream at most `settings.max_new_tokens` tokens that follow `ids`, without those that end it.

    One by one from a causal model, block by block from one of diffusion. Errors are those of
    `infini_model.model.generate.generate` and `infini_model.model.unmask.unmask`.
    """
    blocks: Iterable[Sequence[int | None]]
    if model.config.bidirectional:
        blocks = unmask(model, ids, settings, seed, end_token_ids)
    else:
        blocks = stream(model, [ids], settings, seed, end_token_ids)
    tokens = (token for block in blocks for token in block if token is not None)
    return (token for token in tokens if token not in end_token_ids)


def decode_pieces(tokenizer: Tokenizer, before: list[int], new: Iterable[int]) -> Iterator[str]:
    """Yield the text of `new`, which follows `before`, as `PieceDecoder` decodes it."""
    decoder = PieceDecoder(tokenizer, before)
    for token in new:
        if piece := decoder.add(token):
            yield piece
    yield decoder.rest()


class PieceDecoder:
    """The text of tokens that come one by one, as soon as its characters are complete.

    A token is decoded together with the few before it, since spaces may depend on them, so its cost
    does not grow with the text. A run of byte tokens of which not all are UTF-8 is replaced from
    where it was shown to, not as a whole.
    """

    def __init__(self, tokenizer: Tokenizer, before: list[int]) -> None:
        """Begin after the tokens `before`."""
        self._tokenizer = tokenizer
        self._last, self._waiting = last_ids(tokenizer, before, CONTEXT), list[int]()
        self._context, self._text = self._last, ""
        self._known = tokenizer.decode(self._context)

    def add(self, token: int) -> str:
        """Return the characters that the token completes, perhaps none."""
        self._waiting.append(token)
        text = self._tokenizer.decode(self._context + self._waiting)
        if not text.startswith(self._known):  # a byte that is not UTF-8 has spoilt what was shown
            text = self._known + self._tokenizer.decode(self._waiting)
        self._text = text[len(self._known) :]
        if not self._text or self._text.endswith(REPLACEMENT):
            return ""
        # Two pieces, since a token that begins a document is no text where it comes first.
        self._context, self._last = self._last + self._waiting, self._waiting
        self._known = self._tokenizer.decode(self._context)
        self._waiting, complete, self._text = [], self._text, ""
        return complete

    def rest(self) -> str:
        """Return what is left at the end, without an incomplete UTF-8 sequence."""
        return self._text.rstrip(REPLACEMENT)
