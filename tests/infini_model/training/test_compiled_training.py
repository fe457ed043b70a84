"""Trainings with compiled layers: the curves of plain ones, and the same bits when resumed.

With generated code: `test_training_on_a_gpu.py`.
"""

import functools

import pytest
import torch
from curves import curve, repeatable, weights
from stopping import StopAfter
from torch._dynamo.utils import counters
from trainings import on_two_ranks

from infini_model.model.kernels import compiled
from infini_model.training.loop import train

LOSSES = ("train/loss", "validation/loss", "test/loss")


def train_traced(*arguments):
    """Train with compiled layers, without generated code, which takes minutes to build on a CPU.

    Nothing is compiled but the two halves of a layer, once: not for the pass that rebuilds DDP's
    buckets, nor for validation.
    """
    whole, compiled._compiled = torch.compile, functools.cache(compiled._compiled.__wrapped__)
    torch.compile = functools.partial(whole, backend="aot_eager")
    torch.compiler.reset()
    counters.clear()
    try:
        outcome = train(*arguments)
    finally:
        torch.compile = whole
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    return outcome


@pytest.mark.story
def test_compiled_layers_train_as_plain_ones_and_resume_to_the_same_bits(
    dataset, make_config, tmp_path
):
    settings = {"packing": {"mode": "aligned"}, "evaluation": {"max_windows": 9}}
    train(make_config(**settings), dataset, tmp_path / "plain")
    config = make_config(**settings, launch={"compile": True})
    train_traced(config, dataset, tmp_path / "whole")
    assert train_traced(config, dataset, tmp_path / "parts", [StopAfter(4)]).step == 5
    train_traced(config, dataset, tmp_path / "parts")
    assert repeatable(tmp_path / "parts") == repeatable(tmp_path / "whole")
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    for name in LOSSES:
        plain = curve(tmp_path / "plain", name)
        assert plain
        assert curve(tmp_path / "whole", name) == pytest.approx(plain, abs=5e-5)


@pytest.mark.story
def test_layers_of_several_processes_are_compiled_as_well(dataset, make_config, tmp_path):
    training = {"max_steps": 6, "gradient_accumulation_steps": 2}
    for strategy in ("ddp", "fsdp"):
        for recomputed in (False, True):
            launch = {"strategy": strategy, "gradient_checkpointing": recomputed}
            plain, ours = (
                make_config(training=training, launch=launch | {"compile": each})
                for each in (False, True)
            )
            folders = [tmp_path / f"{strategy} {recomputed} {each}" for each in (False, True)]
            on_two_ranks(train, plain, dataset, folders[0])
            on_two_ranks(train_traced, ours, dataset, folders[1])
            for name in LOSSES:
                expected = curve(folders[0], name)
                assert expected
                assert curve(folders[1], name) == pytest.approx(expected, abs=5e-5), folders[1]
