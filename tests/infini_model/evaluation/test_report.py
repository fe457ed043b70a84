"""A small real run, evaluated, and the pages of its report.

Generated text is untrusted: it stays text in the report, in Markdown and as a page.
"""

import base64
import json
import math
import re
import shutil
from typing import get_args

import numpy as np
import pytest
import torch
from curves import curve
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from trained_run import Made, make_run

from infini_model.config.evaluation import EvaluationTaskName
from infini_model.data.loading.stream import open_split
from infini_model.data.loading.windows import open_windows
from infini_model.evaluation.context import CheckpointContext, EvalContext
from infini_model.evaluation.pages import fenced, table, to_html
from infini_model.evaluation.report import evaluate_run
from infini_model.evaluation.tasks import load_task
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, DataError, DeviceError, UserError
from infini_model.runtime.metrics_file import read_newest
from infini_model.runtime.runs import newest_checkpoint
from infini_model.serving.model import Model
from infini_model.training.launch import devices
from infini_model.training.launch.devices import Gpu
from infini_model.training.train import train

RECORDED = ("step", "dataset_key", "metrics", "intervals")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("evaluation"), steps=(20, 40))


@pytest.fixture(scope="module")
def result(made):
    result, seen = made.evaluated()
    total = seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    return result


def test_scores_are_the_models_own(made, result):
    model = InfiniLlama.from_pretrained(newest_checkpoint(made.run_dir) / "model")
    assert result.step == 40
    for split in ("validation", "test"):
        windows = open_windows(made.dataset, split, made.config().packing, 8)
        total, tokens, text = 0.0, 0, 0
        for number in range(len(windows)):
            (row,) = windows.gather(np.array([number])).tokens[0]
            with torch.no_grad():
                logits = model(row[None, :-1]).logits
            losses = functional.cross_entropy(logits[0], row[1:], reduction="none")
            total, tokens = total + float(losses.sum()), tokens + len(losses)
            text += int((row[1:] != 255).sum())
        score = made.context().score(split)
        assert (score.windows, score.tokens) == (len(windows), tokens)
        assert score.loss == pytest.approx(total / tokens, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)
        # Of the bytes that are tokens all but those at the end of a document stand for text.
        assert result.metrics[f"evaluation/{split}_bits_per_byte"] == score.bits_per_byte
        assert score.bits_per_byte == pytest.approx(total / math.log(2) / text, rel=1e-5)
        assert result.metrics[f"evaluation/{split}_loss"] == score.loss


def test_the_report_begins_with_what_was_found_and_shows_the_rest(made, result):
    text = result.report.read_text()
    drawn = {"loss", "learning_rate", "gradient_norm", "throughput", "loss_by_position"}
    assert {path.stem for path in result.plots} == drawn
    assert all(f"](plots/{name}.png)" in text for name in drawn)
    head = text.split("## Model and training")[0]
    loss, memory = result.metrics["evaluation/test_loss"], result.tasks["loss_by_position"]
    assert "trained for 40 steps, 2,560 tokens of `corpus`." in head
    assert f"On the test split the loss is **{loss:.4f} nats per token**" in head
    for sentence in (*memory.summary, *memory.advice):
        assert f"\n- {sentence}\n" in head
    assert "trained on a different one, key `kkkkkkkkkkkkkkkk`" in text
    assert f"infini run --config {made.run_dir}/config.yaml run.name=first-again" in text
    assert "over 1%: put the dataset folder on a local disk" in text


def test_the_result_is_json_and_reproducible(made, result):
    tree = json.loads(json.dumps(result.model_dump(mode="json")))
    assert tree["report"] == str(made.run_dir / "report.md")
    assert tree["tasks"]["loss"]["metrics"] == result.tasks["loss"].metrics
    before = result.report.read_text()
    assert made.evaluated()[0] == result
    assert result.report.read_text() == before
    record = json.loads((made.run_dir / "evaluation.json").read_text())
    intervals = {name: list(each) for name, each in result.intervals.items()}
    expected = (result.step, result.dataset_key, result.metrics, intervals)
    assert tuple(record[name] for name in RECORDED) == expected


def test_empty_splits_are_stated_and_without_a_step_there_are_no_curves(tmp_path):
    made = Made(tmp_path, **{"data.splits": {"train": 1.0, "validation": 0.0, "test": 0.0}})
    metrics = made.run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/loss"', '"another"'))
    result, _ = made.evaluated()
    assert result.metrics == {}
    text = result.report.read_text()
    assert "The test split is too small for one window" in text
    assert "a larger `data.splits.test` or" in text
    assert "no held-out document" in text
    assert "Curves" not in text


@pytest.mark.parametrize(
    ("task", "overrides", "named"),
    [
        ("passkey", {"evaluation.passkey.lengths": [9, 1]}, "evaluation.passkey.lengths: 1 x"),
        ("lm_eval", {}, "evaluation.lm_eval.tasks: names no task"),
    ],
)
def test_what_a_task_refuses_is_told_before_another_is_scored(
    made, monkeypatch, task, overrides, named
):
    monkeypatch.delattr(EvalContext, "score")
    with pytest.raises(UserError, match=named):
        made.evaluated(**{"evaluation.tasks": ["loss", task]} | overrides)


@pytest.mark.parametrize("name", get_args(EvaluationTaskName))
def test_a_task_that_can_be_named_has_a_title(name):
    assert load_task(name).title


