"""The lm-evaluation-harness: requests answered as its own model of transformers answers them.

And tasks of local files, run on a small trained run.
"""

import json
import logging
import random
import re
import socket
import sys
from collections import Counter
from pathlib import Path

import lm_eval
import numpy as np
import pytest
import torch
import yaml
from llamas import write_llama
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from real import smollm2
from templates import with_bos
from tiny_models import draw_memory_parameters, tiny_config
from tokenizers import Tokenizer as Reference
from trained_run import Made
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from infini_model.config import SampleConfig, validate
from infini_model.config.evaluation import LmEvalConfig
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.evaluation.harness import HarnessModel, read_settings
from infini_model.evaluation.tasks import load_task
from infini_model.evaluation.tasks.lm_eval import load_tasks
from infini_model.model.generate import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import ConfigError, DataError, UserError

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
    return theirs, HarnessModel(ours, tokenizer, batch_size=4)


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
    sampled = SampleConfig(max_new_tokens=5, temperature=1.0, top_k=None, top_p=0.5)
    assert read_settings(given) == (("\n",), sampled)
    greedy = SampleConfig(max_new_tokens=256, temperature=0.0, top_k=None)
    assert read_settings({"until": ["a", ""]}) == (("a",), greedy)
    assert read_settings({"do_sample": False, "temperature": 0.7}) == ((), greedy)
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


def harnessed(model, batch_size=3, **options):
    return HarnessModel(model, BYTES, batch_size=batch_size, **options)


def test_the_likelihoods_are_those_of_a_plain_pass(model):
    """Contexts from one token to more than fit a chunk, and continuations of several lengths."""
    chance = random.Random(5)
    lengths = [(1, 1), (3, 5), (4, 4), (9, 1), (30, 12), (2 * PREFILL_TOKENS, 6), (17, 40)]
    pairs = [tuple(chance.choices(range(200), k=k) for k in pair) for pair in lengths]
    answers = harnessed(model).score(pairs)
    for (context, continuation), answer in zip(pairs, answers, strict=True):
        ids = torch.tensor(context + continuation)
        with torch.no_grad():
            rows = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        each = rows.gather(1, ids[1:, None])[-len(continuation) :]
        assert answer == (pytest.approx(float(each.sum()), abs=1e-4), False)


def test_greedy_is_what_the_model_itself_would_write(model):
    context = [5, 6, 7, 8, 9, 10]
    (likeliest,) = generate(model, [context], max_new_tokens=11, temperature=0.0)
    changed = [*likeliest[:5], (likeliest[5] + 1) % 256, *likeliest[6:]]
    ends_otherwise = [*likeliest[:-1], (likeliest[-1] + 1) % 256]
    pairs = [(context, ids) for ids in (likeliest, changed, ends_otherwise, [])]
    greedy = [is_greedy for _, is_greedy in harnessed(model).score(pairs)]
    assert greedy == [True, False, False, True]


def test_a_long_text_takes_no_more_memory_than_a_short_one():
    """The state is constant, and no more tokens pass at once than fit a chunk."""
    model, seen = make_model(), []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    harnessed(model).score([([], [1] * 3 * PREFILL_TOKENS)])
    assert sum(seen) == 3 * PREFILL_TOKENS
    assert max(seen) == PREFILL_TOKENS


PROMPTS = ["abc", "é", "the memory of a segment", "\x07\x07"]


