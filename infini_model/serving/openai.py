"""The requests of OpenAI's clients and their answers: completions and chat completions.

One field is not OpenAI's: `session`, the id of an earlier response, which the prompt or the
messages follow. What a request leaves out is as in `evaluation.sample`; what is not supported is
refused, unless it asks for nothing.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from infini_model.data.tokenizers.tokenizer import REPLACEMENT, prompt_ids
from infini_model.runtime.errors import UserError
from infini_model.serving.model import Model
from infini_model.serving.requests import Event, Piece, Request

# What changes no answer.
IGNORED = {
    *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user"),
}
# What else asks for nothing, besides null, false, 0 and what is empty.
NOTHING: dict[str, Any] = {
    "best_of": 1,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
MOST_CHOICES = 1024

Likeliest = Annotated[int, Field(strict=True, ge=0, le=20)]
StopString = Annotated[str, Field(min_length=1, max_length=200)]
TokenIds = list[Annotated[int, Field(strict=True, ge=0, lt=2**31)]]


class StreamOptions(BaseModel):
    """Options of an answer that is streamed."""

    include_usage: bool = False


class Asked(BaseModel):
    """A request of either kind.

    Attributes:
        prefix: With which the ids of its responses begin.
        objects: The kind of a response, and that of a part of one that is streamed.
    """

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    prefix: ClassVar[str]
    objects: ClassVar[tuple[str, str]]

    model: str
    max_tokens: NonNegativeInt | None = None
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session: str | None = None

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        for key, value in (self.model_extra or {}).items():
            if value and key not in IGNORED and value != NOTHING.get(key):
                raise ValueError(f"{key}: is not supported")
        return self

    def requests(
        self, served: Model, name: str, emit: Callable[[int, Event], None]
    ) -> list[Request]:
        """Return what the engine is to do: `n` answers to each prompt.

        `name` is the id of the response; `emit` gets the number of a choice with each event. Raises
        `UserError` if the chat template refuses the messages or `session` is of the other kind.
        """
        if self.session is not None and not self.session.startswith(self.prefix):
            raise UserError(f"session: takes the id of a response that begins with {self.prefix}")
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        sampling = served.sampling.updated(**{k: v for k, v in given.items() if v is not None})
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**64
        prompts, ends = self.texts(served)
        count = self.n or 1
        if not 0 < len(prompts) * count <= MOST_CHOICES:
            asked = f"{len(prompts):,} prompts with {count} answers each"
            raise UserError(f"prompt: got {asked}; takes up to {MOST_CHOICES:,} answers")
        rows = [ids for ids in map(np.asarray, prompts) for _ in range(count)]
        return [
            Request(
                ids=ids,
                sampling=sampling,
                max_tokens=sampling.max_new_tokens if self.max_tokens is None else self.max_tokens,
                end_token_ids=ends,
                seed=(seed, row),
                emit=partial(emit, row),
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                likeliest=self.likeliest,
                session=self.session,
                name=name if len(rows) == 1 else None,
            )
            for row, ids in enumerate(rows)
        ]

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """The number of likeliest tokens that are scored beside each; None if none is scored."""

    @abstractmethod
    def texts(self, served: Model) -> tuple[list[list[int]], tuple[int, ...]]:
        """Return the ids of each prompt, and the tokens that end an answer."""

    @abstractmethod
    def choice(self, piece: Piece, served: Model, *, begins: bool) -> dict[str, Any]:
        """Return a piece of an answer, which perhaps `begins` with it, as a choice."""


class Completion(Asked):
    """A request to continue texts, or token ids."""

    prefix = "cmpl-"
    objects = "text_completion", "text_completion"

    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: Likeliest | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    def texts(self, served: Model) -> tuple[list[list[int]], tuple[int, ...]]:
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if given and isinstance(given[0], int):
            given = [given]
        tokenizer, follows = served.tokenizer, self.session is not None
        ids = [
            each if isinstance(each, list) else prompt_ids(tokenizer, each, follows=follows)
            for each in given
        ]
        return ids, tokenizer.end_token_ids

    def choice(self, piece: Piece, served: Model, *, begins: bool) -> dict[str, Any]:  # noqa: ARG002
        decode, scores = served.tokenizer.decode, None
        if piece.tokens:
            scores = {
                "tokens": [decode([each.token]) for each in piece.tokens],
                "token_logprobs": [each.logprob for each in piece.tokens],
                "top_logprobs": [
                    {decode([token]): logprob for token, logprob in each.likeliest}
                    for each in piece.tokens
                ],
            }
        return {"text": piece.text, "logprobs": scores}


class Part(BaseModel):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message; all that it has is for the chat template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as a chat template takes it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {**self.model_dump(), "content": text}


class ChatCompletion(Asked):
    """A request for the next message of a conversation."""

    prefix = "chatcmpl-"
    objects = "chat.completion", "chat.completion.chunk"

    max_completion_tokens: NonNegativeInt | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Likeliest | None = None

    @model_validator(mode="after")
    def _has_one_limit(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def texts(self, served: Model) -> tuple[list[list[int]], tuple[int, ...]]:
        messages = [message.plain() for message in self.messages]
        follows = self.session is not None
        return [served.turn_ids(messages, follows=follows)], served.answer_ends

    def choice(self, piece: Piece, served: Model, *, begins: bool) -> dict[str, Any]:
        def scored(token: int, logprob: float) -> dict[str, Any]:
            text = served.tokenizer.decode([token])
            octets = None if REPLACEMENT in text else list(text.encode())
            return {"token": text, "bytes": octets, "logprob": logprob}

        content = [
            scored(each.token, each.logprob)
            | {"top_logprobs": [scored(*other) for other in each.likeliest]}
            for each in piece.tokens
        ]
        message = {"role": "assistant", "content": piece.text}
        if not begins:
            del message["role"]
        name = "delta" if self.stream else "message"
        return {name: message, "logprobs": {"content": content} if content else None}