def test_what_builds_kernels_is_missed_before_any_weights_are_read(made, tmp_path, monkeypatch):
    run_dir = shutil.copytree(made.run_dir, tmp_path / "run", symlinks=True)
    record = {"dataset": str(made.dataset), "dataset_key": "k"}
    (run_dir / "run.json").write_text(json.dumps(record))
    gpu = Gpu("0", 0, "NVIDIA H200", 1 << 37, 1 << 37, 0, "GPU-1", (9, 0))
    monkeypatch.setattr(devices, "list_gpus", lambda: [gpu])
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.delattr(InfiniLlama, "from_pretrained")
    config = made.config(**{"launch.gpus": "auto", "training.precision": "fp32"})
    for work in (
        lambda: evaluate_run(run_dir, made.dataset, config),
        lambda: Model.from_checkpoint(config, run_dir),
    ):
        with pytest.raises(DeviceError, match="the kernels of a GPU cannot be built: there is no"):
            work()


def test_missing_inputs_are_named(made, tmp_path):
    config, dataset = made.config(), made.dataset
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: no metrics found"):
        evaluate_run(tmp_path, dataset, config)
    shutil.copy(made.run_dir / "metrics.jsonl", tmp_path)
    with pytest.raises(CheckpointError, match="checkpoints: no checkpoint found"):
        evaluate_run(tmp_path, dataset, config)
    with pytest.raises(DataError, match="does not exist"):
        evaluate_run(made.run_dir, tmp_path / "nothing", config)
    small = made.config(**{"model.vocab_size": 90})
    make_run(tmp_path / "small", small)
    with pytest.raises(CheckpointError, match="vocabulary size is 90, the dataset"):
        evaluate_run(tmp_path / "small", dataset, small)
    make_run(tmp_path / "broken", config, steps=(5,), std=math.inf)
    with pytest.raises(CheckpointError, match="step-5: the validation loss is nan"):
        evaluate_run(tmp_path / "broken", dataset, config)
    assert not (tmp_path / "broken" / "report.md").exists()


def test_the_report_has_the_loss_that_the_training_logged(dataset, make_config, tmp_path):
    """The same windows in the same precision, at any batch size."""
    config = make_config(
        training={"precision": "bf16", "max_steps": 4, "batch_size": 5},
        evaluation={"max_windows": 7, "batch_size": 2, "tasks": ["loss"]},
    )
    train(config, dataset, tmp_path)
    logged = read_newest(tmp_path, "validation/loss", "test/loss")
    reported = evaluate_run(tmp_path, dataset, config)
    for split in ("validation", "test"):
        assert CheckpointContext(tmp_path, dataset, config).score(split).windows == 7
        assert reported.metrics[f"evaluation/{split}_loss"] == pytest.approx(
            logged[f"{split}/loss"], abs=2e-3
        )


@pytest.mark.parametrize(("objective", "segment"), [("causal", 16), ("masked_diffusion", 64)])
def test_the_report_scores_answers_and_answers_a_prompt(
    pairs, make_config, tmp_path, objective, segment
):
    run_dir = tmp_path / "run"
    config = make_config(
        model={"segment_length": segment},
        training={"objective": objective},
        packing={"mode": "document", "remainder": "pad", "context_length": 64},
    )
    train(config, pairs, run_dir)
    result = evaluate_run(run_dir, pairs, config)
    score = CheckpointContext(run_dir, pairs, config).score("validation")
    windows = open_windows(pairs, "validation", config.packing, 64)
    assert score.windows == len(windows)
    learnt = sum(windows.stream.learnt_of(n).sum() for n in range(windows.stream.documents))
    assert score.tokens == learnt
    logged = curve(run_dir, "validation/loss")[12]
    assert score.loss == pytest.approx(logged, abs=1e-6)
    assert "only the tokens that are learned" in (run_dir / "report.md").read_text()
    # Answers of the first segment have nothing to remember, those of later ones do.
    is_compared = "evaluation/validation_loss_without_memory" in result.metrics
    assert is_compared == (objective == "causal")
    sample = result.tasks["sample"].section
    ((number, split),) = re.findall(r"of document (\d+) of the (\w+) split", sample)
    blocks = [text for _, text in re.findall(r"(`{3,})text\n(.*?)\n\1(?!`)", sample, re.DOTALL)]
    document = open_split(pairs, split).document(int(number))[:-1].tobytes().decode()
    assert document == blocks[0] + blocks[-1]
    assert blocks[0].endswith(("?", "assistant:\n"))


ANY = st.text(st.sampled_from("`~\n\r\t\x00\x1b[0m#<é\u202e a"), max_size=40) | st.text()


@given(ANY)
def test_nothing_closes_the_block_and_no_control_character_is_in_it(text):
    block = fenced(text)
    fence, *body, last = block.split("\n")
    marks = fence.removesuffix("text")
    assert set(marks) == {"`"}
    assert last == marks
    assert not any(re.fullmatch(rf" *{marks}`* *", line) for line in body)
    assert all(c.isprintable() or c in "\n\t" for c in block)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></code></pre>"


@pytest.mark.parametrize("quote", [fenced, str, lambda text: table(("a", "b"), [(text, text)])])
def test_a_script_in_a_sample_stays_text(quote):
    page = to_html(quote(HOSTILE), HOSTILE, {})
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&lt;img") >= 2  # title and body
    assert not re.search(r"<script|<img|<title>.*<title>", page)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.split(";")[0] == "default-src 'none'"
    assert "script-src" not in policy


def test_pictures_are_in_the_page_and_others_are_not(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG picture")
    text = "![One <b>](plots/a.png)\n\n![Other](https://example.com/b.png)\n\n![x](plots/c.png)"
    page = to_html(text, "run", {"plots/a.png": picture})
    data = base64.b64encode(picture.read_bytes()).decode()
    assert re.findall(r"<img [^>]*>", page) == [
        f'<img alt="One &lt;b&gt;" src="data:image/png;base64,{data}">'
    ]
    assert "example.com" not in page
    assert all(f">{caption}<" in page for caption in ("One &lt;b&gt;", "Other", "x"))
