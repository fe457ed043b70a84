"""The recall task: its questions, and the table, verdicts and JSON computed from the answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.recall import (
    BATCH,
    PAIRS,
    SEGMENT,
    TASK,
    TRIALS,
    Need,
    ask,
    compare_rules,
    examine,
    lengths_at,
    tabulate,
    train,
    without_memory,
)
from infini_model.evaluation.retrieval.associations import Questions, draw
from infini_model.model.llama import InfiniLlama

ROOT = Path(__file__).resolve().parents[2]
ROWS = 64


def drawn(segments: int, writings: int, seed: int = 0) -> Questions:
    return draw(TASK, ROWS, segments, writings, torch.Generator().manual_seed(seed))


def test_the_sequences_grow_from_the_shortest_to_the_longest_length() -> None:
    lengths = [lengths_at(TRIALS["linear"], step, 400) for step in (1, 100, 200, 300, 400)]
    assert lengths == [range(2, longest + 1) for longest in (2, 4, 8, 16, 32)]
    assert lengths_at(TRIALS["rewritten-delta"], 400, 400) == range(3, 33)
    assert lengths_at(TRIALS["fixed-length"], 1, 400) == range(8, 9)


@pytest.fixture(scope="module")
def learner() -> InfiniLlama:
    return train(TRIALS["linear"], seed=0, steps=25)


def test_training_lowers_the_loss_and_moves_the_gates(learner: InfiniLlama) -> None:
    batch = drawn(4, 1, seed=7)
    before = train(TRIALS["linear"], seed=0, steps=1)
    first, last = (
        model(batch.input_ids, labels=batch.labels).loss.item() for model in (before, learner)
    )
    assert last < first - 0.5
    untrained = InfiniLlama(learner.config).gate_statistics()
    for gates, start in zip(learner.gate_statistics(), untrained, strict=True):
        assert gates.minimum != start.minimum
    frozen = train(TRIALS["gates-frozen"], seed=0, steps=1)
    assert frozen.gate_statistics() == untrained


def test_without_memory_only_the_segment_itself_counts(learner: InfiniLlama) -> None:
    one, other = drawn(3, 1).input_ids, drawn(3, 1, seed=1).input_ids
    other[:, -SEGMENT:] = one[:, -SEGMENT:]
    bare = without_memory(learner)
    with torch.no_grad():
        assert torch.equal(bare(one).logits[:, -SEGMENT:], bare(other).logits[:, -SEGMENT:])
        assert not torch.allclose(
            learner(one).logits[:, -SEGMENT:], learner(other).logits[:, -SEGMENT:]
        )
        # In the first segment there is nothing to recall, so the outputs are the same.
        torch.testing.assert_close(bare(one).logits[:, :SEGMENT], learner(one).logits[:, :SEGMENT])


def test_an_untrained_model_answers_by_chance(learner: InfiniLlama) -> None:
    right, quarters = ask(learner, 8, 1, 4)
    assert len(right) == len(quarters) == 4 * BATCH * PAIRS
    assert set(quarters.tolist()) == {0, 1, 2, 3}
    figures = examine(learner, 1, 1)
    assert all(0.0 <= figures[name] < 15.0 for name in TRIALS["linear"].needs)


def test_the_table_judges_every_seed() -> None:
    good = {"8 segments": 98.0, "16 segments": 95.0, "64 segments": 90.0}
    good |= {"worst quarter": 85.0, "knocked out": 10.0}
    results = {
        "linear": {0: good, 1: {**good, "64 segments": 89.9}},
        "rewritten-linear": {0: {"16 segments": 97.0}, 1: {"16 segments": 50.0}},
        "rewritten-delta": {0: {"16 segments": 97.0}, 1: {"16 segments": 99.0}},
    }
    compare_rules(results)
    rows = {row[""]: row for row in tabulate(results)}
    needs = rows["linear needs"]
    assert needs["8 segments"] == "≥ 98 met"
    assert needs["64 segments"] == "≥ 90 missed"
    assert needs["knocked out"] == "≤ 10 met"
    assert rows["rewritten-delta needs"]["16 segments"] == "≥ 95 met"
    assert rows["rewritten-delta needs"]["over linear"] == "> 0 missed"
    assert rows["rewritten-delta, seed 1"]["over linear"] == 49.0
    assert "rewritten-linear needs" not in rows
    assert Need("≤", 10).judge([3.0, 10.1]) == "≤ 10 missed"


@pytest.mark.story
def test_it_ends_with_a_line_of_json_and_status_1_if_a_target_is_missed() -> None:
    command = [sys.executable, "-m", "benchmarks.recall", "--steps", "2", "--batches", "1"]
    command += ["--seeds", "5", "--only", "linear"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    assert ended.returncode == 1
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["benchmark"] == "recall"
    assert [row[""] for row in summary["table"]] == ["linear, seed 5", "linear needs"]
    assert summary["table"][-1]["64 segments"] == "≥ 90 missed"
