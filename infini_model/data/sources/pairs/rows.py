"""What a row of prompts and answers holds, and how a conversation becomes text.

A row has the columns `prompt` and `answer` (`completion` in the language of TRL), or `messages`.
Both texts are taken as they are. Of a conversation the last message of the assistant is the answer,
and what comes before it the prompt; later messages are left out. A template, in which nothing is
executed, makes text of each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from infini_model.data.sources.utf8 import Errors, decode, join_surrogates
from infini_model.runtime.errors import DataError

PROMPT, MESSAGES = "prompt", "messages"
ANSWERS = ("answer", "completion")
ASSISTANT = "assistant"
ROLE, CONTENT = "{role}", "{content}"


class Pair(NamedTuple):
    """A prompt, which may be empty, and its answer, which is not."""

    prompt: str
    answer: str


class _Message(NamedTuple):
    role: str
    content: str


def pair_columns(present: Iterable[str]) -> list[str]:
    """The columns that hold the pairs. Raises `DataError` that names those that are `present`."""
    names = list(present)
    for answer in ANSWERS:
        if PROMPT in names and answer in names:
            return [PROMPT, answer]
    if MESSAGES in names:
        return [MESSAGES]
    raise DataError(
        f"has neither columns {PROMPT!r} and {ANSWERS[0]!r} nor {MESSAGES!r}; "
        f"it has: {', '.join(names) or 'none'}"
    )


def pair_of(row: Mapping[str, Any], template: str, errors: Errors) -> Pair | None:
    """The pair of a row; None if a part of it is null or skipped, or its answer is empty.

    Texts are strings, or bytes that must be UTF-8. Raises `DataError` that tells what is wrong with
    the row, but not which row it is.
    """
    columns = pair_columns(row)
    values = [row[column] for column in columns]
    if any(value is None for value in values):
        return None
    if all(isinstance(value, list) for value in values):
        return _of_messages(list(chain.from_iterable(values)), template, errors)
    if columns == [MESSAGES]:
        raise DataError(f"column {MESSAGES!r} is {type(values[0]).__name__}, not a list")
    prompt, answer = (
        _text(value, f"column {column!r}", errors)
        for column, value in zip(columns, values, strict=True)
    )
    return Pair(prompt, answer) if prompt is not None and answer else None


def _of_messages(values: list[Any], template: str, errors: Errors) -> Pair | None:
    messages = [_message(number, value, errors) for number, value in enumerate(values, 1)]
    known = [message for message in messages if message is not None]
    if len(known) < len(messages):
        return None
    turns = [place for place, message in enumerate(known) if message.role == ASSISTANT]
    if not turns:
        raise DataError(f"has no message of the {ASSISTANT}")
    answer = known[turns[-1]].content
    head, _, tail = template.replace(ROLE, ASSISTANT).partition(CONTENT)
    before = [_render(message, template) for message in known[: turns[-1]]]
    # What separates messages is not part of the answer, but a token that ends one is.
    return Pair("".join([*before, head]), answer + tail.rstrip()) if answer else None


def _render(message: _Message, template: str) -> str:
    head, _, tail = template.replace(ROLE, message.role).partition(CONTENT)
    return head + message.content + tail


def _message(number: int, value: Any, errors: Errors) -> _Message | None:
    """A message, None if a part of it is null or skipped; `number` is for errors."""
    if not isinstance(value, dict):
        raise DataError(f"message {number} is {type(value).__name__}, not an object")
    parts = []
    for name in _Message._fields:
        if name not in value:
            raise DataError(f"message {number} has no {name!r}; it has: {', '.join(value)}")
        parts.append(_text(value[name], f"message {number}: {name!r}", errors))
    role, content = parts
    return None if role is None or content is None else _Message(role, content)


def _text(value: Any, what: str, errors: Errors) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        return decode(value, errors)
    if isinstance(value, str):
        return join_surrogates(value, errors)
    raise DataError(f"{what} is {type(value).__name__}, not text")
