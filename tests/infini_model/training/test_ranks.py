"""What ranks do together: agree on settings, sum gradients, hold shards, wait for each other."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trainings import on_ranks, on_two_ranks

from infini_model.data.loading.windows import Batch
from infini_model.data.manifest import read_manifest
from infini_model.objectives import make_objective
from infini_model.runtime.errors import ConfigError, DeviceError
from infini_model.training.distributed import (
    check_agreement,
    choose_device,
    collective_timeout,
    join_world,
)
from infini_model.training.launch.devices import GPU_NUMBERS
from infini_model.training.launch.heartbeat import Heartbeat
from infini_model.training.parallel import TrainModule, build_module
from infini_model.training.train import compute_gradients, train

# 70 MB of parameters: far more than all else that a process allocates to make a model.
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "vocab_size": 256}


def disagree(folder, *settings):
    """Compare the settings of the rank with those of the other, and note what is said."""
    with join_world(settings[0][0].launch) as world:
        for number, each in enumerate(settings):
            said = "nothing"
            try:
                check_agreement(each[world.rank], "key", world)
            except ConfigError as error:
                said = str(error)
            (folder / f"{number}-{world.rank}").write_text(said)


def test_a_rank_that_was_given_a_gpu_does_not_fall_back_to_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(GPU_NUMBERS, "")
    assert choose_device("auto", 0) == torch.device("cpu")
    monkeypatch.setenv(GPU_NUMBERS, "0")
    with pytest.raises(DeviceError, match=r"gpus=auto: no CUDA device .* infini doctor"):
        choose_device("auto", 0)


def test_the_first_setting_that_differs_is_named_on_both_ranks(make_config, tmp_path):
    node = {"num_nodes": 2, "rdzv_endpoint": "first:1"}
    here = {
        "run": {"name": "r", "output_dir": str(tmp_path / "other")},
        "launch": node | {"node_rank": 1, "processes": 2, "hang_timeout_seconds": 5},
        "checkpoint": {"save_total_limit": 9},
        "stages": {"retries": 0},
        "data": {"name": "mine"},
    }
    there = make_config(run={"name": "r"}, launch=node)
    changes = ({}, {"model": {"hidden_size": 128}}, {"logging": {"eval_steps": 6}})
    on_two_ranks(disagree, tmp_path, *[(there, make_config(**here | each)) for each in changes])
    told = [
        [(tmp_path / f"{number}-{rank}").read_text() for rank in (0, 1)]
        for number in range(len(changes))
    ]
    differ = [
        "model.hidden_size is 32 on the first machine, 128",
        "logging.eval_steps is 5 on the first machine, 6",
    ]
    assert told == [
        ["nothing"] * 2,
        *([f"{each} on that of rank 1", f"{each} here"] for each in differ),
    ]


def test_a_training_does_not_begin_with_another_dataset(dataset, make_config, tmp_path):
    config, other = make_config(), tmp_path / "other"
    shutil.copytree(dataset, other)
    manifest = other / "manifest.json"
    key = read_manifest(dataset).key
    manifest.write_text(manifest.read_text().replace(key, "f" * len(key)))
    with pytest.raises(Exception, match=re.escape(f"dataset is '{key}' on the first machine")):
        on_two_ranks(train_on, config, [dataset, other], tmp_path / "run")


def test_shards_of_each_machine_need_machines_of_one_size(dataset, make_config, tmp_path):
    config = make_config(launch={"strategy": "hsdp"})
    message = (
        "launch.strategy: hsdp needs the same number of processes on every machine, not 1 and 2"
    )
    with pytest.raises(Exception, match=message):
        on_ranks(3, train_on_two_machines, config, dataset, tmp_path / "run")


def train_on_two_machines(config, dataset, run_dir):
    """Train with two ranks on the first machine and one on the second."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if int(os.environ["RANK"]) < 2 else "1"
    train(config, dataset, run_dir)


def train_on(config, datasets, run_dir):
    """Train on the dataset of this rank."""
    train(config, datasets[int(os.environ["RANK"])], run_dir)


def peak_bytes(*, forget=False):
    """Peak resident memory of this process since the last call with `forget`."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def backward(module, batches, world):
    """The gradients of a global batch, as a step computes them."""
    return compute_gradients(module, batches, world, torch.amp.GradScaler("cpu", enabled=False))


def sums_of(module, batches, world):
    """Number of gradient reductions in one backward pass, without that of the targets."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        backward(module, batches, world)
    names = ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")
    return sum(event.count for event in profiler.key_averages() if event.key in names) - 1


def measure(config, folder):
    """Save how much memory a model takes under FSDP, and how often gradients are summed."""
    objective, found = make_objective(config), {}
    tokens = torch.arange(65).reshape(1, 1, 65)
    batch = Batch(tokens, torch.tensor([[64]]), None, torch.tensor([0]))
    with join_world(config.launch) as world:
        for strategy in ("ddp", "fsdp"):
            launch = config.launch.model_copy(update={"strategy": strategy})
            asked = config.model_copy(update={"launch": launch})
            built = build_module(asked, objective, None, world)
            module = TrainModule(built, asked, world, np.ones(256, np.int32))
            backward(module, [batch], world)
            found[strategy] = [sums_of(module, [batch] * count, world) for count in (1, 3)]
            module.close()
        large = asked.model_copy(update={"model": asked.model.model_copy(update=LARGE)})
        before = peak_bytes(forget=True)
        module = build_module(large, objective, None, world)
        grown = peak_bytes() - before
        found["grown"] = grown / sum(p.numel() * p.element_size() for p in module.parameters())
        (folder / f"{world.rank}.json").write_text(json.dumps(found))


def test_ddp_sums_gradients_once_a_step_and_under_fsdp_only_rank_0_ever_has_all_of_anything(
    make_config, tmp_path
):
    model = make_config().model.model_dump() | {"vocab_size": 256}
    on_two_ranks(measure, make_config(model=model), tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    # FSDP sums those of each micro-batch, as until then a rank would hold all of them.
    for strategy, times in (("ddp", 1), ("fsdp", 3)):
        one, three = first[strategy]
        assert three == times * one > 0
    # Some of it may fit into memory that was allocated before.
    assert first["grown"] > 0.9
    # Half of it is this rank's shard.
    assert second["grown"] < 0.75


@pytest.mark.parametrize("hang_timeout", [None, 30.0, 7200.0])
def test_the_launcher_ends_a_hang_before_the_ranks_give_up_waiting(tmp_path, hang_timeout):
    heartbeat = Heartbeat(tmp_path, 0, hang_timeout)
    allowed = []
    for beat in (heartbeat.expect_long_work, heartbeat.after_gradients, heartbeat.after_gradients):
        beat()
        line = (tmp_path / "logs" / "heartbeats" / "rank-0").read_text()
        allowed.append(float(line.split()[1]))
    heartbeat.close()
    assert collective_timeout(hang_timeout).total_seconds() > max(allowed)
