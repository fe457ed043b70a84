"""The states of texts that have been read, so that none is read twice.

A state is constant in size, however long its text, and cannot be cut back to a shorter one. So the
state of a text is kept at its end and at a few segment borders before it, which are the denser the
nearer they are to the end: `borders`. A text that differs from a known one in its last n tokens
finds a state at most 2 n tokens and two segments before they part.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from infini_model.model.state import State
from infini_model.runtime.errors import UserError

CPU = torch.device("cpu")
# At most so many states, also of a model whose states are tiny.
MOST_STATES = 10_000


class SessionLostError(UserError):
    """The text of a session is not, or no longer, known."""


@dataclass(frozen=True)
class Text:
    """A text, known by a hash of its tokens."""

    length: int = 0
    hashed: Any = field(default_factory=hashlib.blake2b)

    def followed_by(self, ids: Sequence[int] | np.ndarray) -> Text:
        """Return the text with these tokens after it."""
        hashed = self.hashed.copy()
        hashed.update(np.asarray(ids, dtype=np.int64).tobytes())
        return Text(self.length + len(ids), hashed)


class Known(NamedTuple):
    """A text that has been read.

    Attributes:
        text: The tokens that `state` has read.
        state: Its state, one row, on the CPU.
        unread: Tokens that a named text has after them.
    """

    text: Text
    state: State
    unread: tuple[int, ...] = ()


@dataclass
class KnownTexts:
    """States by text, of at most `most_bytes`; those that were used last stay."""

    most_bytes: int
    _states: OrderedDict[bytes, Known] = field(init=False, default_factory=OrderedDict)
    _names: OrderedDict[str, tuple[Text, tuple[int, ...]]] = field(
        init=False, default_factory=OrderedDict
    )
    _bytes: int = field(init=False, default=0)

    def keep(
        self, text: Text, state: State, name: str | None = None, unread: tuple[int, ...] = ()
    ) -> None:
        """Keep the state of one row after `text`; `name` is that of the text with `unread`."""
        if state.nbytes > self.most_bytes:
            return
        key = text.hashed.digest()
        if key not in self._states:
            self._states[key] = Known(text, state.to(CPU))
            self._bytes += state.nbytes
        self._states.move_to_end(key)
        if name is not None:
            self._names[name] = text, unread
        while self._states and (self._bytes > self.most_bytes or len(self._states) > MOST_STATES):
            self._bytes -= self._states.popitem(last=False)[1].state.nbytes
        while len(self._names) > MOST_STATES:
            self._names.popitem(last=False)

    def named(self, name: str) -> Known:
        """Return the text of this name. Raises `SessionLostError` if it is not known any more."""
        text, unread = self._names.get(name, (Text(), ()))
        known = self._find(text)
        if name in self._names:
            self._names.move_to_end(name)
        if known is None:
            raise SessionLostError(
                f"session: {name!r} is not the id of a response of this server, or others have "
                "been used since; send the whole text"
            )
        return known._replace(unread=unread)

    def longest(self, ids: Sequence[int] | np.ndarray) -> Known | None:
        """Find the longest known text that `ids` begin with, and are longer than."""
        every, text, found = np.asarray(ids, dtype=np.int64), Text(), Text()
        lengths = {known.text.length for known in self._states.values()}
        for before, length in pairwise(sorted({0, *(n for n in lengths if n < len(every))})):
            text = text.followed_by(every[before:length])
            found = text if text.hashed.digest() in self._states else found
        return self._find(found)

    def _find(self, text: Text) -> Known | None:
        key = text.hashed.digest()
        if key in self._states:
            self._states.move_to_end(key)
        return self._states.get(key)


def borders(end: int, segment_length: int) -> set[int]:
    """Return the segment borders before `end` at which the state of a text so long is kept.

    They are the last one, and the last that are one, two, four, … segments before the end.
    """
    doubled = (segment_length << power for power in range(end.bit_length()))
    places = {(end - back) // segment_length * segment_length for back in (0, *doubled)}
    return {place for place in places if 0 < place < end}
