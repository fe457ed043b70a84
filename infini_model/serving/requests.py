"""A request for the continuation of a text, and the answer in pieces of complete characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.serving.pieces import CONTEXT, PieceDecoder

FinishReason = Literal["stop", "length"]


class Accepted(NamedTuple):
    """The first event of a request: the tokens of its text, and how many were known already."""

    prompt_tokens: int
    known_tokens: int


class ScoredToken(NamedTuple):
    """A token, its log-probability in nats, and the likeliest ones at its place with theirs."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


class Piece(NamedTuple):
    """A part of an answer.

    Attributes:
        text: Complete characters, perhaps none.
        tokens: What was generated since the last piece, if the request asks for scores.
        generated: The number of tokens generated so far, with the one that ended the answer.
        finish_reason: Why the answer ends with this piece; None if it does not.
    """

    text: str
    tokens: list[ScoredToken]
    generated: int
    finish_reason: FinishReason | None


Event = Accepted | Piece | Exception


class EngineError(RuntimeError):
    """The engine has failed, through no fault of the request."""


def joined(pieces: Sequence[Piece]) -> Piece:
    """Join the pieces of an answer."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return pieces[-1]._replace(text="".join(piece.text for piece in pieces), tokens=tokens)


@dataclass(eq=False)
class Request:
    """A text to be continued.

    Attributes:
        ids: Tokens of the prompt, which follows the text `session`, if that is given.
        sampling: How each token is drawn.
        max_tokens: Length of the answer at most, in tokens; 0 only reads the prompt.
        end_token_ids: Tokens that end the answer and are no part of it.
        seed: Seeds the draws, as `infini_model.model.generate.stream` does: seed and row.
        emit: Called in the engine's thread with an `Accepted`, then pieces; or with an error.
        stop: Strings that end the answer and are no part of it.
        likeliest: How many of the likeliest tokens are scored beside each; None scores none.
        session: Name of an earlier request, after whose answer the prompt begins.
        name: The name of this one.
        is_cancelled: Set by whoever no longer wants the answer.
    """

    ids: Sequence[int] | np.ndarray
    sampling: SampleConfig
    max_tokens: int
    end_token_ids: tuple[int, ...]
    seed: tuple[int, int]
    emit: Callable[[Event], None] = lambda _: None
    stop: tuple[str, ...] = ()
    likeliest: int | None = None
    session: str | None = None
    name: str | None = None
    is_cancelled: bool = False


class Answer:
    """The text that is generated for a request."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._decoder = PieceDecoder(tokenizer, list(request.ids[-2 * CONTEXT :]))
        self._held, self._tokens = "", list[ScoredToken]()
        self._generated = 0

    def add(self, token: int, scored: ScoredToken | None) -> bool:
        """Emit the text that the token completes; returns whether it ends the answer."""
        self._generated += 1
        if scored is not None:
            self._tokens.append(scored)
        if token in self._request.end_token_ids:
            return self.end("stop")
        text = self._decoder.add(token)
        if self._generated == self._request.max_tokens:
            return self.end("length", text)
        return self.emit(text, None)

    def end(self, finish_reason: FinishReason, text: str = "") -> bool:
        """Emit `text` and what is left at the end."""
        return self.emit(text + self._decoder.rest(), finish_reason)

    def emit(self, text: str, finish_reason: FinishReason | None) -> bool:
        """Emit text, but no stop string, nor what may be the beginning of one."""
        stops, held = self._request.stop, self._held + text
        shown = len(held)
        if places := [place for stop in stops if (place := held.find(stop)) >= 0]:
            shown, finish_reason = min(places), "stop"
        elif finish_reason is None:
            shown -= max((_begun(held, stop) for stop in stops), default=0)
        self._held = held[shown:]
        if shown or finish_reason:
            piece = Piece(held[:shown], self._tokens, self._generated, finish_reason)
            self._request.emit(piece)
            self._tokens = []
        return finish_reason is not None


def _begun(text: str, stop: str) -> int:
    """Count the characters at the end of `text` with which `stop` begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
