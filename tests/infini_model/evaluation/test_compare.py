"""Runs side by side: real runs of a few steps, and changed copies of them."""

import json
import shutil

import pytest
import yaml
from trained_run import make_dataset, settings

from flows.print_comparison import comparison_rows, comparison_sentences, print_comparison
from infini_model.data.manifest import read_manifest
from infini_model.evaluation.compare import compare
from infini_model.evaluation.report import evaluate_run
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
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


def begin(root, dataset, name, *, seed=0, memory="linear", **others):
    """Train a run of a few steps, and evaluate it; returns its folder."""
    own = {"run.name": name, "run.seed": seed, "model.memory": memory, **others}
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
    assert comparison.differing == {
        "run.seed": ["0", "1", "0", "1"],
        "model.memory": ["linear", "linear", "none", "none"],
    }
    losses = [recorded(run_dir)[LOSS] for run_dir in seeds]
    (difference,) = comparison.differences
    labels = difference.group.label, difference.control.label
    assert labels == ("model.memory=none", "model.memory=linear")
    assert difference.by_seed == pytest.approx({0: losses[2] - losses[0], 1: losses[3] - losses[1]})
    assert comparison.notes == []


def test_results_are_those_of_the_evaluation_and_of_the_training(seeds):
    run = compare(seeds[:2]).runs[0]
    assert recorded(seeds[0]).items() <= run.results.items()
    assert run.results["steps"] == 3
    assert run.results["tokens"] == 3 * 2 * 32
    assert run.results["tokens per second"] > 0


def test_a_row_has_the_settings_that_differ_and_results_with_their_intervals(
    seeds, tmp_path, capsys
):
    far = {"evaluation/test_loss_from_segment_2": 1.5}
    runs = [copied(run_dir, tmp_path / run_dir.name) for run_dir in seeds]
    for run_dir in runs:
        record = json.loads((run_dir / "evaluation.json").read_text())
        record["metrics"] |= far
        record["intervals"] = dict.fromkeys(far, (1.25, 1.75))
        (run_dir / "evaluation.json").write_text(json.dumps(record))
    comparison = compare(runs)
    print_comparison(comparison)
    header, *printed = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["Run", "run.seed", "model.memory"]
    for run_dir, row, line in zip(runs, comparison_rows(comparison), printed, strict=False):
        memory, seed = run_dir.name.split("-")
        assert (row["Run"], row["run.seed"], row["model.memory"]) == (run_dir.name, seed, memory)
        assert row["Validation loss"] == f"{recorded(run_dir)[LOSS]:,.4f}"
        assert row["Test from segment 2"] == "1.5000 (1.2500 to 1.7500)"
        assert row["Steps"] == "3"
        assert all(value in line for value in row.values())


def test_a_sentence_says_what_several_seeds_found_and_that_one_says_little(seeds, tmp_path):
    runs = [copied(run_dir, tmp_path / run_dir.name) for run_dir in seeds]
    for run_dir, loss in zip(runs, (2.5, 2.75, 2.0, 2.625), strict=True):
        record = json.loads((run_dir / "evaluation.json").read_text())
        record["metrics"][LOSS] = loss
        (run_dir / "evaluation.json").write_text(json.dumps(record))
    (sentence,) = comparison_sentences(compare(runs))
    assert sentence.startswith("The validation loss of model.memory=none is 0.3125 lower than that")
    assert sentence.endswith("over 2 seeds (-0.5000 to -0.1250); it is lower with 2 of 2.")
    sentence, warning = comparison_sentences(compare([seeds[0], seeds[2]]))
    assert sentence.endswith("that of model.memory=linear, with the same seed.")
    assert warning.startswith("One seed each says little")


def test_many_settings_that_differ_are_lines_below_the_table(seeds, tmp_path):
    changes = {"adam_epsilon": 0.5, "max_grad_norm": 0.25, "learning_rate": 0.125}
    other = copied(seeds[2], tmp_path / "other", training=changes)
    comparison = compare([seeds[0], other], ["third: failed"])
    assert "model.memory" in comparison_rows(comparison)[0]
    other = copied(other, tmp_path / "another", training={"weight_decay": 0.75})
    comparison = compare([seeds[0], other], ["third: failed"])
    assert "model.memory" not in comparison_rows(comparison)[0]
    lines = [*comparison_sentences(comparison)]
    assert lines[-6] == "third: failed"
    assert "model.memory: linear; none" in lines[-5:]


