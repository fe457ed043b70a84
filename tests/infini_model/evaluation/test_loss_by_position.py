"""Long documents with the memory emptied at their start, carried over, and knocked out."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from trained_run import make_dataset, make_run, settings

from infini_model.data.shards.stream import open_split
from infini_model.evaluation.long_documents import (
    LongDocuments,
    Reach,
    find_long_documents,
    measure,
)
from infini_model.evaluation.reporting.memory import verdict
from infini_model.evaluation.statistics import Interval
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import load_task

LENGTH, SEGMENTS = 8, 4
TOKENS = LENGTH * SEGMENTS
DIFFUSION = {
    "training.objective": "block_diffusion",
    "model.vocab_size": 257,
    "model.mask_token_id": 256,
    "model.bidirectional": True,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(root, dataset folder), not to be modified by tests."""
    root = tmp_path_factory.mktemp("long")
    return root, make_dataset(root, settings(root))


@pytest.fixture
def subject_of(made, tmp_path):
    """A model with random weights, on the dataset, with the given settings."""
    root, dataset = made

    def make(**overrides):
        config = settings(root, **overrides)
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        make_run(run_dir, config, steps=(40,))
        return Subject(run_dir, dataset, config)

    return make


def token_losses(model, ids):
    """The loss of every token after the first, by the model's own logits."""
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return functional.cross_entropy(logits, ids[1:], reduction="none").double()


def by_segment(losses):
    return losses.view(SEGMENTS, LENGTH).sum(1).tolist()


def test_a_document_is_scored_three_ways(subject_of, made):
    """Each way as plain forward passes of the model over the document's own tokens compute it."""
    subject = subject_of()
    found = find_long_documents(subject)
    measured = measure(subject, found)
    stream = open_split(made[1], found.split)
    whole = [stream.document(number) for number in range(stream.documents)]
    documents = [torch.from_numpy(d[: TOKENS + 1].astype(np.int64)) for d in whole]
    documents = [d for d in documents if len(d) == TOKENS + 1]
    assert len(documents) == len(found.starts) == found.found > 3
    assert (measured.counts == LENGTH).all()
    for number, document in enumerate(documents):
        before = documents[number - 1][:-1]
        alone = [document[i : i + LENGTH + 1] for i in range(0, TOKENS, LENGTH)]
        expected = {
            "fresh": by_segment(token_losses(subject.model, document)),
            "carried": by_segment(
                token_losses(subject.model, torch.cat((before, document)))[TOKENS:]
            ),
            "knocked_out": [float(token_losses(subject.model, each).sum()) for each in alone],
        }
        for way, losses in expected.items():
            assert measured.losses[way][number].tolist() == pytest.approx(losses, rel=1e-5), way
    for way in ("fresh", "carried"):
        gain = measured.losses["knocked_out"] - measured.losses[way]
        assert measured.gains[way] == pytest.approx(gain, abs=1e-4)


def test_the_noise_of_diffusion_is_the_same_on_both_sides_of_a_gain(subject_of):
    subject = subject_of(**DIFFUSION)
    measured = measure(subject, find_long_documents(subject))
    assert measured.gains["fresh"][:, 0] == pytest.approx(0.0, abs=1e-6)
    # The document before it is in the memory, or not; its own noise is that of its place.
    assert (np.abs(measured.gains["carried"][:, 0]) > 1e-6).any()
    assert (np.abs(measured.losses["carried"] - measured.losses["fresh"])[:, 0] > 1e-2).any()
    fresh = measured.losses["knocked_out"] - measured.losses["fresh"]
    assert measured.gains["fresh"] == pytest.approx(fresh)


def test_batches_do_not_matter_and_finished_ones_are_kept(subject_of):
    subject = subject_of()
    found = find_long_documents(subject)
    seen = []
    subject.on_windows = seen.append
    once = measure(subject, found)
    assert sum(seen) == len(found.starts) == load_task("loss_by_position").sequences(subject)
    subject.losses = None  # an interrupted evaluation that is repeated computes nothing again
    again = measure(subject, found)
    assert sum(seen) == 2 * len(found.starts)
    large = subject_of(**{"evaluation.batch_size": 40})
    together = measure(large, found)
    for way, losses in once.losses.items():
        assert (again.losses[way] == losses).all()
        assert together.losses[way] == pytest.approx(losses, rel=1e-5)


