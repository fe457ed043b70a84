"""The task throughput on a small real run."""

import mmap
from pathlib import Path

import pytest
import torch
from trained_run import evaluated, make_all, make_run, settings

from infini_model.evaluation.tasks import throughput

ONLY = {"evaluation.tasks": ["throughput"], "evaluation.throughput.new_tokens": 4}
ONLY |= {"evaluation.throughput.lengths": [4, 1], "evaluation.throughput.max_seconds": 1e6}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(root, dataset folder, run folder), not to be modified by tests."""
    return make_all(tmp_path_factory.mktemp("throughput"))


def measured(made, **overrides):
    return evaluated(made, **ONLY | overrides)


def test_each_length_has_speeds_and_a_peak_and_is_kept(made):
    result = measured(made)
    assert list(result.details) == ["32", "128"]
    for name in ("1x", "4x"):
        for metric in ("prompt_tokens_per_second", "new_tokens_per_second"):
            assert result.metrics[f"evaluation/throughput/{name}/{metric}"] > 0
    trials = [trial for trials in result.details.values() for trial in trials]
    assert len(trials) == 2 * throughput.MAX_TRIALS
    for length, trials in result.details.items():
        for trial in trials:
            reading = int(length) / trial["prompt_rate"]
            assert reading + 3 / trial["new_rate"] == pytest.approx(trial["seconds"])
    assert "| 128 tokens |" in result.section
    assert result.pictures[0].path.stat().st_size > 5000
    assert measured(made) == result


def test_a_length_that_would_take_too_long_is_named_and_left_out(made):
    # Nothing reads as many tokens in a millisecond; one trial is made of the first in any case.
    lengths = {"evaluation.throughput.lengths": [1, 1_000_000]}
    result = measured(made, **lengths | {"evaluation.throughput.max_seconds": 1e-3})
    assert list(result.details) == ["32"]
    assert len(result.details["32"]) >= 1
    assert "32,000,000 tokens" in result.section
    assert "evaluation.throughput.max_seconds" in result.section


def resident_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_peak_is_of_what_was_done_since_it_was_forgotten():
    cpu, size = torch.device("cpu"), 64 << 20
    throughput._forget_peak(cpu)
    # Mapped, since allocators may keep what is freed.
    with mmap.mmap(-1, size) as block:
        block.write(bytes(range(256)) * (size // 256))
    # Not relative to what was resident before: the kernel may reclaim pages at any time.
    assert throughput._peak_bytes(cpu) - resident_bytes() >= 0.9 * size
    throughput._forget_peak(cpu)
    assert throughput._peak_bytes(cpu) - resident_bytes() < 0.5 * size


def test_a_bidirectional_model_is_not_measured(made, tmp_path):
    root, dataset, _ = made
    blocks = {"training.objective": "block_diffusion", "model.bidirectional": True}
    blocks |= {"model.mask_token_id": 256, "model.vocab_size": 257}
    make_run(tmp_path, settings(root, **blocks))
    result = measured((root, dataset, tmp_path), **blocks)
    assert result.section == "Measured for causal models only."
