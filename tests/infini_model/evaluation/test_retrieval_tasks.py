"""The tasks `passkey`, `needles` and `recall` on a small run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_run import make_dataset, make_run, settings

from infini_model.config import Config
from infini_model.config.evaluation_tasks import EvaluationTaskName
from infini_model.data.shards.stream import open_split
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.evaluation.reporting.report import evaluate_run
from infini_model.evaluation.retrieval.associations import Shape, Vocabulary, draw
from infini_model.evaluation.retrieval.trials import Trials
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.recall import answer, ordinary_tokens
from infini_model.evaluation.tasks.task import TaskResult, load_task
from infini_model.runtime.errors import ConfigError, UserError

TASKS: list[EvaluationTaskName] = ["passkey", "needles", "recall"]
SMALL = {
    "packing.context_length": 128,
    "model.segment_length": 32,
    "evaluation.passkey.depths": [0, 50, 100],
    "evaluation.passkey.trials": 2,
    "evaluation.passkey.lengths": [4, 2],
    "evaluation.needles.depths": [0, 25, 50, 75, 100],
    "evaluation.needles.trials": 1,
    "evaluation.needles.needles": 2,
    "evaluation.needles.lengths": [4],
    "evaluation.recall.lengths": [2, 9],
    "evaluation.recall.sequences": 5,
}


class Made:
    """A dataset and a run, evaluated with different settings."""

    def __init__(self, root: Path, **model: Any) -> None:
        self.root, self.model = root, model
        self.run_dir = root / "outputs" / "runs" / "first"
        self.dataset = make_dataset(root, self.config())
        make_run(self.run_dir, self.config(), steps=(40,))

    def config(self, **overrides: Any) -> Config:
        return settings(self.root, **SMALL | self.model | overrides)

    def subject(self, **overrides: Any) -> Subject:
        return Subject(self.run_dir, self.dataset, self.config(**overrides))

    def result(self, task: EvaluationTaskName, **overrides: Any) -> TaskResult:
        return load_task(task).run(self.subject(**overrides))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("retrieval"))


@pytest.fixture
def fresh(made: Made) -> Made:
    """Without finished cells."""
    for path in (made.run_dir / "evaluation").rglob("*.json"):
        path.unlink()
    return made


def test_the_report_has_a_grid_with_intervals_and_a_picture(made: Made) -> None:
    seen: list[tuple[int, int]] = []
    config = made.config(**{"evaluation.tasks": TASKS})
    result = evaluate_run(
        made.run_dir, made.dataset, config, progress=lambda *pair: seen.append(pair)
    )
    # Two lengths of two trials of three haystacks; three haystacks for five depths; ten sequences.
    assert seen[-1] == (12 + 3 + 10, 12 + 3 + 10)
    passkey = result.tasks["passkey"]
    assert list(passkey.details["lengths"]) == ["256", "512"]
    assert passkey.details["lengths"]["512"]["answers"] == [2, 2, 2]
    assert result.tasks["needles"].details["lengths"]["512"]["answers"] == pytest.approx(
        [1, 1, 1, 1, 1], abs=1
    )
    assert sum(result.tasks["needles"].details["lengths"]["512"]["answers"]) == 6
    metrics = {
        *(f"evaluation/passkey_{name}/{n}" for name in METRICS for n in (256, 512)),
        *(f"evaluation/needles_{name}/512" for name in METRICS),
        *(f"evaluation/{name}/{n}" for name in ("recall", "recall_of_values") for n in (2, 9)),
    }
    assert set(result.metrics) == metrics
    for each in result.tasks.values():
        assert set(each.intervals) == set(each.metrics)
        for name, (low, high) in each.intervals.items():
            assert low <= each.metrics[name] <= high
        assert each.summary
    report = result.report.read_text()
    assert "![Pass keys found, by length and depth](plots/passkey.png)" in report
    assert (made.run_dir / "plots" / "needles.png").stat().st_size > 10_000
    json.dumps(result.model_dump(mode="json"))


METRICS = ("exact_match", "token_accuracy")


@pytest.mark.parametrize("task", TASKS)
def test_one_more_length_costs_only_itself(fresh: Made, task: EvaluationTaskName) -> None:
    fresh.result(task)
    folder = fresh.run_dir / "evaluation"
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob(f"{task}-*/*.json")}
    fresh.result(task, **{f"evaluation.{task}.lengths": [2, 3, 4, 9]})
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len([*folder.rglob(f"{task}-*/*.json")]) > len(kept)
    assert len({path.parent for path in folder.rglob(f"{task}-*/*.json")}) == 1


def test_the_seed_decides_what_is_asked(made: Made) -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        subject = made.subject(**{"run.seed": seed})
        trials = Trials(subject, "passkey", subject.config.evaluation.passkey, 1)
        return [*trials.draw(2, 0).haystacks, *trials.draw(2, 1).haystacks]

    once, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    assert not torch.equal(once[0], once[3])


def test_filler_may_be_documents_of_the_test_split(made: Made) -> None:
    subject = made.subject(**{"evaluation.passkey.filler": "documents"})
    trials = Trials(subject, "passkey", subject.config.evaluation.passkey, 1)
    tokenizer, test = load_tokenizer("bytes"), open_split(made.dataset, "test")
    bodies = [tokenizer.decode(body.numpy()) for body in trials.draw(4, 0).haystacks.bodies]
    documents = [tokenizer.decode(test.document(number)) for number in range(test.documents)]
    for body in bodies:
        before, _, after = body.partition(" The pass key is ")
        assert sum(text in before or text in after for text in documents) >= 2


def test_a_model_of_diffusion_is_not_asked(tmp_path: Path) -> None:
    bidirectional = {"model.bidirectional": True, "training.objective": "masked_diffusion"}
    shape = {"model.memory": "none", "model.segment_length": 128, "model.mask_token_id": 256}
    made = Made(tmp_path, **bidirectional | shape | {"model.vocab_size": 257})
    for task in TASKS:
        assert "a causal model" in made.result(task).section
        assert load_task(task).sequences(made.subject()) == 0


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (
            "passkey",
            {"packing.context_length": 32, "evaluation.passkey.lengths": [64, 2]},
            r"evaluation.passkey.lengths: 2 x packing.context_length is 64 tokens, but needles",
        ),
        (
            "needles",
            {"evaluation.needles.lengths": [1], "evaluation.needles.needles": 5},
            r"evaluation.needles.lengths: 1 x packing.context_length is 128 tokens, but needles",
        ),
        (
            "recall",
            {"evaluation.recall.pairs": 17},
            r"evaluation.recall.pairs: 17 pairs need segments of at least 34 tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    made: Made, task: EvaluationTaskName, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        made.result(task, **overrides)
    assert "\n" not in str(raised.value)


def test_filler_of_documents_needs_a_test_split(tmp_path: Path) -> None:
    splits = {"data.splits": {"train": 0.5, "validation": 0.5, "test": 0.0}}
    made = Made(tmp_path, **splits)
    with pytest.raises(UserError, match=r"evaluation.needles.filler: documents, but the test"):
        made.result("needles", **{"evaluation.needles.filler": "documents"})


def test_needles_stand_at_different_depths(made: Made) -> None:
    with pytest.raises(ConfigError, match=r"evaluation.needles: .*6 needles .* as many depths"):
        made.config(**{"evaluation.needles.needles": 6})


def test_recall_uses_different_readable_tokens(made: Made) -> None:
    tokenizer = load_tokenizer("bytes")
    shape = Shape(32, 8)
    tokens = ordinary_tokens(tokenizer, shape, seed=3)
    assert len(set(tokens.tolist())) == shape.vocabulary.size
    assert tokenizer.decode(tokens.numpy()).isprintable()
    assert not torch.equal(tokens, ordinary_tokens(tokenizer, shape, seed=4))
    with pytest.raises(UserError, match="needs 160 tokens of readable text"):
        ordinary_tokens(tokenizer, Shape(32, 8, Vocabulary(80, 64, 16)), seed=0)


def test_recall_counts_what_one_pass_over_each_sequence_predicts(made: Made) -> None:
    model, shape = made.subject().model, Shape(32, 8)
    questions = draw(shape, 6, 5, 1, torch.Generator().manual_seed(0))
    tokens = torch.randperm(256, generator=torch.Generator().manual_seed(1))[
        : shape.vocabulary.size
    ]
    values = tokens[shape.vocabulary.keys : shape.vocabulary.keys + shape.vocabulary.values]
    asked = questions.labels >= 0
    with torch.no_grad():
        model.lm_head.weight[values] *= 1.2  # so that a value is often the likeliest
        logits = model(tokens[questions.input_ids]).logits[asked]
    of_values = logits[:, values].argmax(-1)
    of_values[::3] = 0
    questions.labels[asked] = shape.vocabulary.keys + of_values
    right = logits.argmax(-1) == values[of_values]
    right_of_values = logits[:, values].argmax(-1) == of_values
    assert 0 < right.sum() < right_of_values.sum() < len(right)
    found = answer(model, shape.vocabulary, tokens, questions, 4)
    assert sum(found.answers) == len(right) == 6 * 8
    assert sum(found.right) == right.sum()
    assert sum(found.right_of_values) == right_of_values.sum()
