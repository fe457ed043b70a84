"""A small real run, evaluated: dataset, checkpoint and metrics made by the project's own code."""

import json
import math
import re
import shutil
import struct

import pytest
import torch
from torch.nn import functional

from infini_model.config import Config, load_config
from infini_model.data.loading.loader import open_windows, validation_batches
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.evaluation.markdown import speed_section
from infini_model.evaluation.report import evaluate_run
from infini_model.evaluation.score import score
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, DataError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.checkpoints.background import HostCopy
from infini_model.training.checkpoints.checkpoint import (
    Position,
    newest_checkpoint,
    save_checkpoint,
)
from infini_model.training.parallel.distributed import World

WORLD = World(0, 1, torch.device("cpu"))
TEXT = "the memory of a segment is what the next one reads and `more` ```of``` it"
WORDS = TEXT.split(" ")


def document(number):
    generator = torch.Generator().manual_seed(number)
    picks = torch.randint(len(WORDS), (12 + number,), generator=generator)
    return " ".join(WORDS[i] for i in picks) + f" {number}.\n"


def settings(root, **overrides):
    dotted = {
        "data.source.paths": [str(root / "texts" / "*.txt")],
        "packing.context_length": 32,
        "model.segment_length": 8,
        "model.hidden_size": 16,
        "model.intermediate_size": 24,
        "model.vocab_size": 256,
        "launch.gpus": "cpu",
        "training.batch_size": 2,
        "training.max_steps": 40,
        "evaluation.batch_size": 3,
        "evaluation.prompt_tokens": 20,
        "evaluation.max_new_tokens": 15,
        "data.splits": {"train": 0.4, "validation": 0.3, "test": 0.3},
        "run.output_dir": str(root / "outputs"),
    } | overrides
    return load_config(overrides=[f"{key}={json.dumps(value)}" for key, value in dotted.items()])


def make_dataset(root, config):
    (root / "texts").mkdir(exist_ok=True)
    for number in range(30):
        (root / "texts" / f"{number}.txt").write_text(document(number))
    corpus = download(config.data, config.run.output_dir)
    return (
        config.run.datasets_dir
        / build_dataset(corpus, config.data, config.run.output_dir).folder_name
    )


