"""Runs side by side: real runs of a few steps, and changed copies of them."""

import json
import re
import shutil

import pytest
import yaml
from trained_run import settings

from infini_model.data.manifest import read_manifest
from infini_model.evaluation.compare import compare
from infini_model.evaluation.comparison_page import comparison_name, write_comparison
from infini_model.evaluation.report import evaluate_run
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.training.train import train

LOSS = "evaluation/validation_loss"


SHORT = {
    "model.num_hidden_layers": 1,
    "training.max_steps": 3,
    "training.warmup_steps": 1,
    "logging.logging_steps": 1,
    "logging.eval_steps": 2,
    "evaluation.max_windows": 4,
    "evaluation.tasks": ["loss", "loss_by_position"],
    "tracking": {"mlflow": False, "tensorboard": False},
}


def begin(root, dataset, name, *, seed=0, memory="linear"):
    """Train a run of a few steps, and evaluate it; returns its folder."""
    own = {"run.name": name, "run.seed": seed, "model.memory": memory}
    config = settings(root, **SHORT | own)
    with claim_run(config, read_manifest(dataset).key, dataset) as run_dir:
        train(config, dataset, run_dir)
        evaluate_run(run_dir, dataset, config)
    return run_dir


@pytest.fixture(scope="module")
def seeds(tmp_path_factory, dataset):
    """Linear memory and none, two seeds of each."""
    root = tmp_path_factory.mktemp("compared")
    return [
        begin(root, dataset, f"{memory}-{seed}", seed=seed, memory=memory)
        for memory in ("linear", "none")
        for seed in (0, 1)
    ]


def recorded(run_dir):
    return json.loads((run_dir / "evaluation.json").read_text())["metrics"]


def copied(run_dir, to, **changes):
    """A copy of a run in the folder `to`, with other settings: sections by name.

    Those of its evaluation are what it was evaluated with.
    """
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns(".lock"))
    evaluation = json.loads((to / "evaluation.json").read_text())
    evaluation["settings"] |= changes.pop("evaluation", {})
    (to / "evaluation.json").write_text(json.dumps(evaluation))
    config = yaml.safe_load((to / "config.yaml").read_text())
    for name, section in changes.items():
        config[name] |= section
    (to / "config.yaml").write_text(yaml.safe_dump(config))
    return to


def test_seeds_of_the_same_settings_are_one_group_and_are_compared_in_pairs(seeds):
    comparison = compare(seeds)
    assert [group.label for group in comparison.groups] == ["memory=linear", "memory=none"]
    assert comparison.differing == {
        "run.seed": ["0", "1", "0", "1"],
        "model.memory": ["linear", "linear", "none", "none"],
    }
    losses = [recorded(run_dir)[LOSS] for run_dir in seeds]
    assert sorted(comparison.groups[0].values(LOSS)) == sorted(losses[:2])
    (difference,) = comparison.differences
    assert difference.by_seed == pytest.approx({0: losses[2] - losses[0], 1: losses[3] - losses[1]})
    assert comparison.notes == []


def test_results_are_those_of_the_evaluation_and_of_the_training(seeds):
    run = compare(seeds[:2]).runs[0]
    assert recorded(seeds[0]).items() <= run.results.items()
    assert run.results["steps"] == 3
    assert run.results["tokens"] == 3 * 2 * 32
    last = [line for line in read_metrics(seeds[0]) if "validation/loss" in line][-1]
    assert run.results["validation/loss"] == last["validation/loss"]
    assert run.results["tokens per second"] > 0


