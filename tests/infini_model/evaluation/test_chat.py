"""Conversations: each answer is that to all turns before, at a cost that does not grow."""

import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.chat import Conversation
from infini_model.evaluation.prompt import continue_prompt
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

BYTES = ByteTokenizer()
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
    talk = Conversation(model, tokenizer, "<{role}>{content}" + end, SAMPLING)
    text, answers = "", set()
    for said in ("one", "a longer turn, of several segments" * 3, "two"):
        text += f"<user>{said}{end}<assistant>"
        answer = "".join(talk.reply(said))
        settings = SAMPLING.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p"})
        assert answer == "".join(continue_prompt(model, tokenizer, text, seed=0, **settings))
        text += f"{answer}{end}"
        answers.add(answer)
    assert len(answers) == 3


def test_a_diffusion_model_is_refused_in_one_line() -> None:
    model = InfiniLlama(tiny_config(bidirectional=True, mask_token_id=0))
    with pytest.raises(UserError, match="chat needs a causal model"):
        Conversation(model, BYTES, "{role}{content}", SAMPLING)
