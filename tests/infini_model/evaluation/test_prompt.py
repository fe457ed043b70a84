"""Text in pieces of complete characters, and conversations, whose cost does not grow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.config import SampleConfig
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.prompt import Conversation, continue_prompt, decode_pieces
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

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


BEGINS = ByteTokenizer()
BEGINS.bos_token_id = 0
SAMPLING = SampleConfig(max_new_tokens=7, temperature=0.0)


def model_that_writes_letters() -> InfiniLlama:
    torch.manual_seed(0)
    model = InfiniLlama(tiny_config(vocab_size=BYTES.vocab_size, initializer_range=0.4)).eval()
    draw_memory_parameters(model)
    written = torch.zeros(BYTES.vocab_size, dtype=torch.bool)
    written[list(b"abcdefgh")] = True
    model.lm_head.register_forward_hook(lambda _, __, out: out.masked_fill(~written, -1e9))
    return model


@pytest.mark.parametrize("tokenizer", [BYTES, BEGINS], ids=["plain", "beginning of text"])
@pytest.mark.parametrize("end", ["</>", ""])
def test_an_answer_is_the_continuation_of_all_turns(tokenizer: ByteTokenizer, end: str) -> None:
    model = model_that_writes_letters()
    talk = Conversation(model, tokenizer, ChatTemplate("<{role}>{content}" + end), SAMPLING)
    text, answers = "", set()
    for said in ("one", "a longer turn, of several segments" * 3, "two"):
        text += f"<user>{said}{end}<assistant>"
        answer = "".join(talk.reply(said))
        assert answer == "".join(continue_prompt(model, tokenizer, text, SAMPLING, 0))
        text += f"{answer}{end}"
        answers.add(answer)
    assert len(answers) == 3


def test_a_diffusion_model_is_refused_in_one_line() -> None:
    model = InfiniLlama(tiny_config(bidirectional=True, mask_token_id=0))
    with pytest.raises(UserError, match="chat needs a causal model"):
        Conversation(model, BYTES, ChatTemplate("{role}{content}"), SAMPLING)