def test_the_page_has_all_results_of_each_run_and_of_the_seeds_and_is_all_that_is_written(
    seeds, tmp_path
):
    file = write_comparison(compare(seeds), tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    text = file.read_text()
    assert "| `model.memory` | `linear` | `linear` | `none` | `none` |" in text
    of_seeds = [f"{recorded(run_dir)[LOSS]:,.4f}" for run_dir in seeds[:2]]
    mean = sum(recorded(run_dir)[LOSS] for run_dir in seeds[:2]) / 2
    assert f"| {mean:,.4f} ({min(of_seeds)} to {max(of_seeds)}) |" in text
    rows = re.findall(r"^\| `(\S+)`", text.partition("## Results by run")[2], re.MULTILINE)
    are_losses = [name.endswith("loss") for name in rows]
    assert are_losses == sorted(are_losses, reverse=True)
    assert rows[0] == LOSS
    by_run = text.partition("## Results by run")[2].splitlines()
    for metric, value in recorded(seeds[3]).items():
        (row,) = (line for line in by_run if f"`{metric}`" in line)
        assert row.split(" | ")[4].startswith(f"{value:,.4f}")


@pytest.mark.parametrize(
    ("of", "changes", "reason"),
    [
        (0, {"packing": {"context_length": 16}}, "its context length is 16, that of linear-0 32"),
        (0, {"evaluation": {"max_windows": 2}}, "its number of scored windows is 2, that of lin"),
        (2, {"run": {"seed": 7}}, "no evaluated run with the settings of linear-0 has its seed, 7"),
        (3, {}, "none-1 has its settings and its seed, 1"),
    ],
)
def test_why_a_loss_is_not_compared_and_has_no_column(seeds, tmp_path, of, changes, reason):
    comparison = compare([*seeds, copied(seeds[of], tmp_path / "other", **changes)])
    (note,) = comparison.notes
    assert note.startswith(f"other: {reason}")
    assert note.endswith(": not compared")
    without = compare(seeds)
    assert comparison.differences[0].by_seed == without.differences[0].by_seed
    assert comparison.runs == without.runs
    assert comparison.differing == without.differing
    losses = [[group.values(LOSS) for group in each.groups] for each in (comparison, without)]
    assert losses[0] == losses[1]


def test_two_runs_of_one_seed_are_not_two_samples(seeds, tmp_path):
    comparison = compare([seeds[0], copied(seeds[0], tmp_path / "again"), seeds[2]])
    assert not comparison.has_seeds
    assert comparison.names == ["linear-0", "none-0"]


def test_runs_on_other_data_and_of_fewer_tokens_are_not_compared(seeds, tmp_path):
    elsewhere, shorter, alike = (
        copied(seeds[0], tmp_path / name) for name in ("elsewhere", "shorter", "alike")
    )
    record = json.loads((elsewhere / "run.json").read_text())
    (elsewhere / "run.json").write_text(json.dumps(record | {"dataset_key": "k" * 64}))
    lines = (shorter / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] != 1]
    (shorter / "metrics.jsonl").write_text("".join(kept))
    # Another seed may draw windows with a little more padding.
    rate = "train/tokens_per_second"
    fewer = [each | {rate: 0.99 * each.get(rate, 0.0)} for each in map(json.loads, lines)]
    (alike / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in fewer))
    comparison = compare([*seeds, elsewhere, shorter, alike])
    assert len(comparison.differences) == 1
    of_data, of_tokens, of_seed = comparison.notes
    assert of_seed.startswith("alike: linear-0 has its settings and its seed")
    assert of_data.startswith("elsewhere: its dataset is kkkkkkkkkkkkkkkk, that of linear-0 ")
    assert of_tokens.startswith("shorter: its number of training tokens is 128, that of linear-0")


def test_a_run_that_is_not_evaluated_or_cannot_be_read_does_not_hide_the_others(seeds, tmp_path):
    bare, damaged = copied(seeds[3], tmp_path / "bare"), copied(seeds[3], tmp_path / "damaged")
    (bare / "evaluation.json").unlink()
    (damaged / "evaluation.json").write_text("{")
    comparison = compare([bare, *seeds[:3], damaged, tmp_path])
    assert [run.name for run in comparison.runs] == ["linear-0", "none-0"]
    assert "linear-1: no other run has its seed, 1: not compared" in comparison.notes
    cannot_be_read = [note for note in comparison.notes if "cannot be read" in note]
    assert [note.partition(":")[0] for note in cannot_be_read] == ["damaged", tmp_path.name]
    assert "bare: trained at step 3 of 3, not evaluated yet" in comparison.notes
    assert not any("\n" in note for note in comparison.notes)
    (difference,) = comparison.differences
    assert difference.by_seed.keys() == {0}
    with pytest.raises(UserError, match="not a run folder"):
        compare([tmp_path])


def test_names_of_comparisons_tell_sets_of_runs_apart():
    assert comparison_name(["one", "two"]) == "one-vs-two"
    many = [f"debug-memory-linear-seed-{number}" for number in range(9)]
    assert re.fullmatch(r"debug-memory-linear-seed-0-and-8-more-\w{8}", comparison_name(many))
    assert comparison_name(many) != comparison_name([*many[1:], "debug-memory-linear-seed-9"])
    assert len(comparison_name(["x" * 200, "y" * 200])) < 120