def continued(model, prompts, batch_size=3, seed=0, **settings):
    """The texts after `prompts`; `settings` are lists of a value for each, or one for all."""
    requests = [
        (text, {k: v[n] if isinstance(v, list) else v for k, v in settings.items()})
        for n, text in enumerate(prompts)
    ]
    return harnessed(model, batch_size, seed=seed).generate_until(
        instances("generate_until", requests)
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_texts_end_before_the_first_stop_string(batch_size):
    model = make_model()
    with torch.no_grad():  # it mostly writes ASCII, so that its text has stop strings to find
        model.lm_head.weight[127:] = 0.0
        model.lm_head.weight[:32] = 0.0
        model.lm_head.weight.mul_(4.0)
    stops, expected, most = [], [], [12 - number for number in range(len(PROMPTS))]
    for prompt, tokens in zip(PROMPTS, most, strict=True):
        (ids,) = generate(
            model, [list(prompt.encode())], max_new_tokens=12, temperature=0.0, eos_token_id=EOS
        )
        whole = BYTES.decode(ids)
        stops.append(("never", whole[3:6]))  # three tokens
        expected.append(whole[:tokens].partition(whole[3:6])[0])
    until = [list(each) for each in stops]
    assert continued(model, PROMPTS, batch_size, until=until, max_gen_toks=most) == expected
    assert any(expected)


def test_an_end_of_text_ends_a_text():
    model = make_model()
    (ids,) = generate(model, [list(b"abc")], max_new_tokens=3, temperature=0.0)
    assert ids[2] not in ids[:2]
    with torch.no_grad():  # the model now says end of text where it said this token
        model.lm_head.weight[[ids[2], EOS]] = model.lm_head.weight[[EOS, ids[2]]]
    assert continued(model, ["abc"], max_gen_toks=12) == [BYTES.decode(ids[:2])]


def test_sampling_is_the_same_in_any_batch_and_differs_by_seed_and_request(model):
    prompts, sampled = [*PROMPTS, "abc", "abc"], {"temperature": 1.0, "max_gen_toks": 20}
    one, many = (continued(model, prompts, size, 7, **sampled) for size in (1, 4))
    assert one == many
    assert len({one[0], one[4], one[5]}) == 3
    assert continued(model, prompts, 4, 8, **sampled) != many


def test_without_memory_an_answer_must_fit_the_segment():
    model = make_model(memory="none", segment_length=32)
    with pytest.raises(UserError, match="max_gen_toks: got 32; the model has no memory"):
        continued(model, ["ab"], max_gen_toks=32)


DOCUMENTS = [
    {
        "question": f"the memory of {number} is",
        "options": [" read", " a segment", " what the next one reads"],
        "answer": number % 3,
    }
    for number in range(7)
]
SCORES = {"aggregation": "mean", "higher_is_better": True}
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", **SCORES}, {"metric": "acc_norm", **SCORES}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{question * 4}}",
    "metric_list": [{"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
}
ANSWER = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{options[answer]}}",
    "metric_list": [{"metric": "perplexity"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{options[answer]}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match", **SCORES}],
}


def write_task(folder, name, fields, documents=DOCUMENTS):
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | fields))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and a folder of tasks in `made.root / "harness"`."""
    root = tmp_path_factory.mktemp("evaluation")
    for name, fields in {"choice": CHOICE, "rolling": ROLLING, "writing": WRITING}.items():
        write_task(root / "harness", name, fields)
    group = {"group": "every", "task": ["choice", "writing"]}
    metrics = [{"metric": "acc", "weight_by_size": True}]
    (root / "harness" / "every.yaml").write_text(
        yaml.safe_dump(group | {"aggregate_metric_list": metrics})
    )
    return Made(root)


@pytest.fixture(autouse=True, scope="module")
def _without_network(tmp_path_factory):
    def refuse(*_, **__):
        raise AssertionError("the network is used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


def evaluated(made, *tasks, seed=0, **changes):
    """The result, and the progress that was reported."""
    changes = {"tasks": tasks, "include_path": str(made.root / "harness")} | changes
    names = {f"evaluation.lm_eval.{key}": value for key, value in changes.items()}
    return made.evaluated(**{"evaluation.tasks": ["lm_eval"], "run.seed": seed} | names)


def test_the_report_has_the_metrics_and_errors_of_the_harness(made):
    result, seen = evaluated(made, "choice", "rolling", "writing")
    assert seen[-1] == (21, 21)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    found = result.tasks["lm_eval"].metrics
    share, report = found["evaluation/choice_acc"], result.report.read_text()
    # The harness's error of a mean is that of a sample.
    error = found["evaluation/choice_acc_stderr"]
    assert error == pytest.approx((share * (1 - share) / 6) ** 0.5)
    assert re.search(rf"\| *acc *\|↑ +\|{share:.4f} *\|± +\| *{error:.4f}\|", report)
    assert f"| `choice_acc` | {share:.4f} |" in report
    # It knows none of a perplexity of bytes.
    named = ("rolling_byte_perplexity", "rolling_bits_per_byte", "writing_exact_match")
    assert {f"evaluation/{each}" for each in named} < set(found)
    assert "evaluation/rolling_byte_perplexity_stderr" not in found


def test_a_group_reports_itself_and_its_tasks(made):
    result, _ = evaluated(made, "every")
    assert result.metrics["evaluation/every_acc"] == result.metrics["evaluation/choice_acc"]
    assert "evaluation/writing_exact_match" in result.metrics
    assert "Documents scored: 7 of 7 (choice), 7 of 7 (writing)." in result.report.read_text()


def test_examples_limits_and_seeds_change_what_is_asked(made):
    folder = made.root / "harness"
    write_task(folder, "shots", ANSWER | {"fewshot_split": "test", "num_fewshot": 1})
    write_task(folder, "none", CHOICE | {"fewshot_split": "test", "num_fewshot": 0})
    results = []
    for seed in (0, 0, 1):
        result, seen = evaluated(made, "shots", "none", num_fewshot=2, limit=4, seed=seed)
        results.append(result.metrics)
    section = result.tasks["lm_eval"].section
    assert re.findall(r"^\|(shots|none) *\|[^|]*\|[^|]*\| *(\d)\|", section, re.MULTILINE) == [
        ("shots", "2"),
        ("none", "0"),
    ]
    assert "4 of 7 (shots)" in section
    assert seen[-1] == (8, 8)
    assert results[0] == results[1]
    name = "evaluation/shots_perplexity"
    assert results[2][name] != results[0][name]


def test_mistakes_are_one_line(made, monkeypatch):
    folder = made.root / "harness"

    def fails(error, message, *tasks, **changes):
        with pytest.raises(error, match=message) as caught:
            evaluated(made, *tasks, **changes)
        assert "\n" not in str(caught.value)

    fails(UserError, r"evaluation\.lm_eval\.tasks: names no task")
    nowhere = str(made.root / "nowhere")
    fails(UserError, r"lm_eval\.include_path: .* is not a folder", "choice", include_path=nowhere)
    for name, changes, message in (
        ("unsafe", {"unsafe_code": True}, "unsafe runs code"),
        ("misspelt", {"doc_to_text": "{{qestion}}"}, "misspelt: 'qestion' is undefined"),
        ("unknown", {"colour": "red"}, "unknown: .*unexpected keyword argument 'colour'"),
    ):
        write_task(folder, name, CHOICE | changes)
        fails(UserError, message, name)
    write_task(folder, "gone", CHOICE)
    (folder / "gone.jsonl").unlink()
    fails(DataError, r"evaluation\.lm_eval\.tasks: gone: ", "gone")
    for name in [each for each in sys.modules if "lm_eval" in each]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(UserError, "lm_eval needs a package: pip install 'infini-model", "choice")


HARNESS = Path(lm_eval.__file__).parent / "tasks"


def test_ruler_measures_its_texts_with_the_tokenizer_of_the_run(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)  # it asks for texts of nltk
    tokenizer = load_tokenizer(str(smollm2()))
    name, lengths = "niah_multikey_2", [1024, 2048]
    settings = LmEvalConfig(tasks=[name], include_path=HARNESS / "ruler", lengths=lengths)
    (task,) = load_tasks(settings, tokenizer)[name]["tasks"].values()
    documents = task.eval_docs
    assert Counter(documents["max_length"]) == {1024: 500, 2048: 500}
    sizes = np.diff(tokenizer.encode_batch(documents["input"]).offsets)
    shares = sizes / np.array(documents["max_length"])
    assert shares.max() <= 1
    assert shares.min() > 0.5
    with pytest.raises(UserError, match=r"tasks: niah_multikey_2: No tokenizer") as caught:
        load_tasks(settings, BYTES)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"lm_eval\.lengths\.0: "):
        validate({"evaluation": {"lm_eval": {"lengths": [512]}}})


@pytest.mark.parametrize(("lengths", "taken"), [(None, "0k"), ([1024, 6000], "4k")])
def test_babilong_is_read_from_a_folder_of_its_name(tmp_path, monkeypatch, lengths, taken):
    """As on a machine without the hub; its lengths are powers of two."""
    folder = tmp_path / "RMT-team" / "babilong-1k-samples"
    folder.mkdir(parents=True)
    configs = []
    for length in ("0k", "4k"):
        rows = [{"input": f"{length} of text", "question": "where?", "target": "here"}] * 3
        (folder / f"{length}.json").write_text(json.dumps(rows))
        files = [{"split": "qa1", "path": f"{length}.json"}]
        configs.append({"config_name": length, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    monkeypatch.chdir(tmp_path)
    name = "babilong_qa1"
    settings = LmEvalConfig(tasks=[name], include_path=HARNESS / "babilong", lengths=lengths)
    (task,) = load_tasks(settings, BYTES)[name]["tasks"].values()
    assert [row["input"] for row in task.eval_docs] == [f"{taken} of text"] * 3


def test_a_diffusion_model_is_refused(made):
    changes = {"training.objective": "masked_diffusion", "model.memory": "none"}
    context = made.context()
    context.config = made.config(**changes, **{"model.segment_length": 32})
    with pytest.raises(UserError, match=r"needs a model of training\.objective=causal"):
        load_task("lm_eval").check(context)
