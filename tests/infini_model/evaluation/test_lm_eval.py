"""Tasks of the lm-evaluation-harness, made from local files, run on a small trained run."""

import json
import re
import shutil
import socket
import sys

import pytest
import yaml
from trained_run import make_dataset, make_run, settings

from infini_model.evaluation.reporting.report import evaluate_run
from infini_model.evaluation.statistics import wilson
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import load_task
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import DataError, UserError

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
    """(root, dataset folder, run folder), and a folder of tasks in `root / "harness"`."""
    root = tmp_path_factory.mktemp("evaluation")
    dataset = make_dataset(root, settings(root))
    make_run(root / "run", settings(root))
    write_task(root / "harness", "choice", CHOICE)
    write_task(root / "harness", "rolling", ROLLING)
    write_task(root / "harness", "writing", WRITING)
    group = {"group": "every", "task": ["choice", "writing"]}
    metrics = [{"metric": "acc", "weight_by_size": True}]
    (root / "harness" / "every.yaml").write_text(
        yaml.safe_dump(group | {"aggregate_metric_list": metrics})
    )
    return root, dataset, root / "run"


@pytest.fixture(autouse=True, scope="module")
def _without_network(tmp_path_factory):
    def refuse(*_):
        raise AssertionError("the network is used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        yield


def configured(made, *tasks, seed=0, **changes):
    root, _, _ = made
    changes = {"tasks": tasks, "include_path": str(root / "harness")} | changes
    names = {f"evaluation.lm_eval.{key}": value for key, value in changes.items()}
    return settings(root, **{"evaluation.tasks": ["lm_eval"], "run.seed": seed} | names)


def evaluated(made, *tasks, **changes):
    """The result, and the progress that was reported."""
    _, dataset, run_dir = made
    config, seen = configured(made, *tasks, **changes), []
    result = evaluate_run(run_dir, dataset, config, progress=lambda *pair: seen.append(pair))
    return result, seen


def test_every_figure_has_its_interval_in_the_report(made):
    result, seen = evaluated(made, "choice", "rolling", "writing")
    assert seen[-1] == (21, 21)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    found = result.tasks["lm_eval"]
    assert set(found.intervals) == set(found.metrics)
    for name, (low, high) in found.intervals.items():
        assert low <= found.metrics[name] <= high
        assert low < high
    share = found.metrics["evaluation/choice_acc"]
    assert (share, *found.intervals["evaluation/choice_acc"]) == wilson(round(7 * share), 7)
    report = result.report.read_text()
    rows = re.findall(r"^\| (choice|rolling|writing) \| (\w+) \|", report, re.MULTILINE)
    assert {f"evaluation/{task}_{metric}" for task, metric in rows} == set(found.metrics)
    assert len(found.summary) == 3


def test_a_group_reports_itself_and_its_tasks(made):
    result, _ = evaluated(made, "every")
    assert result.metrics["evaluation/every_acc"] == result.metrics["evaluation/choice_acc"]
    assert "evaluation/writing_exact_match" in result.metrics
    (sentence,) = result.tasks["lm_eval"].summary
    assert sentence.startswith("`every` of the lm-evaluation-harness: acc is")


def test_examples_limits_and_seeds_change_what_is_asked(made):
    root, *_ = made
    write_task(root / "harness", "shots", ANSWER | {"fewshot_split": "test", "num_fewshot": 1})
    write_task(root / "harness", "none", CHOICE | {"fewshot_split": "test", "num_fewshot": 0})
    results = []
    for seed in (0, 0, 1):
        shutil.rmtree(made[2] / "evaluation", ignore_errors=True)  # what is kept
        result, seen = evaluated(made, "shots", "none", num_fewshot=2, limit=4, seed=seed)
        results.append(result.metrics)
    rows = result.tasks["lm_eval"].details["measured"]
    assert {(row["task"], row["shots"]) for row in rows} == {("shots", 2), ("none", 0)}
    assert {row["documents"] for row in rows} == {4}
    assert seen[-1] == (8, 8)
    assert results[0] == results[1]
    name = "evaluation/shots_perplexity"
    assert results[2][name] != results[0][name]


def test_an_interrupted_evaluation_goes_on_with_the_next_task(made, monkeypatch):
    root, *_ = made
    for name in ("first", "second"):
        write_task(root / "harness", name, CHOICE)
    calls, stop_after = [], 7  # 21 requests in batches of 3
    forward = InfiniLlama.extend

    def extend(self, *arguments):
        calls.append(1)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(InfiniLlama, "extend", extend)
    with pytest.raises(KeyboardInterrupt):
        evaluated(made, "first", "second")
    calls.clear()
    result, seen = evaluated(made, "first", "second")
    assert (len(calls), seen[-1]) == (7, (14, 14))
    assert result.metrics["evaluation/first_acc"] == result.metrics["evaluation/second_acc"]
    # Other documents under the same name are measured anew.
    write_task(root / "harness", "first", CHOICE, DOCUMENTS[:3])
    calls.clear()
    evaluated(made, "first", "second")
    assert len(calls) == 3


def test_mistakes_are_one_line(made, monkeypatch):
    root, *_ = made
    folder = root / "harness"

    def fails(error, message, *tasks, **changes):
        with pytest.raises(error, match=message) as caught:
            evaluated(made, *tasks, **changes)
        assert "\n" not in str(caught.value)

    fails(UserError, r"evaluation\.lm_eval\.tasks: names no task")
    nowhere = str(root / "nowhere")
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
    for name in [each for each in sys.modules if each.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    fails(UserError, "lm_eval needs a package: pip install lm-eval", "choice")


def test_a_diffusion_model_is_refused(made, tmp_path):
    changes = {"training.objective": "masked_diffusion", "model.memory": "none"}
    changes["model.segment_length"] = 32
    subject = Subject(made[2], made[1], configured(made, "choice"))
    subject.config = settings(tmp_path, **changes)
    with pytest.raises(UserError, match=r"needs a model of training\.objective=causal"):
        load_task("lm_eval").run(subject)
