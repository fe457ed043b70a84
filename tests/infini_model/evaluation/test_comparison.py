"""Runs side by side: real runs of a few steps, on one dataset and on another."""

import base64
import json
import re
import shutil

import pytest
from commands import write_texts

from infini_model.config import validate
from infini_model.data.manifest import read_manifest
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.evaluation.comparison.compare import compare
from infini_model.evaluation.comparison.writing import comparison_name, write_comparison
from infini_model.evaluation.reporting.report import evaluate_run
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.loop import train

LOSS = "evaluation/validation_loss"


def begin(root, dataset, name, *, evaluated=True, seed=0, **sections):
    """Train a run of a few steps, and evaluate it; returns its folder."""
    tree = {
        "run": {"output_dir": str(root), "name": name, "seed": seed},
        "packing": {"context_length": 64},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "segment_length": 16,
        },
        "training": {"max_steps": 3, "batch_size": 2, "warmup_steps": 1},
        "launch": {"gpus": "cpu"},
        "logging": {"logging_steps": 1, "eval_steps": 2},
        "evaluation": {"max_windows": 4, "tasks": ["loss", "loss_by_position"]},
        "tracking": {"mlflow": False, "tensorboard": False},
    }
    config = validate({key: section | sections.get(key, {}) for key, section in tree.items()})
    with claim_run(config, read_manifest(dataset).key, dataset) as run_dir:
        train(config, dataset, run_dir)
        if evaluated:
            evaluate_run(run_dir, dataset, config)
    return run_dir


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("compared")