@pytest.mark.parametrize(
    ("of", "changes", "reason"),
    [
        (0, {"packing": {"context_length": 16}}, "its context length is 16, that of linear-0 32"),
        (0, {"evaluation": {"max_windows": 2}}, "its number of scored windows is 2, that of lin"),
        (2, {"run": {"seed": 7}}, "no evaluated run with the settings of linear-0 has its seed, 7"),
        (3, {}, "none-1 has its settings and its seed, 1"),
    ],
)
def test_why_a_loss_is_not_compared(seeds, tmp_path, of, changes, reason):
    comparison = compare([*seeds, copied(seeds[of], tmp_path / "other", **changes)])
    (note,) = comparison.notes
    assert note.startswith(f"other: {reason}")
    assert note.endswith(": not compared")
    without = compare(seeds)
    assert comparison.differences[0].by_seed == without.differences[0].by_seed
    assert comparison.names == [*without.names, "other"]


def test_two_runs_of_one_seed_are_not_two_samples(seeds, tmp_path):
    comparison = compare([seeds[0], copied(seeds[0], tmp_path / "again"), seeds[2]])
    assert [[*each.by_seed] for each in comparison.differences] == [[0]]
    (note,) = comparison.notes
    assert note == "again: linear-0 has its settings and its seed, 0: not compared"


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
    of_seed, of_data, of_tokens = sorted(comparison.notes)
    assert of_seed.startswith("alike: linear-0 has its settings and its seed")
    assert of_data.startswith("elsewhere: its dataset is kkkkkkkkkkkkkkkk, that of linear-0 ")
    assert of_tokens.startswith("shorter: its number of training tokens is 128, that of linear-0")


def test_runs_of_other_tokenizers_are_compared_by_bits_per_byte(seeds, tmp_path):
    """If they validate the same text, all of it: windows of other tokens hold other text."""
    whole = {"evaluation.max_windows": None, "evaluation.tasks": ["loss"], "model.vocab_size": 384}
    runs = []
    for spec in ("bytes", "train"):
        tokenizer = {"data.tokenizer": {"spec": spec, "vocab_size": 384}}
        dataset = make_dataset(tmp_path, settings(tmp_path, **tokenizer))
        runs.append(begin(tmp_path, dataset, spec, **whole))
    of_bytes, of_pairs = runs
    comparison = compare([of_bytes, of_pairs])
    bits = [recorded(each)["evaluation/validation_bits_per_byte"] for each in (of_bytes, of_pairs)]
    (difference,) = comparison.differences
    assert difference.by_seed == {0: bits[1] - bits[0]}
    assert "The validation loss in bits per byte of " in next(comparison_sentences(comparison))
    assert comparison_rows(comparison)[1]["Bits per byte"] == f"{bits[1]:.4f}"

    # Where the dataset of one of two runs is not to be found, their keys say what they are of.
    lost = copied(seeds[0], tmp_path / "elsewhere" / "runs" / "lost", run={"seed": 1})
    record = json.loads((lost / "run.json").read_text())
    (lost / "run.json").write_text(json.dumps(record | {"dataset": "/nowhere/corpus"}))
    assert compare([seeds[1], lost]).notes[0].startswith("lost: linear-1 has its settings")

    sampled = compare([seeds[0], of_pairs])
    assert sampled.notes == [
        "train: its number of scored windows is all, that of linear-0 4: not compared"
    ]
    unscored = copied(of_pairs, tmp_path / "unscored")
    evaluation = json.loads((unscored / "evaluation.json").read_text())
    del evaluation["metrics"]["evaluation/validation_bits_per_byte"]
    (unscored / "evaluation.json").write_text(json.dumps(evaluation))
    (note,) = compare([of_bytes, unscored]).notes
    assert note.endswith(", which unscored lacks: not compared")


def test_a_run_that_is_not_evaluated_or_cannot_be_read_does_not_hide_the_others(seeds, tmp_path):
    bare, damaged = copied(seeds[3], tmp_path / "bare"), copied(seeds[3], tmp_path / "damaged")
    (bare / "evaluation.json").unlink()
    (damaged / "evaluation.json").write_text("{")
    comparison = compare([bare, *seeds[:3], damaged, tmp_path])
    assert [run.name for run in comparison.runs] == ["bare", "linear-0", "linear-1", "none-0"]
    cannot_be_read = [note for note in comparison.notes if "cannot be read" in note]
    assert [note.partition(":")[0] for note in cannot_be_read] == ["damaged", tmp_path.name]
    assert "bare: trained at step 3, without a validation loss" in comparison.notes
    assert not any("\n" in note for note in comparison.notes)
    (difference,) = comparison.differences
    assert difference.by_seed.keys() == {0}
    with pytest.raises(UserError, match="not a run folder"):
        compare([tmp_path])
