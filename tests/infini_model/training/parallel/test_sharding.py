"""FSDP beside DDP beside one process: real ranks, compared by what they leave on disk."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from curves import curve, repeatable, weights
from torch.profiler import ProfilerActivity, profile
from trainings import on_two_ranks

from infini_model.config import Config, merge
from infini_model.data.loading.windows import Batch
from infini_model.objectives import make_objective
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.loop import train
from infini_model.training.parallel.distributed import World, join_world
from infini_model.training.replica import Replica
from infini_model.training.setup import build_module

# 70 MB of parameters: far more than all else that a process allocates to make a model.
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "vocab_size": 256}


def begun_from(run_dir, other, step):
    """A copy of the run `other`, cut off after the checkpoint of `step`."""
    shutil.copytree(other, run_dir)
    for path in (run_dir / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return run_dir


@pytest.mark.story
def test_fsdp_gives_the_curve_of_one_process_and_resumes_across_strategies_and_world_sizes(
    dataset, make_config, tmp_path
):
    tied = make_config().model.model_dump() | {"tie_word_embeddings": True}
    cases = {
        "parts": {"packing": {"mode": "aligned"}, "training": {"gradient_accumulation_steps": 2}},
        "one segment": {"packing": {"context_length": 16}, "model": tied},
        "blocks": {"training": {"objective": "block_diffusion"}},
        "fp16": {"training": {"precision": "fp16"}, "launch": {"gradient_checkpointing": True}},
    }

    def config(name, strategy, batch_size=2):
        common = {
            "training": {"max_steps": 6, "batch_size": batch_size},
            "launch": {"strategy": strategy},
            "logging": {"eval_steps": 3},
            "checkpoint": {"save_steps": 2, "save_total_limit": 3},
        }
        return make_config(**merge(common, cases[name]))

    for name in cases:
        train(config(name, "fsdp", batch_size=4), dataset, tmp_path / f"{name} 1")
    whole = {name: tmp_path / f"{name} 2" for name in cases}
    for name in cases:
        on_two_ranks(train, config(name, "fsdp"), dataset, whole[name])
        rounding = 2e-3 if name == "fp16" else 5e-5
        for metric in ("train/loss", "validation/loss", "test/loss"):
            one = curve(tmp_path / f"{name} 1", metric)
            assert one
            assert curve(whole[name], metric) == pytest.approx(one, abs=rounding), (name, metric)

    again = begun_from(tmp_path / "again", whole["fp16"], 2)
    to_ddp = begun_from(tmp_path / "to ddp", whole["parts"], 4)
    from_one = begun_from(tmp_path / "from one", tmp_path / "parts 1", 4)
    to_one = begun_from(tmp_path / "to one", whole["parts"], 4)
    on_two_ranks(train, config("fp16", "fsdp"), dataset, again)
    on_two_ranks(train, config("parts", "ddp"), dataset, to_ddp)
    on_two_ranks(train, config("parts", "fsdp"), dataset, from_one)
    train(config("parts", "ddp"), dataset, to_one)
    assert repeatable(again) == repeatable(whole["fp16"])
    assert weights(again) == weights(whole["fp16"])
    for run_dir in (to_ddp, from_one, to_one):
        position = read_position(newest_checkpoint(run_dir))
        assert (position.step, position.consumed, position.global_batch) == (6, 48, 8)
        for metric in ("train/loss", "validation/loss", "test/loss"):
            expected = curve(whole["parts"], metric)
            assert curve(run_dir, metric) == pytest.approx(expected, abs=5e-5)


def _peak_bytes(*, forget: bool = False) -> int:
    """Peak resident memory of this process since the last call with `forget`."""
    if forget:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _sums(replica: Replica, batches: list[Batch]) -> int:
    """Number of gradient reductions in one backward pass, without that of the targets."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        replica.backward(batches)
    names = ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")
    return sum(event.count for event in profiler.key_averages() if event.key in names) - 1


def _measure(config: Config, world: World) -> dict[str, int]:
    objective = make_objective(config)
    replica = Replica(build_module(config, objective, None, world), config, world)
    tokens = torch.arange(65).reshape(1, 1, 65)
    batch = Batch(tokens, torch.tensor([[64]]), None, torch.tensor([0]))
    replica.backward([batch])
    found = {f"sums of {n}": _sums(replica, [batch] * n) for n in (1, 3)}
    model = config.model.model_copy(update=LARGE)
    before = _peak_bytes(forget=True)
    large = build_module(config.model_copy(update={"model": model}), objective, None, world)
    found["grown"] = _peak_bytes() - before
    found["model"] = sum(p.numel() * p.element_size() for p in large.parameters())
    return found


def _save_measured(config, folder):
    with join_world(config.launch) as world:
        found = json.dumps(_measure(config, world))
        (folder / f"{config.launch.strategy}-{world.rank}.json").write_text(found)


@pytest.mark.story
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_ddp_sums_gradients_once_a_step_and_under_fsdp_only_rank_0_ever_has_all_of_anything(
    make_config, tmp_path
):
    model = make_config().model.model_dump() | {"vocab_size": 256}
    for strategy in ("ddp", "fsdp"):
        config = make_config(model=model, launch={"strategy": strategy})
        on_two_ranks(_save_measured, config, tmp_path)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 4
    for name, measured in found.items():
        # FSDP sums those of each micro-batch, as until then a rank would hold all of them.
        times = 3 if name.startswith("fsdp") else 1
        assert measured["sums of 3"] == times * measured["sums of 1"] > 0
    size = found["fsdp-1"]["model"]
    # Some of it may fit into memory that was allocated before.
    assert found["ddp-0"]["grown"] > 0.9 * size
    assert found["fsdp-0"]["grown"] > 0.9 * size
    # Half of it is this rank's shard.
    assert found["fsdp-1"]["grown"] < 0.75 * size