def test_the_sample_is_of_the_documents_that_are_long_enough(subject_of, made):
    keys = ("evaluation.loss_by_position.segments", "evaluation.loss_by_position.max_documents")
    few = find_long_documents(subject_of(**{keys[0]: 14, keys[1]: 2}))
    assert (len(few.starts), few.found, few.segments) == (2, 3, 14)
    every = find_long_documents(subject_of(**{keys[0]: 14}))
    assert set(few.starts) < set(every.starts)
    lengths = np.concatenate(list(open_split(made[1], "test").lengths()))
    starts = np.cumsum(lengths) - lengths
    assert every.starts.tolist() == starts[lengths > 14 * LENGTH].tolist()
    # Where test has less than two, validation serves.
    assert find_long_documents(subject_of(**{keys[0]: 20})).split == "validation"


def test_metrics_have_intervals_over_documents(subject_of):
    subject = subject_of(**{"evaluation.loss_by_position.segments": 9})
    measured = measure(subject, find_long_documents(subject))
    result = load_task("loss_by_position").run(subject)
    for start in (2, 8):
        gain = measured.gains["fresh"][:, start - 1 :].sum() / measured.counts[:, start - 1 :].sum()
        name = f"evaluation/test_memory_gain_from_segment_{start}"
        assert result.metrics[name] == pytest.approx(gain)
        low, high = result.intervals[name]
        assert low < gain < high
        assert f"evaluation/test_loss_from_segment_{start}" in result.intervals
    assert "| 9 to 16 |" in result.section
    assert "| 33 to 64 |" in result.section
    assert "| 65 to 72 |" in result.section
    (picture,) = result.pictures
    assert picture.path.is_file()
    assert len(result.summary) == 1
    name = "evaluation/validation_loss_without_memory"
    score = subject.score("validation", empty_memory=True)
    assert result.metrics[name] == score.loss
    assert f"({score.loss:.4f})" in result.section


def test_without_long_documents_the_windows_are_compared(subject_of):
    subject = subject_of(**{"evaluation.loss_by_position.segments": 1000})
    longest = find_long_documents(subject)
    assert isinstance(longest, int)
    result = load_task("loss_by_position").run(subject)
    assert f"more than 8,000 tokens (1,000 segments). The longest document has {longest}" in (
        result.section
    )
    assert list(result.metrics) == ["evaluation/validation_loss_without_memory"]
    assert len(result.pictures) == len(result.summary) == 1
    assert load_task("loss_by_position").sequences(subject) == 0


def test_a_model_without_memory_is_a_control(subject_of):
    subject = subject_of(**{"model.memory": "none"})
    task = load_task("loss_by_position")
    result = task.run(subject)
    assert list(result.metrics) == ["evaluation/test_loss_from_segment_2"]
    assert result.metrics.keys() == result.intervals.keys()
    assert "no memory" in result.summary[0]
    assert result.advice == []
    assert task.scores(subject) == set()
    # The same documents and targets as for a model with a memory.
    assert (find_long_documents(subject).starts == find_long_documents(subject_of()).starts).all()


def test_windows_of_one_segment_need_a_number_of_segments(subject_of):
    one = {"packing.context_length": 8}
    result = load_task("loss_by_position").run(subject_of(**one))
    assert "`evaluation.loss_by_position.segments` scores longer documents" in result.section
    assert (result.metrics, result.pictures) == ({}, [])
    asked = subject_of(**one, **{"evaluation.loss_by_position.segments": 3})
    assert isinstance(find_long_documents(asked), LongDocuments)
    assert load_task("loss_by_position").run(asked).intervals


def test_a_sum_over_a_reach_counts_its_segments_only(subject_of):
    subject = subject_of()
    measured = measure(subject, find_long_documents(subject))
    sums = np.zeros_like(measured.counts)
    sums[:, 2] = 16.0
    zero, half, two = measured.over(sums, [Reach(1, 2), Reach(2, 3), Reach(3, 3)])
    assert (zero.estimate, half.estimate, two.estimate) == (0.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("interval", "begins"),
    [
        (Interval(0.05, 0.01, 0.09), "**The memory is used.**"),
        (Interval(0.05, -0.01, 0.09), "**The memory is not used**"),
        (Interval(-0.05, -0.09, -0.01), "**The memory hurts.**"),
    ],
)
def test_the_verdict_follows_the_interval(interval, begins):
    said = verdict({2: interval, 8: interval}, "on 5 documents")
    assert said.startswith(begins)
    assert "0.0500 (" in said.replace("-", "")
    assert said.endswith("on 5 documents.")
