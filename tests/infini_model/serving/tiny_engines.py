"""Engines of tiny models, and requests to them that wait for their answers."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from tiny_models import tiny_model

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.model.llama import InfiniLlama
from infini_model.serving.engine import Engine
from infini_model.serving.known_texts import KnownTexts
from infini_model.serving.requests import Accepted, Event, Piece, Request, joined

BYTES = ByteTokenizer()
SHAPE = {"vocab_size": BYTES.vocab_size, "initializer_range": 0.4, "window_segments": 1}


def model_that_writes_letters(**changes: Any) -> InfiniLlama:
    model = tiny_model(**SHAPE | changes).eval()
    written = torch.zeros(BYTES.vocab_size, dtype=torch.bool)
    written[list(b"abcdefgh")] = True
    model.lm_head.register_forward_hook(lambda _, __, out: out.masked_fill(~written, -1e9))
    return model


@contextmanager
def running(model: InfiniLlama, most_bytes: int = 10**9) -> Iterator[Engine]:
    with closing(Engine(model, BYTES, KnownTexts(most_bytes))) as engine:
        yield engine


class Asked:
    """A request that has been submitted, and its events."""

    def __init__(self, engine: Engine, prompt: bytes, **changes: Any) -> None:
        self.events = queue.SimpleQueue[Event]()
        fields: dict[str, Any] = {
            "ids": list(prompt),
            "sampling": SampleConfig(temperature=0.0),
            "max_tokens": 9,
            "end_token_ids": BYTES.end_token_ids,
            "seed": (0, 0),
            "emit": self.events.put,
        }
        self.request = Request(**fields | changes)
        engine.submit(self.request)

    def next(self) -> Event:
        event = self.events.get(timeout=300)
        if isinstance(event, Exception):
            raise event
        return event

    def accepted(self) -> Accepted:
        event = self.next()
        assert isinstance(event, Accepted)
        return event

    def pieces(self) -> list[Piece]:
        found = list[Piece]()
        while not found or found[-1].finish_reason is None:
            event = self.next()
            found += [event] if isinstance(event, Piece) else []
        return found

    def answer(self) -> Piece:
        return joined(self.pieces())
