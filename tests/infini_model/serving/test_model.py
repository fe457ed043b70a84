"""A model with its tokenizer: continuations, conversations whose cost does not grow, and losses."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from real import smollm2
from templates import of_messages
from tiny_engines import BYTES, SHAPE, model_that_writes_letters
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from infini_model import Conversation, Model
from infini_model.config import SampleConfig
from infini_model.data.sources.chat import ChatTemplate
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, prompt_ids
from infini_model.model.generate import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import UserError
from infini_model.serving.known_texts import KnownTexts
from infini_model.serving.requests import Request

BEGINS = ByteTokenizer()
BEGINS.bos_token_id = 0
GREEDY = SampleConfig(max_new_tokens=7, temperature=0.0)
PROMPTS = ["the stone", "under", "the river, which is longer than a segment"]


def continued(llama: InfiniLlama, ids: list[int], **options) -> str:
    (new,) = generate(llama, [ids], **{"max_new_tokens": 7, "temperature": 0} | options)
    return bytes(new).decode()


def test_texts_are_continued_alone_together_and_piece_by_piece() -> None:
    llama = model_that_writes_letters()
    model = Model(llama, BYTES, sampling=GREEDY)
    alone = [continued(llama, list(prompt.encode())) for prompt in PROMPTS]
    assert model.generate(PROMPTS) == alone
    assert [model.generate(prompt) for prompt in PROMPTS] == alone
    pieces = list(model.stream(PROMPTS[2]))
    assert len(pieces) == 7
    assert "".join(pieces) == alone[2]
    cut = model.generate(PROMPTS, stop=alone[0][3:5])
    assert cut == [text.partition(alone[0][3:5])[0] for text in alone]


def test_the_answers_of_a_call_are_drawn_each_by_itself() -> None:
    llama = model_that_writes_letters()
    model, ids = Model(llama, BYTES), [list(b"the stone")] * 4
    options = {"max_new_tokens": 20, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 3}
    drawn = model.generate(["the stone"] * 4, **options)
    assert [text.encode() for text in drawn] == [*map(bytes, generate(llama, ids, **options))]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("tokenizer", [BYTES, BEGINS], ids=["plain", "beginning of text"])
@pytest.mark.parametrize("end", ["</>", ""])
def test_an_answer_is_the_continuation_of_all_turns(tokenizer: ByteTokenizer, end: str) -> None:
    llama, form = model_that_writes_letters(), ChatTemplate(of_messages("<{role}>{content}" + end))
    model, text, answers = Model(llama, tokenizer, template=lambda: form, sampling=GREEDY), "", []
    talk, messages = Conversation(model), []
    for said in ("one", "a longer turn, of several segments" * 3, "two"):
        text += f"<user>{said}{end}<assistant>"
        messages.append({"role": "user", "content": said})
        answers.append("".join(talk.reply(said)))
        assert answers[-1] == continued(llama, prompt_ids(tokenizer, text))
        assert answers[-1] == model.chat(messages)
        text += f"{answers[-1]}{end}"
        messages.append({"role": "assistant", "content": answers[-1]})
    assert len(set(answers)) > 1


def test_a_token_of_an_answer_copies_no_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = model_that_writes_letters(segment_length=64)
    advance, held = llama.advance, set()

    def seen(ids, *arguments, **options):
        hidden, after = advance(ids, *arguments, **options)
        if ids.size(1) == 1:
            held.add(after.layers[0].keys.data_ptr())
        return hidden, after

    monkeypatch.setattr(llama, "advance", seen)
    assert Model(llama, BYTES, sampling=GREEDY).generate("hello")
    assert len(held) == 1


def test_the_loss_is_that_of_the_logits_at_any_length() -> None:
    llama = tiny_model(**SHAPE).eval()
    model, texts = Model(llama, BEGINS), ["a", "the stone", "river " * (PREFILL_TOKENS // 4)]
    expected = []
    for text in texts:
        ids = torch.tensor([[0, *text.encode()]])
        with torch.no_grad():
            logits = llama(ids).logits
        expected.append(float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])))
    assert model.loss(texts) == pytest.approx(expected, abs=1e-5)
    assert model.loss(texts[1]) == pytest.approx(expected[1], abs=1e-5)


def test_a_model_of_diffusion_continues_texts() -> None:
    shape = {"vocab_size": 257, "initializer_range": 0.4, "segment_length": 24}
    llama = tiny_model(**shape, bidirectional=True, mask_token_id=256, memory="none").eval()
    llama.lm_head.register_forward_hook(lambda _, __, out: out.index_fill(-1, NO_LETTERS, -1e9))
    model = Model(llama, BYTES, sampling=SampleConfig(max_new_tokens=7))
    assert len(model.generate("the stone")) == 7
    (alone,) = unmask(llama, list(b"the stone"), model.sampling, 5)
    assert model.generate("the stone", seed=5) == bytes(alone).decode()
    first, second = model.generate(["the stone", "the stone"], seed=5)
    assert first == bytes(alone).decode() != second
    whole = "".join(model.stream("the stone", seed=5))
    assert model.generate("the stone", seed=5, stop=whole[2:4]) == whole[:2]
    assert len(model.generate("the stone under", max_new_tokens=90)) == 24 - len("the stone under")
    with pytest.raises(UserError, match="loss: needs a causal model"):
        model.loss("a")
    with pytest.raises(UserError, match="answers need a causal model"):
        Conversation(model)


NO_LETTERS = torch.tensor([token for token in range(257) if token not in {*b"abcdefgh"}])


def test_what_cannot_be_done_is_refused_in_one_line(tmp_path: Path) -> None:
    model = Model(model_that_writes_letters(), BYTES)
    for settings, message in (
        ({"temperature": -1}, "temperature: got -1: "),
        ({"max_tokens": 3}, "max_tokens: unknown key"),
        ({"seed": -1}, "seed: got -1; takes a whole number"),
        ({"seed": 1.5}, "seed: got 1.5; takes a whole number"),
        ({"stop": [5]}, r"stop: got \[5\]; takes a string"),
    ):
        with pytest.raises(UserError, match=message):
            model.generate("a", **settings)
    with pytest.raises(UserError, match=r"^prompts\[1\]: is empty"):
        model.generate(["a", ""])
    with pytest.raises(UserError, match=r"^texts\[1\]: needs at least two tokens"):
        model.loss(["ab", "a"])
    for wrong in (5, None, b"abc", [b"abc"], [{"role": "user", "content": "a"}]):
        with pytest.raises(UserError, match=r"^prompt.*; takes a text$"):
            model.generate(wrong)
    for wrong in ([], "hello", ["hello"], {"role": "user"}):
        with pytest.raises(UserError, match=r"^messages: takes a list of"):
            model.chat(wrong)
    with pytest.raises(UserError, match="half of a character"):
        model.generate("\ud800")
    for source in ("no-such-run", tmp_path / "none", "../none", "/none"):
        with pytest.raises(UserError, match=f"^{source}: there is no such run or folder$"):
            Model.load(source)
    with pytest.raises(UserError, match=r"^device: got 'mps'; takes auto, cpu"):
        Model.load(tmp_path, device="mps")
    with pytest.raises(UserError, match=r"^launch.gpus=all: no GPU on this machine$"):
        Model.load(smollm2(), device="cuda")


def test_a_model_that_is_no_longer_used_is_freed_with_its_thread() -> None:
    gc.collect()
    before = threading.active_count()
    model = Model(model_that_writes_letters(), BYTES, sampling=GREEDY)
    model.generate("the stone")
    llama = weakref.ref(model.llama)
    assert threading.active_count() == before + 1
    del model
    gc.collect()
    assert threading.active_count() == before
    assert llama() is None


def test_a_turn_follows_the_last_answer_however_late_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = ChatTemplate(of_messages("<{role}>{content}"))
    model = Model(model_that_writes_letters(), BYTES, template=lambda: form, sampling=GREEDY)
    keep, submit = KnownTexts.keep, model.engine.submit
    requests, is_asked_again = list[Request](), threading.Event()

    def keep_late(self: KnownTexts, text, state, name=None, unread=()) -> None:
        if name is not None:
            is_asked_again.wait()
        keep(self, text, state, name, unread)

    def submit_and_continue(request: Request) -> None:
        requests.append(request)
        submit(request)
        if len(requests) == 2:
            is_asked_again.set()

    monkeypatch.setattr(KnownTexts, "keep", keep_late)
    monkeypatch.setattr(model.engine, "submit", submit_and_continue)
    talk = Conversation(model)
    assert "".join(talk.reply("one"))
    assert "".join(talk.reply("two"))
    first, second = requests
    assert second.session == first.name
    assert first.name is not None


def test_a_conversation_outlives_the_cache_and_a_reply_that_is_broken_off() -> None:
    llama, form = model_that_writes_letters(), ChatTemplate(of_messages("<{role}>{content}"))
    forgetful = Model(llama, BYTES, template=lambda: form, sampling=GREEDY, cache_gigabytes=0)
    talk, text = Conversation(forgetful), ""
    for said in ("one", "two", "three"):
        next(talk.reply("this is forgotten"))
        text += f"<user>{said}<assistant>"
        answer = "".join(talk.reply(said))
        assert answer == continued(llama, list(text.encode()))
        text += answer


def test_a_pretrained_llama_says_and_scores_what_it_does_in_transformers() -> None:
    folder = smollm2()
    model = Model.load(folder, device="cpu", precision="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    ids = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = ids["input_ids"]
    said = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.size(1) :]
    answer = model.chat(messages, max_new_tokens=20, temperature=0)
    assert answer == words.decode(said, skip_special_tokens=True)
    for text in ("The capital of France is Paris.", "Paris France the of is capital."):
        ids = words(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = float(theirs(ids, labels=ids).loss)
        assert model.loss(text) == pytest.approx(expected, abs=1e-4)