def make_run(run_dir, config, steps=(20, 40)):
    torch.manual_seed(0)
    model = InfiniLlama(config.model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in steps:
        for parameter in model.parameters():  # each checkpoint is another model
            torch.nn.init.normal_(parameter, std=0.3)
        position = Position(step, 2 * step, 0, 1, "k" * 64, None, config.model_dump(mode="json"))
        save_checkpoint(run_dir, HostCopy(WORLD).take(model, optimizer), position, keep=2)
    metrics = MetricsFile(run_dir, None)
    for step in range(41):  # enough for a moving mean
        values = {
            "train/loss": 5.0 - step / 20,
            "train/learning_rate": 1e-3 * (1 - step / 80),
            "train/grad_norm": 2.0 / (step + 1),
            "train/tokens_per_second": 9000.0 + step,
            "train/step_seconds": 0.1,
            "train/data_wait_seconds": 0.002,
        }
        metrics.append(
            step, values | ({"validation/loss": 5.1 - step / 20} if step % 20 == 0 else {})
        )
    metrics.close()
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(root, config, dataset folder, run folder), not to be changed by a test."""
    root = tmp_path_factory.mktemp("evaluation")
    config = settings(root)
    dataset = make_dataset(root, config)
    run_dir = root / "outputs" / "runs" / "first"
    make_run(run_dir, config)
    return root, config, dataset, run_dir


@pytest.fixture(scope="module")
def result(made):
    _, config, dataset, run_dir = made
    seen = []
    result = evaluate_run(run_dir, dataset, config, progress=lambda *pair: seen.append(pair))
    total = seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    return result


def test_scores_are_the_models_own(made, result):
    _, config, dataset, run_dir = made
    model = InfiniLlama.from_pretrained(newest_checkpoint(run_dir) / "model")
    assert result.step == 40
    for split in ("validation", "test"):
        windows = open_windows(dataset, split, config.packing, 8)
        total, tokens, segments = 0.0, 0, torch.zeros(4)
        for batch in validation_batches(windows, 1):
            with torch.no_grad():
                logits = model(batch.input_ids).logits
            losses = functional.cross_entropy(logits[0], batch.labels[0], reduction="none")
            total, tokens = total + float(losses.sum()), tokens + len(losses)
            segments += losses.view(4, 8).sum(1)
        scored = result.scores[split]
        assert (scored.windows, scored.tokens) == (len(windows), tokens)
        assert scored.loss == pytest.approx(total / tokens, rel=1e-5)
        assert scored.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-5)
        means = (segments / len(windows) / 8).tolist()
        assert scored.loss_by_segment == pytest.approx(means, rel=1e-5)
    assert result.metrics["evaluation/test_loss"] == result.scores["test"].loss


def test_without_memory_only_the_first_segment_is_the_same(result):
    with_memory = result.scores["validation"].loss_by_segment
    emptied = result.without_memory.loss_by_segment
    assert emptied[0] == pytest.approx(with_memory[0], rel=1e-6)
    assert all(abs(a - b) > 1e-6 for a, b in zip(emptied[1:], with_memory[1:], strict=True))


def test_the_report_tells_it(made, result):
    _, _, _, run_dir = made
    text = result.report.read_text()
    assert f"{result.scores['test'].loss:.4f}" in text
    assert "40 of 40" in text
    assert "2,560" in text  # tokens read: 80 windows of 32
    assert "trained on another, key `kkkkkkkkkkkkkkkk`" in text
    assert f"infini run --config {run_dir}/config.yaml run.name=first-again" in text
    pictures = re.findall(r"\]\((plots/[a-z_]+\.png)\)", text)
    assert [run_dir / name for name in pictures] == result.plots
    assert {path.stem for path in result.plots} == {
        "loss",
        "learning_rate",
        "gradient_norm",
        "throughput",
        "loss_by_segment",
    }
    for path in result.plots:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:])) > 400


def test_the_sample_goes_on_where_the_prompt_ends(result):
    sample = result.sample
    assert sample.split == "test"
    assert len(sample.prompt) == sample.prompt_tokens == 20
    whole = {document(number) for number in range(30)}
    assert any(text.startswith(sample.prompt + sample.original) for text in whole)
    assert sample.prompt in result.report.read_text()


def test_waiting_for_data_is_told_and_what_to_do_about_it(result):
    report = result.report.read_text()
    assert "9,020 tokens a second; 2.00% of the steps' time was waiting for data." in report
    assert "over 1%: put the dataset folder on a disk of this machine" in report
    fast = {"train/step_seconds": 1.0, "train/data_wait_seconds": 0.009}
    told = speed_section([{"step": 1, "train/tokens_per_second": 5.0, **fast}])
    assert told == "5 tokens a second; 0.90% of the steps' time was waiting for data."
    assert speed_section([{"step": 1, "validation/loss": 5.0}]) == "No step was timed."


def test_the_result_is_json_and_the_same_again(made, result):
    _, config, dataset, run_dir = made
    tree = json.loads(json.dumps(result.model_dump(mode="json")))
    assert tree["report"] == str(run_dir / "report.md")
    assert tree["scores"]["test"]["perplexity"] == result.scores["test"].perplexity
    before = result.report.read_text()
    assert evaluate_run(run_dir, dataset, config) == result
    assert result.report.read_text() == before
    record = json.loads((run_dir / "evaluation.json").read_text())
    assert record["step"] == result.step
    assert record["dataset_key"] == result.dataset_key
    assert record["metrics"] == result.metrics


def test_limits_and_other_packings(made):
    root, _, dataset, run_dir = made
    for mode in ("document", "aligned"):
        config = settings(
            root, **{"packing.mode": mode, "packing.remainder": "pad", "evaluation.max_batches": 2}
        )
        result = evaluate_run(run_dir, dataset, config)
        assert result.scores["test"].windows == 6
        assert 0 < result.scores["test"].tokens <= 6 * 32
        assert "limits the scores" in result.report.read_text()


def test_empty_splits_are_stated(tmp_path):
    config = settings(tmp_path, **{"data.splits": {"train": 1.0, "validation": 0.0, "test": 0.0}})
    dataset = make_dataset(tmp_path, config)
    run_dir = tmp_path / "run"
    make_run(run_dir, config)
    result = evaluate_run(run_dir, dataset, config)
    assert result.scores["test"].loss is None
    assert result.sample is None
    assert result.metrics == {}
    text = result.report.read_text()
    assert "The test split has no whole window" in text
    assert "no held-out document" in text


def test_a_split_shorter_than_a_window(made):
    root, _, dataset, run_dir = made
    config = settings(root, **{"packing.context_length": 1 << 20})
    result = evaluate_run(run_dir, dataset, config)
    assert result.scores["validation"].windows == 0
    assert result.sample is not None


def test_without_memory_there_is_nothing_to_empty(made, tmp_path):
    root, _, dataset, _ = made
    config = settings(root, **{"model.memory": "none"})
    make_run(tmp_path / "run", config)
    result = evaluate_run(tmp_path / "run", dataset, config)
    assert result.without_memory is None
    assert "emptied" not in result.report.read_text()


def test_what_is_missing_is_named(made, tmp_path):
    root, config, dataset, run_dir = made
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: there are no metrics"):
        evaluate_run(tmp_path, dataset, config)
    shutil.copy(run_dir / "metrics.jsonl", tmp_path)
    with pytest.raises(CheckpointError, match="checkpoints: there is no checkpoint"):
        evaluate_run(tmp_path, dataset, config)
    with pytest.raises(DataError, match="does not exist"):
        evaluate_run(run_dir, tmp_path / "nothing", config)
    small = settings(root, **{"model.vocab_size": 90})
    make_run(tmp_path / "small", small)
    with pytest.raises(CheckpointError, match="has 90 entries in its vocabulary, the dataset"):
        evaluate_run(tmp_path / "small", dataset, small)


def test_a_broken_model_is_named(made, tmp_path):
    _, config, dataset, run_dir = made
    shutil.copy(run_dir / "metrics.jsonl", tmp_path)
    model = InfiniLlama(config.model)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    position = Position(5, 5, 0, 1, "k", None, {})
    snapshot = HostCopy(WORLD).take(model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(tmp_path, snapshot, position, keep=1)
    with pytest.raises(CheckpointError, match="step-5: its loss on validation is nan"):
        evaluate_run(tmp_path, dataset, config)
    assert not (tmp_path / "report.md").exists()


def test_masked_tokens_do_not_count():
    config = Config().model.model_copy(update={"vocab_size": 11, "segment_length": 4})
    model = InfiniLlama(config)
    ids = torch.randint(11, (2, 8))
    labels = ids.clone()
    labels[:, 4:] = -100
    from infini_model.data.loading.loader import Batch

    scored = score(model, [Batch(ids, labels, None)])
    assert (scored.windows, scored.tokens) == (2, 8)
    assert scored.loss_by_segment[1] is None
    assert scored.loss == pytest.approx(scored.loss_by_segment[0])
