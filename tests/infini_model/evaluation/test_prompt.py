"""Streaming text: complete characters, in pieces that join to the text."""

from hypothesis import given
from hypothesis import strategies as st

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.prompt import decode_pieces

BYTES = ByteTokenizer()
PAIRS = train_tokenizer([["über die Größe der Erde ", "the stone under the river "]], 300)


@given(st.sampled_from([BYTES, PAIRS]), st.text(), st.text())
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