@pytest.fixture(scope="module")
def seeds(root, dataset):
    """Linear memory and none, two seeds of each."""
    return [
        begin(root, dataset, f"{memory}-{seed}", seed=seed, model={"memory": memory})
        for memory in ("linear", "none")
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def elsewhere(root):
    """A run with the settings of the others on another dataset."""
    texts = write_texts(root / "texts", 40, seed=5)
    source = {"paths": [str(texts / "*.txt")]}
    splits = {"train": 0.6, "validation": 0.2, "test": 0.2}
    config = validate({"data": {"source": source, "splits": splits, "workers": 1}})
    made = build_dataset(download(config.data, root), config.data, root)
    return begin(root, root / "datasets" / made.folder_name, "elsewhere")


def recorded(run_dir):
    return json.loads((run_dir / "evaluation.json").read_text())["metrics"]


def copied(run_dir, to):
    """A copy of a run that a test may change."""
    return shutil.copytree(run_dir, to / run_dir.name, ignore=shutil.ignore_patterns(".lock"))


def test_seeds_of_the_same_settings_are_one_group_and_are_compared_in_pairs(seeds):
    comparison = compare(seeds)
    assert [group.label for group in comparison.groups] == ["memory=linear", "memory=none"]
    assert comparison.differing == {
        "run.seed": ["0", "1", "0", "1"],
        "model.memory": ["linear", "linear", "none", "none"],
    }
    losses = [recorded(run_dir)[LOSS] for run_dir in seeds]
    linear = comparison.groups[0].spread(LOSS)
    assert linear == pytest.approx((sum(losses[:2]) / 2, min(losses[:2]), max(losses[:2])))
    (difference,) = comparison.differences
    assert difference.by_seed == pytest.approx({0: losses[2] - losses[0], 1: losses[3] - losses[1]})
    assert comparison.notes == []


def test_results_are_those_of_the_evaluation_and_of_the_training(seeds):
    run = compare(seeds[:2]).runs[0]
    assert recorded(seeds[0]).items() <= run.results.items()
    assert run.results["steps"] == 3
    assert run.results["tokens"] == 3 * 2 * 64
    last = [line for line in read_metrics(seeds[0]) if "validation/loss" in line][-1]
    assert run.results["validation/loss"] == last["validation/loss"]
    assert run.results["tokens per second"] > 0


def test_the_page_needs_no_other_file_and_says_what_the_markdown_says(seeds, tmp_path):
    files = write_comparison(compare(seeds), tmp_path)
    text, page = files.markdown.read_text(), files.html.read_text()
    assert f"]({files.curves.name})" in text
    sources = re.findall(r'src="([^"]*)"', page)
    picture = base64.b64encode(files.curves.read_bytes()).decode()
    assert sources == [f"data:image/png;base64,{picture}"]
    for metric, value in recorded(seeds[3]).items():
        assert metric in text
        assert metric in page
        assert f"{value:,.4f}" in page
    assert {path.name for path in files.html.parent.iterdir()} == {
        *("comparison.md", "comparison.html", "loss.png")
    }


def test_of_another_dataset_settings_and_curves_are_shown_and_no_difference(seeds, elsewhere):
    comparison = compare([seeds[2], elsewhere])
    assert comparison.differing == {"model.memory": ["none", "linear"]}
    assert [len(run.lines) > 0 for run in comparison.runs] == [True, True]
    assert comparison.differences == []
    (note,) = comparison.notes
    assert re.fullmatch(r"elsewhere: its dataset is \w+, that of none-0 \w+: not compared", note)


@pytest.mark.parametrize(
    ("name", "sections", "reason"),
    [
        (
            "longer",
            {"training": {"max_steps": 4, "batch_size": 2, "warmup_steps": 1}},
            "its number of training tokens is 512, that of linear-0 384: not compared",
        ),
        (
            "wider",
            {"packing": {"context_length": 32}, "training": {"max_steps": 3, "batch_size": 4}},
            "its context length is 32, that of linear-0 64: not compared",
        ),
        (
            "scored",
            {"evaluation": {"max_windows": 2, "tasks": ["loss"]}},
            "its number of scored windows is 2, that of linear-0 4: not compared",
        ),
        (
            "seeded",
            {"run": {"seed": 7}, "model": {"memory": "none"}},
            "no evaluated run with the settings of linear-0 has its seed, 7: not compared",
        ),
    ],
)
def test_why_a_loss_is_not_compared(root, dataset, seeds, name, sections, reason):
    seed = sections.pop("run", {}).get("seed", 0)
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = model | {"intermediate_size": 24, "segment_length": 16}
    other = begin(
        root, dataset, name, seed=seed, **sections | {"model": shape | sections.get("model", {})}
    )
    comparison = compare([*seeds, other])
    assert comparison.notes == [f"{name}: {reason}"]
    assert len(comparison.differences) == 1
    assert len(comparison.runs) == 5


def test_a_run_that_is_not_evaluated_or_cannot_be_read_does_not_hide_the_others(
    root, dataset, seeds, tmp_path
):
    bare = begin(root, dataset, "bare", evaluated=False, model={"memory": "delta"})
    damaged = copied(seeds[3], tmp_path)
    (damaged / "evaluation.json").write_text("{")
    comparison = compare([bare, *seeds[:3], damaged, tmp_path])
    assert [run.name for run in comparison.runs] == ["bare", "linear-0", "linear-1", "none-0"]
    cannot_be_read = [note for note in comparison.notes if "cannot be read" in note]
    assert [note.partition(":")[0] for note in cannot_be_read] == ["none-1", tmp_path.name]
    assert "bare: interrupted at step 3 of 3, not evaluated yet" in comparison.notes
    assert not any("\n" in note for note in comparison.notes)
    (difference,) = comparison.differences
    assert difference.by_seed.keys() == {0}
    with pytest.raises(UserError, match="not a run folder"):
        compare([tmp_path])


def test_names_of_comparisons_tell_sets_of_runs_apart():
    assert comparison_name(["one", "two"]) == "one-vs-two"
    many = [f"debug-memory-linear-seed-{number}" for number in range(9)]
    assert re.fullmatch(r"debug-memory-linear-seed-9-runs-\w{8}", comparison_name(many))
    assert comparison_name(many) != comparison_name([*many[1:], "debug-memory-linear-seed-9"])
    assert len(comparison_name(["x" * 200, "y" * 200])) < 120
