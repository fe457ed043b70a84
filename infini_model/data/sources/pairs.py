"""Rows that are a prompt and its answer, and how a conversation becomes text.

A row has the columns `prompt` and `answer` (`completion` in the language of TRL), or `messages`.
Both texts are taken as they are. Of a conversation the last message of the assistant is the answer,
and what comes before it the prompt; later messages are left out. A `ChatTemplate` makes text of
the messages.

Up to the tokenizer a pair is a row with two fields. A tokenizer sees texts, so there the prompts
and answers alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypedDict

import numpy as np
import pyarrow as pa

from infini_model.data.sources.chat import ASSISTANT, ChatTemplate
from infini_model.data.sources.text import Errors, text_of
from infini_model.runtime.errors import DataError

PROMPT, MESSAGES = "prompt", "messages"
ANSWERS = ("answer", "completion")
PAIR = pa.struct([(PROMPT, pa.string()), (ANSWERS[0], pa.string())])
# Prompt and answer: the texts of one pair.
TEXTS = 2


class Pair(TypedDict):
    """A prompt, which may be empty, and its answer, which is not."""

    prompt: str
    answer: str


class _Message(NamedTuple):
    role: str
    content: str


# One without content, such as a call of a tool, which is left out of its conversation.
SILENT = _Message("", "")


def pair_columns(present: Iterable[str], where: str = "") -> list[str]:
    """The columns that hold the pairs. Raises `DataError` that names those that are `present`."""
    names = list(present)
    for answer in ANSWERS:
        if PROMPT in names and answer in names:
            return [PROMPT, answer]
    if MESSAGES in names:
        return [MESSAGES]
    raise DataError(
        f"{where}has neither columns {PROMPT!r} and {ANSWERS[0]!r} nor {MESSAGES!r}; "
        f"it has: {', '.join(names) or 'none'}"
    )


def pair_of(row: Mapping[str, Any], template: ChatTemplate, errors: Errors) -> Pair | None:
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
        text_of(value, f"column {column!r}", errors)
        for column, value in zip(columns, values, strict=True)
    )
    return Pair(prompt=prompt, answer=answer) if prompt is not None and answer else None


def _of_messages(values: list[Any], template: ChatTemplate, errors: Errors) -> Pair | None:
    messages = [_message(number, value, errors) for number, value in enumerate(values, 1)]
    known = [message for message in messages if message is not None]
    if len(known) < len(messages):
        return None
    known = [message for message in known if message is not SILENT]
    turns = [place for place, message in enumerate(known) if message.role == ASSISTANT]
    if not turns and len(known) < len(messages):
        return None
    if not turns:
        raise DataError(f"has no message of the {ASSISTANT}")
    conversation = known[: turns[-1] + 1]
    # An empty answer is nothing to learn.
    if not conversation[-1].content:
        return None
    prompt, answer = template.pair([message._asdict() for message in conversation])
    return Pair(prompt=prompt, answer=answer)


def _message(number: int, value: Any, errors: Errors) -> _Message | None:
    """A message, None if a part of it is null or skipped; `number` is for errors."""
    if not isinstance(value, dict):
        raise DataError(f"message {number} is {type(value).__name__}, not an object")
    if value.get("role") is not None and value.get("content") is None:
        return SILENT
    parts = []
    for name in _Message._fields:
        if name not in value:
            raise DataError(f"message {number} has no {name!r}; it has: {', '.join(value)}")
        parts.append(text_of(value[name], f"message {number}: {name!r}", errors))
    role, content = parts
    return None if role is None or content is None else _Message(role, content)


def as_bytes(array: pa.Array) -> pa.Array:
    """A column with the bytes of its texts, also those inside of lists and structs."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(_raw_type(array.type))


def _raw_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _raw_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_raw_type(kind.value_type))
    return kind


def alternate(pairs: pa.StructArray) -> pa.StringArray:
    """The prompts and the answers of pairs in turn."""
    count = len(pairs)
    order = np.arange(TEXTS * count).reshape(TEXTS, count).T.reshape(-1)
    return pa.concat_arrays(pairs.flatten()).take(pa.array(order))


def join(texts: pa.StringArray) -> pa.StringArray:
    """Each prompt and its answer as one text, without a copy; as `alternate` lays them out."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    joined = pa.py_buffer(np.ascontiguousarray(offsets[::TEXTS]))
    return pa.StringArray.from_buffers(len(texts) // TEXTS, joined, texts.buffers()[2])
