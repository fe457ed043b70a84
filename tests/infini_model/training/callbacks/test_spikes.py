"""A loss spike is reported once, and noise is not a spike."""

import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.callbacks.spikes import MIN_LOSSES, WINDOW, SpikeDetector, past_losses
from infini_model.training.parallel.distributed import World

NOISES = {
    "normal": lambda rng, size: rng.normal(size=size),
    "slow": lambda rng, size: np.convolve(rng.normal(size=size + 19), np.ones(20), "valid") / 4,
    "uniform": lambda rng, size: rng.uniform(-2, 2, size),
}


def spikes_of(losses):
    detector = SpikeDetector()
    return {step: spike for step, loss in enumerate(losses) if (spike := detector.watch(loss))}


def curve(size, noise, width, seed, drop=4.0, pace=300.0):
    """A loss that falls from 1.5 + drop to 1.5, with noise as wide as `width`."""
    rng = np.random.default_rng(seed)
    smooth = 1.5 + drop * np.exp(-np.arange(size) / pace)
    return (smooth + width * NOISES[noise](rng, size)).tolist()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("width", [0.0, 0.001, 0.05, 0.3])
def test_a_long_noisy_curve_has_no_spike(noise, width):
    assert spikes_of(curve(20_000, noise, width, seed=1)) == {}


@settings(max_examples=50)
@given(
    noise=st.sampled_from(sorted(NOISES)),
    width=st.floats(0.0, 0.2),
    drop=st.floats(0.0, 10.0),
    pace=st.floats(5.0, 1000.0),
    seed=st.integers(0, 2**32),
    step=st.integers(MIN_LOSSES, 590),
    length=st.integers(1, 20),
)
# Within a spike this long, its losses look normal for one step and then not any more.
@example(noise="uniform", width=0.15625, drop=3.0, pace=467.0, seed=11675, step=16, length=8)
def test_a_spike_is_reported_once_at_its_first_step(noise, width, drop, pace, seed, step, length):
    losses = curve(600, noise, width, seed, drop, pace)
    assert spikes_of(losses) == {}
    # 20 deviations of the visible losses, including the fall itself.
    seen = losses[max(0, step - WINDOW) : step]
    height = 20 * 1.4826 * np.median(np.abs(np.array(seen) - np.median(seen))) + 1.0
    top = np.median(seen) + height
    for place in range(step, min(600, step + length)):
        losses[place] = top
    found = spikes_of(losses)
    assert list(found) == [step]
    assert found[step].loss == top > found[step].limit > found[step].median
    assert found[step].steps == min(WINDOW, step)


def test_the_next_spike_is_reported_again():
    losses = curve(400, "normal", 0.05, seed=2, drop=0.0)
    for place in (100, 101, 250):
        losses[place] += 3.0
    assert list(spikes_of(losses)) == [100, 250]


def test_a_new_level_is_reported_once_and_becomes_normal():
    losses = curve(400, "normal", 0.05, seed=3, drop=0.0)
    losses[200:] = [loss + 2.0 for loss in losses[200:]]
    assert list(spikes_of(losses)) == [200]


def test_past_losses_are_restored_after_an_interruption(tmp_path):
    chance = random.Random(4)
    losses = [2.0 + chance.gauss(0, 0.05) for _ in range(150)]
    file = MetricsFile(tmp_path, None)
    for step, loss in enumerate(losses, start=1):
        file.append(step, {"train/loss": loss})
        file.append(step, {"validation/loss": 9.0})
    file.close()
    world = World(0, 1, torch.device("cpu"))
    assert past_losses(tmp_path, 100, world) == losses[100 - WINDOW : 100]
    assert past_losses(tmp_path, 0, world) == []
    assert SpikeDetector(past_losses(tmp_path, 100, world)).watch(4.0)
    assert not SpikeDetector().watch(4.0)
