"""A model that is ready to answer, and conversations with it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infini_model.config import Config, SampleConfig
from infini_model.data.sources.chat import USER, ChatTemplate, Messages
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.evaluation.prompt import load_checkpoint, run_of
from infini_model.runtime.runs import read_run_config
from infini_model.serving.engine import Engine
from infini_model.serving.known_texts import KnownTexts
from infini_model.serving.requests import Event, Piece, Request

log = logging.getLogger(__name__)

GIGABYTE = 10**9


@dataclass(frozen=True)
class Served:
    """A model under its name, and what requests to it need.

    Attributes:
        sampling: How tokens are drawn, unless a request says otherwise.
        answer_ends: The tokens that end an answer. What closes one is among them if it is a token,
            as `<|eot_id|>` is.
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: SampleConfig
    answer_ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raise `DataError` if the template does not render a conversation."""
        closing = self.tokenizer.encode_batch([self.template.closing]).ids.tolist()
        ends = self.tokenizer.end_token_ids + (tuple(closing) if len(closing) == 1 else ())
        object.__setattr__(self, "answer_ends", ends)

    @classmethod
    def load(cls, config: Config, checkpoint: Path, cache_gigabytes: float = 1.0) -> Served:
        """Load the model of a run, a checkpoint or a Hugging Face folder, and start its engine.

        Raises as `load_checkpoint` and `Engine` do, and `DataError` as above.
        """
        model_dir, model, tokenizer = load_checkpoint(config, checkpoint)
        template = _form(config, model_dir, tokenizer)
        engine = Engine(model, tokenizer, KnownTexts(int(cache_gigabytes * GIGABYTE)))
        name = (run_of(model_dir) or model_dir).name
        return cls(name, engine, tokenizer, template, config.evaluation.sample)

    def turn_ids(self, messages: Messages, *, follows: bool) -> list[int]:
        """Return the ids of messages up to the answer; they begin or follow a conversation.

        Raises `DataError` in one line if the template refuses the messages.
        """
        render = self.template.next_turn if follows else self.template.render
        return prompt_ids(self.tokenizer, render(messages), follows=follows)


def _form(config: Config, model_dir: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Choose the form of conversations with the model of a folder.

    It is `data.source.template`, that of its run where it is part of one, or else that of its
    tokenizer. Warns if nothing says that the model has seen conversations.
    """
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
    return tokenizer.chat(next(iter(sources)).template)


class Conversation:
    """Turns of a user and a model, in the form that conversations had in its training."""

    def __init__(self, served: Served, seed: int = 0) -> None:
        """Begin without a message; equal seeds and turns give equal answers."""
        self._served, self._seed, self._turns = served, seed, 0

    def reply(self, text: str) -> Iterator[str]:
        """Stream the model's answer to `text`, up to what closes it.

        Raises `DataError` in one line if the template refuses the conversation.
        """
        served, events, before = self._served, queue.SimpleQueue[Event](), self._turns
        asked = [{"role": USER, "content": text}]
        request = Request(
            ids=served.turn_ids(asked, follows=before > 0),
            sampling=served.sampling,
            max_tokens=served.sampling.max_new_tokens,
            end_token_ids=served.answer_ends,
            seed=(self._seed, before),
            emit=events.put,
            session=f"{id(self)}-{before}" if before else None,
            name=f"{id(self)}-{before + 1}",
        )
        served.engine.submit(request)
        try:
            finish_reason = None
            while finish_reason is None:
                event = events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Piece):
                    yield event.text
                    finish_reason = event.finish_reason
        finally:
            request.is_cancelled = True
        self._turns += 1
