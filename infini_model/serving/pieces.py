"""Text from tokens that come one by one, in pieces of complete characters."""

from __future__ import annotations

from infini_model.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer, last_ids

# Tokens of the prompt that are decoded in front of new ones, since spaces may depend on them.
CONTEXT = 8


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
