"""The tasks `loss_by_position`, `heads` and `throughput`, beside the model itself.

Long documents with the memory emptied at their start, carried over, and knocked out; windows with
layers and heads knocked out; speed by length.
"""

import math
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import draw_memory_parameters
from torch.nn import functional
from trained_run import make_dataset, make_run, settings

from infini_model.data.loading.stream import open_split
from infini_model.data.loading.windows import open_windows, sample_windows
from infini_model.evaluation.long_documents import find_long_documents, measure
from infini_model.evaluation.reporting.memory import verdict
from infini_model.evaluation.statistics import Interval, bootstrap
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks import heads, throughput
from infini_model.evaluation.tasks.task import load_task
from infini_model.model.inspection import findings
from infini_model.model.inspection.knock_out import knocked_out
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError

LENGTH, SEGMENTS = 8, 4
TOKENS = LENGTH * SEGMENTS
DIFFUSION = {
    "training.objective": "block_diffusion",
    "model.vocab_size": 257,
    "model.mask_token_id": 256,
    "model.bidirectional": True,
}
FEW_WINDOWS = {"evaluation.heads.max_windows": 6}
SHORT = {"evaluation.throughput.new_tokens": 4, "evaluation.throughput.max_seconds": 1e6}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(root, dataset folder, run folder), not to be modified by tests."""
    root = tmp_path_factory.mktemp("tasks")
    config = settings(root)
    make_run(root / "run", config, steps=(40,))
    return root, make_dataset(root, config), root / "run"


@pytest.fixture
def subject_of(made, tmp_path):
    """The run with other settings of the evaluation, or one with another model."""

    def make(**overrides):
        root, dataset, run_dir = made
        config = settings(root, **overrides)
        if config.model != settings(root).model:
            run_dir = tmp_path / "run"
            make_run(run_dir, config, steps=(40,))
        return Subject(run_dir, dataset, config)

    return make


def run(task, subject):
    return load_task(task).run(subject)


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
    subject, seen = subject_of(), []
    found = find_long_documents(subject)
    subject.on_windows = seen.append
    once = measure(subject, found)
    assert sum(seen) == len(found.starts) == load_task("loss_by_position").sequences(subject)
    subject.losses = None  # an interrupted evaluation that is repeated computes nothing again
    again = measure(subject, found)
    together = measure(subject_of(**{"evaluation.batch_size": 40}), found)
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


def test_gains_have_intervals_over_documents(subject_of):
    subject = subject_of(**{"evaluation.loss_by_position.segments": 9})
    measured = measure(subject, find_long_documents(subject))
    result = run("loss_by_position", subject)
    for start in (2, 8):
        gain = measured.gains["fresh"][:, start - 1 :].sum() / measured.counts[:, start - 1 :].sum()
        name = f"evaluation/test_memory_gain_from_segment_{start}"
        assert result.metrics[name] == pytest.approx(gain)
        low, high = result.intervals[name]
        assert low < gain < high
        assert f"evaluation/test_loss_from_segment_{start}" in result.intervals
    score = subject.score("validation", empty_memory=True)
    assert result.metrics["evaluation/validation_loss_without_memory"] == score.loss


def test_without_long_documents_the_windows_are_compared(subject_of):
    subject = subject_of(**{"evaluation.loss_by_position.segments": 1000})
    longest = find_long_documents(subject)
    result = run("loss_by_position", subject)
    assert f"more than 8,000 tokens (1,000 segments). The longest document has {longest}" in (
        result.section
    )
    assert list(result.metrics) == ["evaluation/validation_loss_without_memory"]
    assert load_task("loss_by_position").sequences(subject) == 0


def test_a_model_without_memory_is_a_control(subject_of):
    subject = subject_of(**{"model.memory": "none"})
    result = run("loss_by_position", subject)
    assert list(result.metrics) == ["evaluation/test_loss_from_segment_2"]
    assert result.metrics.keys() == result.intervals.keys()
    assert "no memory" in result.summary[0]
    assert load_task("loss_by_position").scores(subject) == set()
    # The same documents and targets as for a model with a memory.
    assert (find_long_documents(subject).starts == find_long_documents(subject_of()).starts).all()


@pytest.mark.parametrize(
    ("interval", "begins", "of_heads"),
    [
        (Interval(0.05, 0.01, 0.09), "**The memory is used.**", "The weights rely on"),
        (Interval(0.05, -0.01, 0.09), "**The memory is not used**", "Whether the weights gain"),
        # As they are shown, these are 0, or hold it.
        (Interval(-4e-5, -5e-5, -3e-5), "**The memory is not used**", "Whether the weights gain"),
        (Interval(-2e-4, -4e-4, -4e-5), "**The memory is not used**", "Whether the weights gain"),
        (Interval(-0.05, -0.09, -0.01), "**The memory hurts.**", "Without its memory the model is"),
    ],
)
def test_the_verdicts_follow_the_interval_as_it_is_shown(interval, begins, of_heads):
    found = verdict({2: interval, 8: interval}, "on 5 documents")
    assert found.startswith(begins)
    assert "-0.0000" not in found
    nothing, part = torch.zeros(1, 1), heads.Part(0, 0)
    parts = dict.fromkeys((heads.Part(), heads.Part(0), part), interval)
    measured = heads.Measured(5, "linear", nothing, nothing, parts)
    assert heads._summary(measured).startswith(of_heads)
    *_, drawn = heads._panels(measured).values()
    is_shown = "not used" not in begins
    assert drawn.item() == pytest.approx(interval.estimate if is_shown else 0.0)
    assert (findings.hurts(*interval, "linear") is not None) == ("hurts" in begins)


def test_a_single_window_is_too_few_for_a_verdict():
    interval = Interval(0.05, -math.inf, math.inf)
    nothing = torch.zeros(1, 1)
    parts = dict.fromkeys((heads.Part(), heads.Part(0)), interval)
    said = heads._summary(heads.Measured(1, "residual", nothing, nothing, parts))
    assert "cannot be told from so few windows: without it the loss changes by 0.0500 nats" in said


@pytest.mark.parametrize("memory", ["linear", "residual"])
def test_rises_are_paired_differences_with_a_bootstrap_interval_over_windows(
    made, subject_of, memory
):
    root, dataset, _ = made
    chosen = {"evaluation.heads.max_heads": None, "model.memory": memory}
    subject = subject_of(**FEW_WINDOWS, **chosen)
    draw_memory_parameters(subject.model)  # new weights of a residual memory are 0
    result, model = run("heads", subject), subject.model
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    windows = open_windows(dataset, "validation", settings(root).packing, 8)
    tokens = windows.gather(sample_windows(len(windows), 6)).tokens[:, 0]
    assert len(windows) > len(tokens) == result.details["windows"]

    def losses():
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        each = functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return each.sum(1).double().numpy()

    read = losses()
    parts = {"all": (None, None)} | {f"layer-{n}": (n, None) for n in range(layers)}
    parts |= {f"layer-{n}-head-{h}": (n, h) for n in range(layers) for h in range(heads)}
    assert result.details["gains"].keys() == parts.keys()
    for name, part in parts.items():
        with knocked_out(model, *part):
            rises = losses() - read
        (expected,) = bootstrap(rises[:, None], np.full((len(tokens), 1), 32))
        assert result.details["gains"][name] == pytest.approx(list(expected), abs=1e-6)
    gain = result.details["gains"]["all"]
    assert result.metrics["evaluation/heads/gain"] == gain[0]
    assert result.intervals["evaluation/heads/gain"] == tuple(gain[1:])
    assert "evaluation/heads/layer_1/share" in result.metrics


def test_of_many_heads_those_with_the_largest_shares_are_knocked_out(subject_of):
    result = run("heads", subject_of(**FEW_WINDOWS, **{"evaluation.heads.max_heads": 3}))
    shares = np.array(result.details["shares"])
    tried = [name.split("-") for name in result.details["gains"] if "head" in name]
    of_tried = [shares[int(layer), int(head)] for _, layer, _, head in tried]
    assert sorted(of_tried) == sorted(shares.flatten())[-3:]


def test_finished_passes_are_kept_for_these_settings_only(subject_of, monkeypatch):
    first = run("heads", subject_of(**FEW_WINDOWS))
    monkeypatch.setattr(InfiniLlama, "hidden", lambda *_, **__: None)
    assert run("heads", subject_of(**FEW_WINDOWS)) == first
    other = subject_of(**FEW_WINDOWS, **{"packing.mode": "document", "packing.remainder": "pad"})
    with pytest.raises(AttributeError):
        run("heads", other)


@pytest.mark.parametrize(
    ("task", "overrides", "expected"),
    [
        ("heads", {"model.memory": "none"}, "The model has no memory"),
        ("heads", {"packing.context_length": 8}, "The window has only one segment"),
        ("heads", {"packing.context_length": 1 << 20}, "There are no windows to score."),
        ("throughput", DIFFUSION, "Measured for causal models only."),
        ("passkey", DIFFUSION, "Not measured: the questions are for a causal model"),
        ("recall", DIFFUSION, "Not measured: the questions are for a causal model"),
        ("loss_by_position", {"packing.context_length": 8}, "A window has only one segment"),
    ],
)
def test_why_nothing_is_measured_is_said_in_one_line(subject_of, task, overrides, expected):
    subject = subject_of(**overrides)
    load_task(task).check(subject)
    result = run(task, subject)
    assert result.section.startswith(expected)
    assert "\n" not in result.section
    assert result.metrics == {}
    assert result.pictures == result.advice == []


def test_a_sample_with_guidance_is_refused_where_a_memory_holds_the_prompt(subject_of):
    subject = subject_of(**DIFFUSION, **{"evaluation.sample.unmasking.cfg_scale": 1.0})
    with pytest.raises(UserError, match="cfg_scale: needs a model without memory"):
        load_task("sample").check(subject)


def test_each_length_has_speeds_and_a_peak_and_is_kept(subject_of):
    subject = subject_of(**SHORT, **{"evaluation.throughput.lengths": [4, 1]})
    result = run("throughput", subject)
    assert list(result.details) == ["32", "128"]
    for name in ("1x", "4x"):
        for metric in ("prompt_tokens_per_second", "new_tokens_per_second"):
            assert result.metrics[f"evaluation/throughput/{name}/{metric}"] > 0
    for length, trials in result.details.items():
        assert len(trials) == throughput.MAX_TRIALS
        for trial in trials:
            reading = int(length) / trial["prompt_rate"]
            assert reading + 3 / trial["new_rate"] == pytest.approx(trial["seconds"])
    assert result.pictures[0].path.is_file()
    assert run("throughput", subject) == result


def test_a_length_that_would_take_too_long_is_named_and_left_out(subject_of):
    # Nothing reads as many tokens in a millisecond; one trial is made of the first in any case.
    lengths = {"evaluation.throughput.lengths": [1, 1_000_000]}
    subject = subject_of(**SHORT | lengths | {"evaluation.throughput.max_seconds": 1e-3})
    result = run("throughput", subject)
    assert list(result.details) == ["32"]
    assert "32,000,000 tokens" in result.section
    assert "evaluation.throughput.max_seconds" in result.section


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_peak_is_of_what_was_done_since_it_was_forgotten():
    cpu, size = torch.device("cpu"), 64 << 20
    throughput._forget_peak(cpu)
    # Mapped, since allocators may keep what is freed.
    with mmap.mmap(-1, size) as block:
        block.write(bytes(range(256)) * (size // 256))
    peak = throughput._peak_bytes(cpu)
    throughput._forget_peak(cpu)
    assert peak - throughput._peak_bytes(cpu) >= 0.5 * size
