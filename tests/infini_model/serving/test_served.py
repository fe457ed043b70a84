"""Conversations, whose cost does not grow."""

import pytest
from templates import of_messages
from tiny_engines import BYTES, model_that_writes_letters, running

from infini_model.config import SampleConfig
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.prompt import continue_prompt
from infini_model.serving.served import Conversation, Served

BEGINS = ByteTokenizer()
BEGINS.bos_token_id = 0
SAMPLING = SampleConfig(max_new_tokens=7, temperature=0.0)


@pytest.mark.parametrize("tokenizer", [BYTES, BEGINS], ids=["plain", "beginning of text"])
@pytest.mark.parametrize("end", ["</>", ""])
def test_an_answer_is_the_continuation_of_all_turns(tokenizer: ByteTokenizer, end: str) -> None:
    model, form = model_that_writes_letters(), ChatTemplate(of_messages("<{role}>{content}" + end))
    text, answers = "", set()
    with running(model) as engine:
        talk = Conversation(Served("a", engine, tokenizer, form, SAMPLING))
        for said in ("one", "a longer turn, of several segments" * 3, "two"):
            text += f"<user>{said}{end}<assistant>"
            answer = "".join(talk.reply(said))
            assert answer == "".join(continue_prompt(model, tokenizer, text, SAMPLING, 0))
            text += f"{answer}{end}"
            answers.add(answer)
    assert len(answers) > 1


def test_a_token_of_an_answer_copies_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_that_writes_letters(segment_length=64)
    advance, held = model.advance, set()

    def seen(ids, *arguments, **options):
        hidden, after = advance(ids, *arguments, **options)
        if ids.size(1) == 1:
            held.add(after.layers[0].keys.data_ptr())
        return hidden, after

    monkeypatch.setattr(model, "advance", seen)
    form = ChatTemplate(of_messages("{role}{content}"))
    with running(model) as engine:
        list(Conversation(Served("a", engine, BYTES, form, SAMPLING)).reply("hello"))
    assert len(held) == 1
