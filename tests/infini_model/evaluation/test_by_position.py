"""The task `loss_by_position`, beside the model itself.

Long documents with the memory emptied at their start, and knocked out.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional
from trained_run import Made

from infini_model.data.loading.stream import open_split
from infini_model.evaluation.context import Pass
from infini_model.evaluation.statistics import Interval
from infini_model.evaluation.tasks import load_task
from infini_model.evaluation.tasks.by_position import find_long_documents, measure, verdict

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
    return Made(tmp_path_factory.mktemp("tasks"))


def token_losses(model, ids):
    """The loss of every token after the first, by the model's own logits."""
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0]
    return functional.cross_entropy(logits, ids[1:], reduction="none").double()


def by_segment(losses):
    return losses.view(SEGMENTS, LENGTH).sum(1).tolist()


def test_a_document_is_scored_with_the_memory_and_with_it_knocked_out(made):
    """Each way as plain forward passes of the model over the document's own tokens compute it."""
    context = made.context()
    found = find_long_documents(context)
    measured = measure(context, found)
    stream = open_split(made.dataset, found.split)
    whole = [stream.document(number) for number in range(stream.documents)]
    documents = [torch.from_numpy(d[: TOKENS + 1].astype(np.int64)) for d in whole]
    documents = [d for d in documents if len(d) == TOKENS + 1]
    assert len(documents) == len(found.starts) == found.found > 3
    assert (measured.counts == LENGTH).all()
    for number, document in enumerate(documents):
        alone = [document[i : i + LENGTH + 1] for i in range(0, TOKENS, LENGTH)]
        expected = {
            "whole": by_segment(token_losses(context.model, document)),
            "knocked_out": [float(token_losses(context.model, each).sum()) for each in alone],
        }
        for way, losses in expected.items():
            found = {"whole": measured.whole, "knocked_out": measured.without["memory"]}
            found = found[way][number].tolist()
            assert found == pytest.approx(losses, rel=1e-5), way


def test_the_noise_of_diffusion_is_the_same_on_both_sides_of_a_gain(made):
    context = made.context(**DIFFUSION)
    measured = measure(context, find_long_documents(context))
    gain = measured.without["memory"] - measured.whole
    assert gain[:, 0] == pytest.approx(0.0, abs=1e-6)
    assert (np.abs(gain[:, 1:]) > 1e-6).all()


def test_batches_do_not_matter_and_finished_ones_are_kept(made):
    context, seen = made.context(), []
    found = find_long_documents(context)
    context.on_windows = seen.append
    once = measure(context, found)
    task = load_task("loss_by_position")
    assert sum(seen) == len(found.starts) == task.work(context)[task.title]
    context.scorer = None  # an interrupted evaluation that is repeated computes nothing again
    again = measure(context, found)
    together = measure(made.context(**{"evaluation.batch_size": 40}), found)
    for first, same, close in zip(
        *((x.counts, x.whole, *x.without.values()) for x in (once, again, together)), strict=True
    ):
        assert (first == same).all()
        assert close == pytest.approx(first, rel=1e-5)


def test_the_sample_is_of_the_documents_that_are_long_enough(made):
    keys = ("evaluation.loss_by_position.segments", "evaluation.loss_by_position.max_documents")
    few = find_long_documents(made.context(**{keys[0]: 14, keys[1]: 2}))
    assert (len(few.starts), few.found, few.segments) == (2, 3, 14)
    every = find_long_documents(made.context(**{keys[0]: 14}))
    assert set(few.starts) < set(every.starts)
    lengths = np.concatenate(list(open_split(made.dataset, "test").lengths()))
    starts = np.cumsum(lengths) - lengths
    assert every.starts.tolist() == starts[lengths > 14 * LENGTH].tolist()
    # Where test has less than two, validation serves.
    assert find_long_documents(made.context(**{keys[0]: 20})).split == "validation"


def test_gains_have_intervals_over_documents(made):
    context = made.context(**{"evaluation.loss_by_position.segments": 9})
    measured = measure(context, find_long_documents(context))
    result = load_task("loss_by_position").run(context)
    for start in (2, 8):
        both = (measured.whole, measured.without["memory"])
        whole, knocked_out = (x[:, start - 1 :].sum() for x in both)
        gain = (knocked_out - whole) / measured.counts[:, start - 1 :].sum()
        name = f"evaluation/test_memory_gain_from_segment_{start}"
        assert result.metrics[name] == pytest.approx(gain)
        low, high = result.intervals[name]
        assert low < gain < high
        assert f"evaluation/test_loss_from_segment_{start}" in result.intervals
    score = context.score("validation", "memory")
    assert result.metrics["evaluation/validation_loss_without_memory"] == score.loss


def test_without_long_documents_the_windows_are_compared(made):
    context = made.context(**{"evaluation.loss_by_position.segments": 1000})
    longest = max(
        int(lengths.max())
        for split in ("validation", "test")
        for lengths in open_split(made.dataset, split).lengths()
    )
    result = load_task("loss_by_position").run(context)
    assert f"more than 8,000 tokens (1,000 segments). The longest document has {longest}" in (
        result.section
    )
    assert list(result.metrics) == ["evaluation/validation_loss_without_memory"]
    assert set(load_task("loss_by_position").work(context)) == {
        Pass("validation"),
        Pass("validation", "memory"),
    }


def test_a_model_without_memory_is_a_control(made):
    context = made.context(**{"model.memory": "none"})
    task = load_task("loss_by_position")
    result = task.run(context)
    assert list(result.metrics) == ["evaluation/test_loss_from_segment_2"]
    assert result.metrics.keys() == result.intervals.keys()
    assert "no memory" in result.summary[0]
    assert set(task.work(context)) == {task.title}
    # The same documents and targets as for a model with a memory.
    assert (find_long_documents(context).starts == find_long_documents(made.context()).starts).all()


@pytest.mark.parametrize(
    ("interval", "begins"),
    [
        (Interval(0.05, 0.01, 0.09), "**The memory is used.**"),
        (Interval(0.05, -0.01, 0.09), "**The memory is not used**, as the interval"),
        # As they are shown, these are 0, or hold it.
        (Interval(-4e-5, -5e-5, -3e-5), "**The memory is not used**"),
        (Interval(-2e-4, -4e-4, -4e-5), "**The memory is not used**"),
        (Interval(-0.05, -0.09, -0.01), "**The memory hurts.**"),
    ],
)
def test_the_verdict_follows_the_interval_as_it_is_shown(interval, begins):
    found = verdict([interval, interval], "on 5 documents")
    assert found.startswith(begins)
    assert "-0.0000" not in found


@pytest.mark.parametrize(
    ("task", "overrides", "expected"),
    [
        ("passkey", DIFFUSION, "Not measured: the questions are for a causal model"),
        ("loss_by_position", {"packing.context_length": 8}, "A window has only one segment"),
    ],
)
def test_why_nothing_is_measured_is_said_in_one_line(made, task, overrides, expected):
    context = made.context(**overrides)
    load_task(task).check(context)
    result = load_task(task).run(context)
    assert result.section.startswith(expected)
    assert "\n" not in result.section
    assert result.metrics == {}
    assert (result.pictures, result.advice) == ({}, [])
