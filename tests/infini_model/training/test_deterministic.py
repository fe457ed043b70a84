"""`launch.deterministic`: what a training calls has a deterministic form on CUDA.

No GPU is needed: a profile of steps on a CPU has the operators that would run there.
"""

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from infini_model.runtime.errors import ConfigError
from infini_model.training.loop import train
from infini_model.training.parallel.distributed import deterministic_algorithms

# What the documentation names by its module or another function.
RAISES = {"nll_loss2d_forward", "grid_sampler_2d_backward"}
# Made deterministic on CUDA by a copy from the host.
COPIES = {"scatter", "scatter_"}


def undesired():
    """Operators that raise on CUDA, as torch documents them, or wait for the host there."""
    documented = torch.use_deterministic_algorithms.__doc__
    raising = documented[documented.index("operations will throw a") :]
    names = set(re.findall(r":func:`torch\.(?:\w+\.)*(\w+)`", raising))
    assert {"put_", "cumsum", "histc"} <= names
    # `resize_` raises for a quantised tensor only.
    return {f"aten::{name}" for name in (names | RAISES | COPIES) - {"resize_"}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"memory": "delta"}, "packing": {"mode": "aligned"}},
        {"training": {"objective": "block_diffusion"}},
    ],
    ids=["causal", "delta", "block_diffusion"],
)
def test_no_operator_of_a_training_is_without_a_deterministic_form(
    sections, dataset, make_config, tmp_path
):
    training = sections.get("training", {}) | {"max_steps": 1, "batch_size": 2}
    config = make_config(**sections | {"training": training, "evaluation": {"max_windows": 2}})
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(config, dataset, tmp_path / "run")
    called = {event.key for event in profiled.key_averages()}
    assert {"aten::_fused_adamw_", "infini_model::loss_and_gradients"} <= called
    assert called & undesired() == set()


def test_an_operation_without_a_deterministic_form_is_an_error_that_names_the_setting():
    ones = torch.ones(3)
    with (
        pytest.raises(ConfigError, match=r"launch\.deterministic: put_ is not deterministic"),
        deterministic_algorithms(),
    ):
        ones.put_(torch.tensor([0]), torch.tensor([2.0]))
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="another"), deterministic_algorithms():
        raise RuntimeError("another")
