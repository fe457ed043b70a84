"""The harness's interface: the same requests and numbers as with its own model of transformers."""

import logging
import random

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer as Reference
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.evaluation.harness.adapter import harness_model, read_settings
from infini_model.evaluation.harness.answering import Answerer
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

CONTEXT = 48
WORDS = ["the", "memory", "of", "a", "segment", "is", "read", "by", "next", "ünïcödé", "漢字"]
START = "<|begin_of_text|>"


def text(chance, words):
    return " ".join(chance.choices(WORDS, k=words))


def make_tokenizer(*, begins):
    chance = random.Random(2)
    trained = train_tokenizer([[text(chance, 50) for _ in range(40)]], 340)
    reference = Reference.from_str(trained.text)
    if begins:
        reference.add_special_tokens([START])
        number = reference.token_to_id(START)
        reference.post_processor = TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, number)]
        )
    return BPETokenizer("trained", reference.to_str())


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "begins"])
def pair(request, tmp_path_factory):
    """The same Llama and tokenizer in the harness's own model and in ours."""
    logging.disable(logging.WARNING)
    tokenizer = make_tokenizer(begins=request.param)
    torch.manual_seed(5)
    shape = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    llama = LlamaForCausalLM(shape).eval()
    folder = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Reference.from_str(tokenizer.text), **tokenizer.special_tokens()
    )
    theirs = HFLM(pretrained=llama, tokenizer=fast, batch_size=3, max_length=CONTEXT)
    ours = InfiniLlama.from_pretrained(folder, segment_length=CONTEXT, memory="none")
    logging.disable(logging.NOTSET)
    return theirs, harness_model(Answerer(ours, tokenizer, batch_size=4))


def instances(kind, arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_likelihoods_are_those_of_the_harness(pair):
    theirs, ours = pair
    chance = random.Random(1)
    arguments = [(text(chance, n), " " + text(chance, m)) for n, m in [(3, 1), (20, 4), (60, 6)]]
    arguments += [("", text(chance, 5)), ("the memory ", "of a segment"), ("漢", "字 ünï")]
    requests = instances("loglikelihood", arguments)
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, True)
    for mine, reference in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=1e-4)
        assert mine[1] == reference[1]


def test_rolling_likelihoods_are_those_of_the_harness(pair):
    theirs, ours = pair
    chance = random.Random(4)
    texts = [text(chance, words) for words in (1, 7, 15, 40, 90)]
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", [(t,) for t in texts]))
    if theirs.tokenizer.bos_token is None:
        requests = instances("loglikelihood_rolling", [(t,) for t in texts])
        assert found == pytest.approx(theirs.loglikelihood_rolling(requests, True), abs=1e-3)
    # Of its own prefix and that of the tokenizer the harness predicts the second from the first;
    # as the answer to an empty question a text is scored without it.
    short = instances("loglikelihood", [("", t) for t in texts[:3]])
    expected = [each for each, _ in theirs.loglikelihood(short, True)]
    assert found[:3] == pytest.approx(expected, abs=1e-3)


def test_greedy_texts_are_those_of_the_harness(pair):
    theirs, ours = pair
    chance = random.Random(3)
    settings = {"until": ["the", "?"], "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", [(text(chance, n), settings) for n in (2, 9, 60)])
    # A batch of one, since the harness pads the others on the left.
    theirs.batch_size_per_gpu = 1
    found = ours.generate_until(requests)
    assert found == theirs.generate_until(requests, True)
    assert any(found)


def test_settings_are_read_under_all_their_names():
    given = {"until": "\n", "max_new_tokens": 5, "do_sample": True, "top_k": 0, "top_p": 0.5}
    assert read_settings(given) == (("\n",), 5, 1.0, None, 0.5)
    assert read_settings({"until": ["a", ""]}) == (("a",), 256, 0.0, None, None)
    assert read_settings({"do_sample": False, "temperature": 0.7}).temperature == 0.0
    with pytest.raises(UserError, match="generation_kwargs: num_beams is not supported"):
        read_settings({"num_beams": 4})
