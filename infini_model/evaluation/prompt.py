"""Text from a model, streamed as it is generated: a prompt continued, and a conversation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from infini_model.config import Config, SampleConfig
from infini_model.data.sources.chat import ASSISTANT, USER, ChatTemplate
from infini_model.data.tokenizers.load import load_dataset_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer, last_ids, prompt_ids
from infini_model.model.generate import draw, read_prompts, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.runs import (
    CHECKPOINTS,
    MODEL,
    is_started,
    newest_checkpoint,
    read_run,
    read_run_config,
)
from infini_model.training.export import load_model

log = logging.getLogger(__name__)

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
    """Yield the text of `new`, which follows `before`, as soon as its characters are complete.

    A token is decoded together with the few before it, since spaces may depend on them, so its cost
    does not grow with the text. An incomplete UTF-8 sequence at the end is dropped. A run of byte
    tokens of which not all are UTF-8 is replaced from where it was shown to, not as a whole.
    """
    last, waiting = last_ids(tokenizer, before, CONTEXT), list[int]()
    context, text = last, ""
    known = tokenizer.decode(context)
    for token in new:
        waiting.append(token)
        text = tokenizer.decode(context + waiting)
        if not text.startswith(known):  # a byte that is not UTF-8 has spoilt what was shown
            text = known + tokenizer.decode(waiting)
        text = text[len(known) :]
        if text and not text.endswith(REPLACEMENT):
            yield text
            # Two pieces, since a token that begins a document is no text where it comes first.
            context, last, waiting, text = last + waiting, waiting, [], ""
            known = tokenizer.decode(context)
    yield text.rstrip(REPLACEMENT)


class Conversation:
    """Turns of a user and a model, in the form that conversations had in its training.

    The state is that of all turns so far, exact in the window and compressed before it; a model
    without a memory knows its window alone.
    """

    def __init__(
        self,
        model: InfiniLlama,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        sampling: SampleConfig,
        seed: int = 0,
    ) -> None:
        """Begin without a message; equal seeds and turns give equal answers.

        Raises `UserError` if the model is not causal, or `template` does not render a conversation.
        """
        if model.config.bidirectional:
            raise UserError("chat needs a causal model; this one generates by diffusion")
        # What closes an answer ends it, if it is one token, as `<|eot_id|>` is.
        closing = tokenizer.encode_batch([template.closing]).ids.tolist()
        self._ends = tokenizer.end_token_ids + (tuple(closing) if len(closing) == 1 else ())
        self._sampling = sampling
        self._model, self._tokenizer = model, tokenizer
        self._template = template
        self._rng = np.random.default_rng(seed)
        self._state = model.empty_state(1)
        self._messages: list[dict[str, str]] = []

    def reply(self, text: str) -> Iterator[str]:
        """Stream the model's answer to `text`, up to what closes it.

        Raises `DataError` in one line if the template refuses the conversation.
        """
        asked = [*self._messages, {"role": USER, "content": text}]
        if not self._messages:
            ids = prompt_ids(self._tokenizer, self._template.render(asked))
        else:
            turn = self._template.next_turn(asked)
            ids = self._tokenizer.encode_batch([turn]).ids.tolist()
        answer = ""
        for piece in decode_pieces(self._tokenizer, ids, self._answer(ids)):
            answer += piece
            yield piece
        self._messages = [*asked, {"role": ASSISTANT, "content": answer}]

    def _answer(self, ids: list[int]) -> Iterator[int]:
        sampling, logits = self._sampling, self._read(ids)
        for _ in range(sampling.max_new_tokens):
            drawn = torch.tensor([self._rng.random()], dtype=torch.float64)
            token = int(draw(sampling, logits, drawn))
            if token in self._ends:
                return
            yield token
            logits = self._read([token])

    def _read(self, ids: list[int]) -> torch.Tensor:
        """Add tokens to the state; returns the logits after the last one, [1, vocab_size]."""
        read, length = torch.tensor([ids]), torch.tensor([len(ids)])
        logits, self._state = read_prompts(self._model, read, length, self._state)
        return logits


def begin_conversation(config: Config, checkpoint: Path) -> Conversation:
    """A conversation with a model: a run folder, a checkpoint or a Hugging Face folder.

    Its form is `data.source.template`, that of its run where it is part of one, or else that of its
    tokenizer. Warns if nothing says that the model has seen conversations. Errors are those of
    `Conversation` and `load_checkpoint`.
    """
    model_dir, model, tokenizer = load_checkpoint(config, checkpoint)
    run_dir = run_of(model_dir)
    asked = config if run_dir is None else read_run_config(run_dir)
    is_new = run_dir is not None and asked.model.initial_weights is None
    chats = [source for source in asked.data.named_sources.values() if source.pairs]
    if not chats and (is_new or tokenizer.chat_template is None):
        log.warning(
            "%s: was not trained on conversations, as far as its files say; "
            "infini generate continues a text",
            model_dir,
        )
    sources = chats or asked.data.named_sources.values()
    template = tokenizer.chat(next(iter(sources)).template)
    return Conversation(model, tokenizer, template, config.evaluation.sample, config.run.seed)
