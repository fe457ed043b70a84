"""Requests of the lm-evaluation-harness: answered as its own model of transformers answers them."""

import logging
import random

import pytest
import torch
from llamas import write_llama
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from templates import with_bos
from tiny_models import draw_memory_parameters, tiny_config
from tokenizers import Tokenizer as Reference
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.harness.adapter import harness_model, read_settings
from infini_model.evaluation.harness.answering import Answerer, Question, Settings
from infini_model.model.generate import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

CONTEXT = 48
WORDS = ["the", "memory", "of", "a", "segment", "is", "read", "by", "next", "ünïcödé", "漢字"]


def text(chance, words):
    return " ".join(chance.choices(WORDS, k=words))


def make_tokenizer(*, begins):
    chance = random.Random(2)
    trained = train_tokenizer([[text(chance, 50) for _ in range(40)]], 340)
    return BPETokenizer("trained", with_bos(trained.text) if begins else trained.text)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "begins"])
def pair(request, tmp_path_factory):
    """The same Llama and tokenizer in the harness's own model and in ours."""
    logging.disable(logging.WARNING)
    tokenizer = make_tokenizer(begins=request.param)
    folder = write_llama(
        tmp_path_factory.mktemp("llama"),
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
    )
    llama = LlamaForCausalLM.from_pretrained(folder)
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


BYTES = ByteTokenizer()
EOS = BYTES.eos_token_id
SEGMENT = 4


def make_model(**overrides):
    torch.manual_seed(3)
    fields = {"vocab_size": 256, "segment_length": SEGMENT, "initializer_range": 0.3}
    model = InfiniLlama(tiny_config(**fields | overrides)).eval()
    draw_memory_parameters(model)
    return model


@pytest.fixture(scope="module", params=["linear", "residual"])
def model(request):
    return make_model(memory=request.param)


def make_answerer(model, batch_size=3, **options):
    return Answerer(model, BYTES, batch_size=batch_size, **options)


def test_the_likelihoods_are_those_of_a_plain_pass(model):
    """Contexts from one token to more than fit a chunk, and continuations of several lengths."""
    chance = random.Random(5)
    lengths = [(1, 1), (3, 5), (4, 4), (9, 1), (30, 12), (2 * PREFILL_TOKENS, 6), (17, 40)]
    pairs = [tuple(chance.choices(range(200), k=k) for k in pair) for pair in lengths]
    answers = make_answerer(model).score(pairs)
    for (context, continuation), answer in zip(pairs, answers, strict=True):
        ids = torch.tensor(context + continuation)
        with torch.no_grad():
            rows = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        each = rows.gather(1, ids[1:, None])[-len(continuation) :]
        assert answer.log_probability == pytest.approx(float(each.sum()), abs=1e-4)
        assert not answer.is_greedy


def test_greedy_is_what_the_model_itself_would_write(model):
    context = [5, 6, 7, 8, 9, 10]
    (likeliest,) = generate(model, [context], max_new_tokens=11, temperature=0.0)
    changed = [*likeliest[:5], (likeliest[5] + 1) % 256, *likeliest[6:]]
    ends_otherwise = [*likeliest[:-1], (likeliest[-1] + 1) % 256]
    pairs = [(context, ids) for ids in (likeliest, changed, ends_otherwise, [])]
    greedy = [answer.is_greedy for answer in make_answerer(model).score(pairs)]
    assert greedy == [True, False, False, True]


def test_a_long_text_takes_no_more_memory_than_a_short_one():
    """The state is constant, and no more tokens pass at once than fit a chunk."""
    model, seen = make_model(), []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    make_answerer(model).score([([], [1] * 3 * PREFILL_TOKENS)])
    assert sum(seen) == 3 * PREFILL_TOKENS
    assert max(seen) == PREFILL_TOKENS


def greedy(**changes):
    fields = {"until": (), "max_gen_toks": 12, "temperature": 0.0, "top_k": None, "top_p": None}
    return Settings(**fields | changes)


PROMPTS = [[1, 2, 3], [9], list(range(40, 60)), [7, 7]]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_end_before_the_first_stop_string(batch_size):
    model = make_model()
    with torch.no_grad():  # it mostly writes ASCII, so that its text has stop strings to find
        model.lm_head.weight[127:] = 0.0
        model.lm_head.weight[:32] = 0.0
        model.lm_head.weight.mul_(4.0)
    questions, expected = [], []
    for number, prompt in enumerate(PROMPTS):
        (ids,) = generate(model, [prompt], max_new_tokens=12, temperature=0.0, eos_token_id=EOS)
        whole = BYTES.decode(ids)
        stop = whole[3:6]  # three tokens
        tokens = 12 - number
        questions.append(Question(prompt, greedy(until=("never", stop), max_gen_toks=tokens)))
        expected.append(whole[:tokens].partition(stop)[0])
    assert make_answerer(model, batch_size).continue_texts(questions) == expected
    assert any(expected)


def test_an_end_of_text_ends_a_text():
    model = make_model()
    (ids,) = generate(model, [PROMPTS[0]], max_new_tokens=3, temperature=0.0)
    assert ids[2] not in ids[:2]
    with torch.no_grad():  # the model now says end of text where it said this token
        model.lm_head.weight[[ids[2], EOS]] = model.lm_head.weight[[EOS, ids[2]]]
    questions = [Question(PROMPTS[0], greedy())]
    assert make_answerer(model).continue_texts(questions) == [BYTES.decode(ids[:2])]


def test_sampling_is_the_same_in_any_batch_and_differs_by_seed_and_question(model):
    settings = greedy(temperature=1.0, max_gen_toks=20)
    questions = [Question(prompt, settings) for prompt in [*PROMPTS, PROMPTS[0], PROMPTS[0]]]
    one, many = (make_answerer(model, n, seed=7).continue_texts(questions) for n in (1, 4))
    assert one == many
    assert len({one[0], one[4], one[5]}) == 3
    assert make_answerer(model, 4, seed=8).continue_texts(questions) != many


def test_without_memory_an_answer_must_fit_the_segment():
    model = make_model(memory="none", segment_length=32)
    with pytest.raises(UserError, match="max_gen_toks: got 32; the model has no memory"):
        make_answerer(model).continue_texts([Question([1, 2], greedy(max_gen_toks=32))])
