"""Rows that are conversations, and what of each a model learns to say.

A row is a list of messages, or what a user asks and an assistant answers, in columns that are known
by name. A conversation becomes pieces of text in turn: what the model is given, which may be empty,
and what it learns. A `ChatTemplate` makes them of messages; of a prompt with its `answer` or
`completion`, in the language of TRL, the two texts are taken as they are.

A tokenizer sees the pieces as texts, so no token spans two of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import pyarrow as pa

from infini_model.data.sources.chat import ASSISTANT, USER, ChatTemplate, Message
from infini_model.data.sources.json_values import whole_number
from infini_model.data.sources.text import Errors, text_of
from infini_model.runtime.errors import DataError

PIECES = pa.list_(pa.string())
Columns = tuple[str, ...]
VERBATIM: tuple[Columns, ...] = (("prompt", "answer"), ("prompt", "completion"))
# OpenAI's and ShareGPT's messages, and the names of common instruction datasets, such as Alpaca's.
FORMS: tuple[Columns, ...] = (
    *VERBATIM,
    *(("messages",), ("conversations",)),
    *(("instruction", "output"), ("instruction", "response")),
    *(("prompt", "response"), ("question", "answer"), ("question", "response")),
)
# Read beside them if they are there: what an instruction is about, the system's message, tools.
INPUTS, SYSTEMS, TOOLS = ("input", "context"), ("system", "system_prompt"), "tools"
BESIDE = (*INPUTS, *SYSTEMS, TOOLS)
NAMES = (("role", "content"), ("from", "value"))
ROLES = {"human": USER, "gpt": ASSISTANT, "observation": "tool"}


class _SkippedError(Exception):
    """A text of the conversation is to be skipped."""


@dataclass(frozen=True)
class Conversations:
    """How rows become conversations.

    `learn` says whether all messages of the assistant are learned or the last alone. `columns`, if
    there are any, names the one that holds the messages, or those of the question and the answer.
    """

    template: ChatTemplate
    learn: Literal["all", "last"] = "all"
    columns: Columns = ()

    def columns_in(self, present: Iterable[str], where: str = "") -> list[str]:
        """Those of the columns `present` that are read. Raises `DataError` that names them."""
        names = list(present)
        for form in (self.columns,) if self.columns else FORMS:
            if set(form) <= set(names):
                return [*form, *(name for name in BESIDE if name in names and name not in form)]
        wanted = " and ".join(map(repr, self.columns))
        if not wanted:
            known = ", ".join(map(" + ".join, FORMS))
            wanted = f"of a conversation, which are {known}; data.source.columns names others"
        raise DataError(f"{where}has no columns {wanted}; it has: {', '.join(names) or 'none'}")

    def pieces(self, row: Mapping[str, Any], errors: Errors) -> list[str] | None:
        """The pieces of a row; None if a part of it is null or skipped, or nothing is to learn.

        Texts are strings, or bytes that must be UTF-8. Raises `DataError` that tells what is wrong
        with the row, but not which row it is.
        """
        columns = self.columns_in(row)
        form = tuple(name for name in columns if name not in BESIDE or name in self.columns)
        if any(row[name] is None for name in form):
            return None
        try:
            values = {name: _plain(row[name], errors) for name in columns}
        except _SkippedError:
            return None
        if form in VERBATIM and not isinstance(values[form[0]], list):
            pieces = [_text(values[name], f"column {name!r}") for name in form]
        else:
            messages = self._messages(values, form)
            # An empty answer is nothing to learn.
            if not messages or not (messages[-1]["content"] or "tool_calls" in messages[-1]):
                return None
            pieces = self.template.pieces(messages, self.learn, _listed(values.get(TOOLS), TOOLS))
        return pieces if any(pieces[1::2]) else None

    def _messages(self, values: Mapping[str, Any], form: Columns) -> list[Message]:
        """The messages up to the assistant's last; none if all that it says is left out."""
        parts = [values[name] for name in form]
        if len(form) == 1:
            parts = [_listed(parts[0], form[0])]
        elif not isinstance(parts[0], list):
            asked, answer = (_text(values[name], f"column {name!r}") for name in form)
            about = [
                values[name] for name in INPUTS if values.get(name) and form[0] == "instruction"
            ]
            question = {"role": USER, "content": "\n".join([asked, *about])}
            parts = [[question, {"role": ASSISTANT, "content": answer}]]
        for part, name in zip(parts, form, strict=False):
            if not isinstance(part, list):
                raise DataError(f"column {name!r} is {type(part).__name__}, not a list")
        shows_calls = "tool_calls" in self.template.source
        found = [_message(*each, shows_calls) for each in enumerate(chain.from_iterable(parts), 1)]
        known = [message for message in found if message is not None]
        turns = [place for place, message in enumerate(known) if message["role"] == ASSISTANT]
        if not turns and len(known) == len(found):
            raise DataError(f"has no message of the {ASSISTANT}")
        system = next((values[name] for name in SYSTEMS if values.get(name)), None)
        heard = known[: turns[-1] + 1] if turns else []
        if system and heard and heard[0]["role"] != "system":
            heard.insert(0, {"role": "system", "content": _text(system, "the system's message")})
        return heard


def _plain(value: Any, errors: Errors) -> Any:
    """A value with texts as strings. Raises `_SkippedError`."""
    if isinstance(value, dict):
        return {name: _plain(each, errors) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each, errors) for each in value]
    text = text_of(value, "", errors) if isinstance(value, str | bytes) else value
    if text is None and value is not None:
        raise _SkippedError
    return text


def _without_nulls(value: Any) -> Any:
    """A value without null fields, which a table has for whatever another row has."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _listed(value: Any, column: str) -> Any:
    """A column's list, which may be spelled in JSON; None if it is empty. Raises `DataError`."""
    if not value or not isinstance(value, str):
        return value or None
    try:
        return json.loads(value, parse_int=whole_number)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"column {column!r} is neither a list nor JSON: {error}") from error


def _text(value: Any, what: str) -> str:
    """A text, or the texts of a list of parts as one. Raises `DataError`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise DataError(f"{what} is {type(value).__name__}, not text")
    for number, part in enumerate(value, 1):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"{what}: part {number} is {kind}, not text")
    return "".join(part["text"] for part in value)


def _message(number: int, value: Any, shows_calls: bool) -> Message | None:
    """A message in OpenAI's names, as templates know them; `number` is for errors.

    None if it says nothing, as one that calls a tool does where the template shows no calls.
    """
    if not isinstance(value, dict):
        raise DataError(f"message {number} is {type(value).__name__}, not an object")
    role, content = NAMES[1] if NAMES[1][0] in value else NAMES[0]
    if role not in value:
        raise DataError(f"message {number} has no {role!r}; it has: {', '.join(value)}")
    calls = value.get("tool_calls")
    if content not in value and not calls:
        raise DataError(f"message {number} has no {content!r}; it has: {', '.join(value)}")
    said = value.get(content)
    if said is None and not (calls and shows_calls):
        return None
    who = _text(value[role], f"message {number}: {role!r}")
    said = "" if said is None else _text(said, f"message {number}: {content!r}")
    known = _without_nulls({**value, "role": ROLES.get(who, who), "content": said})
    return {name: each for name, each in known.items() if name not in NAMES[1]}
