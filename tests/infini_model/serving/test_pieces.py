"""Text in pieces of complete characters."""

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real import real_tokenizer

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.stated import END_OF_TEXT
from infini_model.data.tokenizers.tokenizer import REPLACEMENT, ByteTokenizer, Tokenizer
from infini_model.serving.pieces import PieceDecoder

BYTES = ByteTokenizer()
PAIRS = train_tokenizer([["über die Größe der Erde ", "the stone under the river "]], 300)
# Hypothesis draws constants of the code as well; the end of text is left out at the end of a text.
texts = st.text().filter(lambda text: END_OF_TEXT[0] not in text)


def decode_pieces(tokenizer: Tokenizer, before: list[int], new: Iterable[int]) -> Iterator[str]:
    decoder = PieceDecoder(tokenizer, before)
    yield from filter(None, map(decoder.add, new))
    yield decoder.rest()


@given(st.sampled_from([BYTES, PAIRS]), texts, texts)
def test_pieces_join_to_the_text(tokenizer, prompt, text):
    before, new = (tokenizer.encode_batch([t]).ids.tolist() for t in (prompt, text))
    pieces = list(decode_pieces(tokenizer, before, new))
    assert "".join(pieces) == text.rstrip("\ufffd")
    for piece in pieces:
        piece.encode()


def test_a_character_is_emitted_once_complete():
    new = BYTES.encode_batch(["aé€𝄞b"]).ids.tolist()
    taken = []
    pieces = decode_pieces(BYTES, [], (taken.append(token) or token for token in new))
    shown = [(piece, len(taken)) for piece in pieces if piece]
    assert shown == [("a", 1), ("é", 3), ("€", 6), ("𝄞", 10), ("b", 11)]


@given(st.lists(st.integers(0, 254)))
def test_invalid_utf8_is_replaced_as_in_whole_text(octets):
    pieces = "".join(decode_pieces(BYTES, [], octets))
    assert pieces == BYTES.decode(octets).rstrip("\ufffd")


# Rare characters are bytes to Llama 2 and Gemma, common ones are tokens, and emoji are several.
MIXED = [
    "龘",
    "靐齉",
    "你好",
    "ꙮ",
    "𝄞",
    "😀",
    "🇩🇪",
    "é",
    "e\u0301",
    " ",
    "  ",
    "\n",
    "\n\n",
    " the",
    "12",
]


@pytest.mark.parametrize("name", ["llama2", "gemma3", "llama3", "qwen3"])
def test_pieces_of_real_tokenizers_are_those_of_the_whole_and_come_at_once(name: str) -> None:
    tokenizer = load_tokenizer(str(real_tokenizer(name)))
    chance = random.Random(1)
    for number in range(300):
        text = "".join(chance.choices(MIXED, k=chance.randint(1, 14)))
        ids = tokenizer.encode_batch([text]).ids.tolist()
        told = chance.randint(0, len(ids)) if number % 2 else 0
        while tokenizer.decode(ids[:told]).endswith(REPLACEMENT):
            told -= 1
        taken, shown = ids[:told], tokenizer.decode(ids[:told])
        new = (taken.append(token) or token for token in ids[told:])
        for piece in decode_pieces(tokenizer, ids[:told], new):
            shown += piece
            whole = tokenizer.decode(taken)
            assert shown == whole or whole.endswith(REPLACEMENT)
        assert shown == tokenizer.decode(ids)


def test_a_wrong_byte_is_replaced_and_what_follows_is_shown() -> None:
    tokenizer = load_tokenizer(str(real_tokenizer("llama2")))
    ids = tokenizer.encode_batch(["龘靐 the"]).ids.tolist()
    pieces = decode_pieces(tokenizer, [], [*ids[:4], ids[1], *ids[4:]])
    assert "".join(pieces) == f"龘{REPLACEMENT * 4} the"
