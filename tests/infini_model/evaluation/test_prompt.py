"""Text in pieces of complete characters, and conversations, whose cost does not grow."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from real import real_tokenizer
from templates import of_messages
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.config import SampleConfig
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.stated import END_OF_TEXT
from infini_model.data.tokenizers.tokenizer import REPLACEMENT, ByteTokenizer
from infini_model.evaluation.prompt import Conversation, continue_prompt, decode_pieces
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

BYTES = ByteTokenizer()
PAIRS = train_tokenizer([["über die Größe der Erde ", "the stone under the river "]], 300)
# Hypothesis draws constants of the code as well; the end of text is left out at the end of a text.
texts = st.text().filter(lambda text: END_OF_TEXT[0] not in text)


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
    talk = Conversation(
        model, tokenizer, ChatTemplate(of_messages("<{role}>{content}" + end)), SAMPLING
    )
    text, answers = "", set()
    for said in ("one", "a longer turn, of several segments" * 3, "two"):
        text += f"<user>{said}{end}<assistant>"
        answer = "".join(talk.reply(said))
        assert answer == "".join(continue_prompt(model, tokenizer, text, SAMPLING, 0))
        text += f"{answer}{end}"
        answers.add(answer)
    assert len(answers) == 3


def test_a_token_of_an_answer_copies_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = InfiniLlama(tiny_config(vocab_size=BYTES.vocab_size, segment_length=64)).eval()
    advance, held = model.advance, set()

    def seen(*arguments, **options):
        hidden, after = advance(*arguments, **options)
        held.add(after.layers[0].keys.data_ptr())
        return hidden, after

    monkeypatch.setattr(model, "advance", seen)
    form = ChatTemplate(of_messages("{role}{content}"))
    list(Conversation(model, BYTES, form, SAMPLING).reply("hello"))
    assert len(held) == 1


def test_a_diffusion_model_is_refused_in_one_line() -> None:
    model = InfiniLlama(tiny_config(bidirectional=True, mask_token_id=0))
    with pytest.raises(UserError, match="chat needs a causal model"):
        Conversation(model, BYTES, ChatTemplate(of_messages("{role}{content}")), SAMPLING)
