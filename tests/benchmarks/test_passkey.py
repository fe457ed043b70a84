"""The benchmark of pass keys: its questions, its training, and the table of its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks.passkey import (
    ASKED,
    DEPTHS,
    SEGMENT,
    WORDS,
    Outcome,
    answers,
    by_depth,
    draw,
    encode,
    examine,
    tabulate,
    train,
)

ROOT = Path(__file__).resolve().parents[2]


def test_the_haystacks_are_those_of_the_task_in_words_and_groups_of_digits() -> None:
    haystacks = draw(np.random.default_rng(0), 4, [0.0, 100.0])
    assert sum(tensor.size(-1) for tensor in haystacks) == 4 * SEGMENT
    for body, question, answer in zip(*haystacks, strict=True):
        words = [WORDS[number] for number in body]
        key = [WORDS[number] for number in answer[0]]
        assert [len(group) for group in key] == [2, 2, 1]
        statement = ["The", "pass", "key", "is", *key, ".", "Remember", "it", "."]
        assert statement in (words[: len(statement)], words[-len(statement) :])
        assert [WORDS[number] for number in question[0]][-4:] == ["The", "pass", "key", "is"]
    assert encode("is 71432.") == [WORDS.index(word) for word in ("is", "71", "43", "2", ".")]


def test_training_lowers_the_loss_of_the_answers() -> None:
    haystacks = draw(np.random.default_rng(1), 2, [30.0] * 32)
    losses = []
    for steps in (1, 25):
        logits = answers(train(0, steps), haystacks).flatten(0, 1)
        losses.append(functional.cross_entropy(logits, haystacks.answers.flatten()).item())
    assert losses[1] < losses[0] - 0.5


def test_an_untrained_model_answers_by_chance() -> None:
    torch.manual_seed(0)
    shares = examine(train(0, 1), 4, 2)
    assert len(shares) == len(DEPTHS)
    assert max(shares) == 0.0


def outcome(shares: float, worst: float) -> Outcome:
    right = {segments: [shares] * (len(DEPTHS) - 1) + [worst] for segments in ASKED}
    return Outcome(right, 0.0, [50.0, 40.0], 1.0, 2.0)


def test_every_cell_of_every_seed_is_judged_up_to_four_times_the_trained_length() -> None:
    good, bad = outcome(100.0, 95.0), outcome(100.0, 94.9)
    *_, needs = tabulate({0: good, 1: good})
    assert needs["worst of 32"] == needs["worst of 128"] == "≥ 95 met"
    assert needs["worst of 512"] is None
    *rows, needs = tabulate({0: good, 1: bad})
    assert needs["worst of 128"] == "≥ 95 missed"
    assert rows[1]["worst of 512"] == 94.9
    grid = by_depth({0: good, 1: bad})
    assert grid.shape == (len(DEPTHS), len(ASKED))
    assert grid[-1] == pytest.approx([0.9495] * 3)


@pytest.mark.story
def test_it_ends_with_a_line_of_json_and_status_1_if_a_target_is_missed(tmp_path: Path) -> None:
    picture = tmp_path / "grid.png"
    command = [sys.executable, "-m", "benchmarks.passkey", "--steps", "2", "--trials", "1"]
    command += ["--seeds", "5", "--heat-map", str(picture)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    assert ended.returncode == 1
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["benchmark"] == "passkey"
    titles = [row[""] for row in summary["table"]]
    assert titles[:3] == ["seed 5", "needs", "depth 0%"]
    assert summary["table"][1]["worst of 128"] == "≥ 95 missed"
    assert picture.stat().st_size > 10_000
