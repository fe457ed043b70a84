"""The benchmarks of what a model remembers: their questions, their trainings, their verdicts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks import passkey, recall
from benchmarks.recall import SEGMENT, TRIALS
from infini_model.evaluation.retrieval.associations import Questions, draw
from infini_model.model.llama import InfiniLlama


def drawn(segments: int, seed: int = 0) -> Questions:
    return draw(recall.TASK, 64, segments, 1, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def learner() -> InfiniLlama:
    return recall.train(TRIALS["linear"], seed=0, steps=25)


def test_the_sequences_grow_from_the_shortest_to_the_longest_length() -> None:
    lengths = [recall.lengths_at(TRIALS["linear"], step, 400) for step in (1, 100, 200, 300, 400)]
    assert lengths == [range(2, longest + 1) for longest in (2, 4, 8, 16, 32)]
    assert recall.lengths_at(TRIALS["rewritten-delta"], 400, 400) == range(3, 33)
    assert recall.lengths_at(TRIALS["fixed-length"], 1, 400) == range(8, 9)


def test_training_lowers_the_loss_and_moves_the_gates(learner: InfiniLlama) -> None:
    batch = drawn(4, seed=7)
    frozen = recall.train(TRIALS["gates-frozen"], seed=0, steps=1)
    first, last = (
        model(batch.input_ids, labels=batch.labels).loss.item() for model in (frozen, learner)
    )
    assert last < first - 0.5
    untrained = InfiniLlama(learner.config).gate_statistics()
    assert frozen.gate_statistics() == untrained
    for gates, start in zip(learner.gate_statistics(), untrained, strict=True):
        assert gates.minimum != start.minimum


def test_without_memory_only_the_segment_itself_counts(learner: InfiniLlama) -> None:
    one, other = drawn(3).input_ids, drawn(3, seed=1).input_ids
    other[:, -SEGMENT:] = one[:, -SEGMENT:]
    bare = recall.without_memory(learner)
    with torch.no_grad():
        assert torch.equal(bare(one).logits[:, -SEGMENT:], bare(other).logits[:, -SEGMENT:])
        assert not torch.allclose(
            learner(one).logits[:, -SEGMENT:], learner(other).logits[:, -SEGMENT:]
        )
        # In the first segment there is nothing to recall, so the outputs are the same.
        torch.testing.assert_close(bare(one).logits[:, :SEGMENT], learner(one).logits[:, :SEGMENT])


def test_a_model_that_has_not_learned_answers_by_chance(learner: InfiniLlama) -> None:
    figures = recall.examine(learner, 1, 1)
    assert all(0.0 <= figures[name] < 15.0 for name in TRIALS["linear"].needs)
    assert passkey.examine(passkey.train(0, 1), 4, 2) == [0.0] * len(passkey.DEPTHS)


def test_the_table_of_recall_judges_every_seed() -> None:
    good = {"8 segments": 98.0, "16 segments": 95.0, "64 segments": 90.0}
    good |= {"worst quarter": 85.0, "knocked out": 10.0}
    results = {
        "linear": {0: good, 1: {**good, "64 segments": 89.9}},
        "rewritten-linear": {0: {"16 segments": 97.0}, 1: {"16 segments": 50.0}},
        "rewritten-delta": {0: {"16 segments": 97.0}, 1: {"16 segments": 99.0}},
    }
    recall.compare_rules(results)
    rows = {row[""]: row for row in recall.tabulate(results)}
    needs = rows["linear needs"]
    assert needs["8 segments"] == "≥ 98 met"
    assert needs["64 segments"] == "≥ 90 missed"
    assert needs["knocked out"] == "≤ 10 met"
    assert rows["rewritten-delta needs"]["over linear"] == "> 0 missed"
    assert rows["rewritten-delta, seed 1"]["over linear"] == 49.0


def test_the_haystacks_are_those_of_the_task_in_words_and_groups_of_digits() -> None:
    haystacks = passkey.draw(np.random.default_rng(0), 4, [0.0, 100.0])
    assert sum(tensor.size(-1) for tensor in haystacks) == 4 * passkey.SEGMENT
    for body, question, answer in zip(*haystacks, strict=True):
        words = [passkey.WORDS[number] for number in body]
        key = [passkey.WORDS[number] for number in answer[0]]
        assert [len(group) for group in key] == [2, 2, 1]
        statement = ["The", "pass", "key", "is", *key, ".", "Remember", "it", "."]
        assert statement in (words[: len(statement)], words[-len(statement) :])
        asked = [passkey.WORDS[number] for number in question[0]]
        assert asked[-4:] == ["The", "pass", "key", "is"]


def test_training_lowers_the_loss_of_a_pass_key() -> None:
    haystacks = passkey.draw(np.random.default_rng(1), 2, [30.0] * 32)
    losses = []
    for steps in (1, 25):
        logits = passkey.answers(passkey.train(0, steps), haystacks).flatten(0, 1)
        losses.append(functional.cross_entropy(logits, haystacks.answers.flatten()).item())
    assert losses[1] < losses[0] - 0.5


def test_every_cell_of_every_seed_is_judged_up_to_four_times_the_trained_length() -> None:
    good, bad = (
        passkey.Outcome(
            {length: [100.0] * 20 + [worst] for length in passkey.ASKED}, 0.0, [50.0], 1.0, 2.0
        )
        for worst in (95.0, 94.9)
    )
    *_, needs = passkey.tabulate({0: good, 1: good})
    assert needs["worst of 32"] == needs["worst of 128"] == "≥ 95 met"
    assert needs["worst of 512"] is None
    *rows, needs = passkey.tabulate({0: good, 1: bad})
    assert needs["worst of 128"] == "≥ 95 missed"
    assert rows[1]["worst of 512"] == 94.9
    assert passkey.by_depth({0: good, 1: bad})[-1] == pytest.approx([0.9495] * 3)
