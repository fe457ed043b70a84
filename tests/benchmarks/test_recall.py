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
    KEYS,
    PAIRS,
    SEGMENT,
    TRIALS,
    VALUES,
    Need,
    Questions,
    ask,
    compare_rules,
    draw,
    examine,
    lengths_at,
    tabulate,
    train,
    without_memory,
)
from infini_model.model.llama import InfiniLlama

ROOT = Path(__file__).resolve().parents[2]
ROWS = 64
TASKS = [(2, 1), (8, 1), (3, 2), (8, 2)]


def drawn(segments: int, writings: int, seed: int = 0) -> Questions:
    return draw(ROWS, segments, writings, torch.Generator().manual_seed(seed))


def is_key(token: int) -> bool:
    return token < KEYS


def is_value(token: int) -> bool:
    return KEYS <= token < KEYS + VALUES


@pytest.mark.parametrize(("segments", "writings"), TASKS)
def test_each_key_is_asked_once_and_its_newest_value_is_the_answer(
    segments: int, writings: int
) -> None:
    batch = drawn(segments, writings)
    for tokens, labels, written in zip(*(x.tolist() for x in batch), strict=True):
        asked = (segments - 1) * SEGMENT
        pairs = [(at, tokens[at]) for at in range(asked) if is_key(tokens[at])]
        assert len(pairs) == PAIRS * writings
        newest = {key: (at // SEGMENT, tokens[at + 1]) for at, key in pairs}
        assert len(newest) == PAIRS
        answers = {
            tokens[at]: (written[at], labels[at]) for at in range(len(tokens)) if labels[at] != -100
        }
        assert answers == newest
        assert sum(map(is_key, tokens[asked:])) == PAIRS


@pytest.mark.parametrize(("segments", "writings"), TASKS)
def test_answers_are_only_in_earlier_segments(segments: int, writings: int) -> None:
    batch = drawn(segments, writings)
    asked = batch.labels != -100
    assert asked.sum() == ROWS * PAIRS
    assert not asked[:, :-SEGMENT].any()
    assert (batch.written[asked] < segments - 1).all()
    assert not any(map(is_value, batch.input_ids[:, -SEGMENT:].flatten().tolist()))


def test_a_key_is_rewritten_in_a_later_segment_with_another_value() -> None:
    for tokens in drawn(3, 2).input_ids.tolist():
        written: dict[int, list[tuple[int, int]]] = {}
        for at in range(2 * SEGMENT):
            if is_key(tokens[at]):
                written.setdefault(tokens[at], []).append((at // SEGMENT, tokens[at + 1]))
        for (first, old), (second, new) in written.values():
            assert first < second
            assert old != new


def test_answers_come_from_every_depth_and_are_spread_over_all_values() -> None:
    batch = drawn(8, 1)
    asked = batch.labels != -100
    assert set(batch.written[asked].tolist()) == set(range(7))
    assert len(set(batch.labels[asked].tolist())) == VALUES


def test_the_seed_alone_decides_what_is_drawn() -> None:
    once, again, other = drawn(4, 2), drawn(4, 2), drawn(4, 2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once.input_ids, other.input_ids)


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
    assert all(gates.minimum != 0.5 for gates in learner.gate_statistics())
    frozen = train(TRIALS["gates-frozen"], seed=0, steps=1)
    assert {gates for layer in frozen.gate_statistics() for gates in layer} == {0.5}


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
