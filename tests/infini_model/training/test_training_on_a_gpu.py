"""Trainings on a GPU: killed and resumed, in each precision, and wrapped for several processes."""

import os
import signal

import numpy as np
import pytest
import torch
from curves import curve, repeatable, weights
from ports import free_port
from safetensors.torch import load_file
from stopping import StopAfter
from torch import distributed as dist

from infini_model.data.loading.windows import Batch
from infini_model.objectives import make_objective
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training.distributed import World
from infini_model.training.parallel import TrainModule, build_module, full_tensor, shard_model
from infini_model.training.train import compute_gradients, train

pytestmark = pytest.mark.cuda


def in_a_process(work, *arguments):
    """Run `work` in a new process; returns its exit status, negative after a signal.

    Not in a fork: CUDA cannot be used in one.
    """
    process = torch.multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.fixture
def on_gpu(make_config, gpu):
    """A configuration for the GPU, with the same bits in each run; `compiled` layers only there."""

    def make(*, compiled=False, **sections):
        device = {"gpus": "all" if gpu.type == "cuda" else "cpu", "deterministic": True}
        # On a CPU it takes minutes.
        device["compile"] = compiled and gpu.type == "cuda"
        short = {"evaluation": {"max_windows": 8}}
        return make_config(**short | sections | {"launch": device | sections.get("launch", {})})

    return make


@pytest.mark.parametrize(
    ("precision", "packing", "memory", "compiled"),
    [("bf16", "packed", "linear", False), ("fp16", "aligned", "delta", True)],
)
def test_a_killed_training_resumes_to_the_same_bits(
    on_gpu, dataset, tmp_path, precision, packing, memory, compiled
):
    shape = on_gpu().model.model_dump() | {"memory": memory}
    config = on_gpu(
        training={"precision": precision},
        packing={"mode": packing},
        model=shape,
        compiled=compiled,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config, dataset, whole)
    killed = in_a_process(train, config, dataset, parts, [StopAfter(6, signal.SIGKILL)])
    assert killed == -signal.SIGKILL
    train(config, dataset, parts)
    assert repeatable(parts) == repeatable(whole)
    assert weights(parts) == weights(whole)


def test_recomputed_layers_train_to_the_same_bits(on_gpu, dataset, tmp_path):
    for name in ("kept", "again"):
        launch = {"gradient_checkpointing": name == "again"}
        config = on_gpu(launch=launch, training={"precision": "bf16", "max_steps": 3})
        train(config, dataset, tmp_path / name)
    assert weights(tmp_path / "again") == weights(tmp_path / "kept")


def test_each_precision_learns_as_float32_on_the_cpu_and_a_run_may_move_there(
    on_gpu, make_config, dataset, tmp_path
):
    train(make_config(), dataset, tmp_path / "cpu")
    exact = curve(tmp_path / "cpu", "train/loss")
    for precision, rounding in (("fp32", 2e-3), ("fp16", 0.05), ("bf16", 0.05)):
        run_dir = tmp_path / precision
        stop = [StopAfter(8)] if precision == "fp32" else []
        train(on_gpu(training={"precision": precision}), dataset, run_dir, stop)
        if stop:
            assert max(curve(run_dir, "train/loss")) < 12
            train(make_config(training={"precision": precision}), dataset, run_dir)
        rough = curve(run_dir, "train/loss")
        assert rough == pytest.approx(exact, abs=rounding), precision
        assert rough != exact or precision == "fp32"
        assert not curve(run_dir, "train/skipped_steps")
        peaks = curve(run_dir, "train/peak_memory_megabytes")
        assert bool(peaks) == torch.cuda.is_available(), precision
        assert all(peak > 0 for peak in peaks.values()), precision
        for file in ("model/model.safetensors", "optimizer.safetensors"):
            saved = load_file(newest_checkpoint(run_dir) / file)
            assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def _gradients(module, config, world, batches):
    """The loss and the whole gradients of a backward pass."""
    lengths = np.ones(config.model.vocab_size, np.int32)
    train_module = TrainModule(module, config, world, lengths)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    loss, _ = compute_gradients(train_module, batches, world, scaler)
    train_module.close()
    return loss.item(), {n: full_tensor(p.grad).cpu() for n, p in module.named_parameters()}


def _wrapped_as_alone(config, device, port):
    """DDP and FSDP in a group of one process give the gradients of the bare module.

    They are used from two ranks on, so the world says two. The group has one, whose mean is not
    divided, so the gradients are twice as large.
    """
    alone, said = World(0, 1, device), World(0, 2, device)
    # As a training on one machine does: there may be no other network.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, rank=0, world_size=1)
    objective = make_objective(config)
    tokens = torch.randint(256, (2, 1, 65), device=device)
    batches = [Batch(tokens, None, None, torch.arange(2, device=device))] * 2
    plain = build_module(config, objective, None, alone)
    expected_loss, expected = _gradients(plain, config, alone, batches)
    on_cpu = build_module(config, objective, None, World(0, 1, torch.device("cpu")))
    modules = {
        "ddp": build_module(config, objective, None, alone),
        "fsdp": shard_model(on_cpu.model, objective, alone),
    }
    for strategy, module in modules.items():
        launch = config.launch.model_copy(update={"strategy": strategy})
        changed = config.model_copy(update={"launch": launch})
        loss, gradients = _gradients(module, changed, said, batches)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(
                gradient / 2, expected[name], rtol=0, atol=2e-2 * largest, msg=f"{strategy} {name}"
            )
    dist.destroy_process_group()


def test_ddp_and_fsdp_of_one_process_give_the_gradients_of_the_bare_module(on_gpu, gpu):
    shape = on_gpu().model.model_dump() | {"vocab_size": 256}
    config = on_gpu(model=shape, training={"precision": "bf16"}, compiled=True)
    assert in_a_process(_wrapped_as_alone, config, gpu, free_port()) == 0
