"""Checkpoints: written while the training goes on, kept or removed, and checked when read.

That a training resumes from them to the same bits: `test_same_training.py`; from one whose writer
was killed at any moment: `test_strikes.py`.
"""

import errno
import logging
import os
import resource
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from commands import PATIENCE, eventually
from curves import repeatable, weights
from safetensors.torch import load_file
from trainings import PRELOADED, on_ranks, on_two_ranks

from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.hf import weights as weights_files
from infini_model.model.hf.config import NO_TOKENS
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import file_name
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import (
    clear_for_resume,
    newest_checkpoint,
    prune_checkpoints,
    verify_checkpoint,
)
from infini_model.training import checkpoint, tensor_files
from infini_model.training.callbacks import Callback
from infini_model.training.checkpoint import (
    BackgroundWriter,
    HostCopy,
    TrainerState,
    save_checkpoint,
)
from infini_model.training.distributed import World, join_world
from infini_model.training.optimizer import make_optimizer
from infini_model.training.setup import build_setup
from infini_model.training.train import train

WORLD = World(0, 1, torch.device("cpu"))
MODEL = ModelConfig(vocab_size=11, hidden_size=16, num_attention_heads=2, segment_length=4)


def position(step):
    return TrainerState(
        step=step,
        windows_read=step * 8,
        seed=3,
        world_size=1,
        dataset_key="key",
        config={"model": MODEL.model_dump()},
        precision="fp32",
        global_batch=8,
    )


@pytest.fixture
def trained():
    torch.manual_seed(0)
    model = InfiniLlama(MODEL)
    optimizer = make_optimizer(model, TrainingConfig())
    for _ in range(2):
        ids = torch.randint(0, 11, (2, 8))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


def save(run_dir, trained, *steps, keep=9):
    snapshot = HostCopy(WORLD).take(*trained)
    return [save_checkpoint(run_dir, snapshot, position(step), keep) for step in steps]


def test_a_checkpoint_has_no_pickle(tmp_path, trained):
    (path,) = save(tmp_path, trained, 7)
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path, trained):
    def kept():
        return {int(p.name.removeprefix("step-")) for p in (tmp_path / "checkpoints").iterdir()}

    metrics = MetricsFile(tmp_path, None)
    losses = {1: 4.0, 2: 2.0, 3: 3.0, 4: 2.5, 5: 1.0}
    expected = {1: {1}, 2: {1, 2}, 3: {2, 3}, 4: {2, 4}, 5: {2, 5}}
    for step, loss in losses.items():
        save(tmp_path, trained, step, keep=1)
        assert kept() == expected[step]
        # The validation loss of this step is recorded only later.
        metrics.append(step, {"train/loss": loss, "validation/loss": loss})
    prune_checkpoints(tmp_path, 1)
    assert kept() == {5}
    save(tmp_path, trained, 8, 10, 9, keep=2)
    assert kept() == {5, 9, 10}


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, flip_a_bit], ids=["removed", "one bit"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model/model.safetensors"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    tmp_path, trained, name, damage, caplog
):
    older, newer = save(tmp_path, trained, 4, 8)
    damage(newer / name)
    # A bit of the manifest may be one of another file's checksum.
    named = newer / ("" if name == "manifest.json" else name)
    with pytest.raises(CheckpointError, match=f"{named}.*: is "):
        verify_checkpoint(newer)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == older
    assert str(named) in caplog.text
    clear_for_resume(tmp_path, older)
    assert sorted(p.name for p in older.parent.iterdir()) == ["damaged-step-8", "step-4"]


def test_a_job_does_not_block_the_caller_but_the_next_job_waits_and_raises_its_error(monkeypatch):
    writer, may_end, done = BackgroundWriter(), threading.Event(), []

    def job():
        assert may_end.wait(PATIENCE)
        done.append("first")
        raise UserError("step-3: the disk is full")

    writer.start(job)
    writer.check()
    assert done == []
    # The job ends only when it is waited for.
    wait = writer.wait
    monkeypatch.setattr(writer, "wait", lambda: (may_end.set(), wait()))
    with pytest.raises(UserError, match="step-3"):
        writer.start(lambda: done.append("never"))
    writer.start(lambda: done.append("second"))
    writer.close()
    assert done == ["first", "second"]


def test_a_snapshot_does_not_change_with_the_training(trained):
    model, optimizer = trained
    copy = HostCopy(WORLD)
    copy.preallocation(model, optimizer)()
    before = {file_name(n): p.detach().clone() for n, p in model.named_parameters()}
    snapshot = copy.take(model, optimizer)
    ids = torch.randint(0, 11, (2, 8))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert snapshot.parameters.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(snapshot.parameters[name].values, value)
        assert snapshot.moments[f"{name}/step"].values.item() == 2.0


class Fill(Callback):
    """Limits the size of files after step 6, as on a full disk, once step 4 is saved."""

    def __init__(self, run_dir):
        self._saved = run_dir / "checkpoints" / "step-4"

    def after_step(self, step, metrics):
        if step.number == 6:
            eventually(self._saved.is_dir, "the checkpoint of step 4")
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_a_full_disk_names_the_checkpoint_and_the_previous_one_resumes_to_the_same_bits(
    dataset, make_config, tmp_path
):
    train(make_config(), dataset, tmp_path / "whole")
    run_dir = tmp_path / "run"
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with (
        ProcessPoolExecutor(1, context) as pool,
        pytest.raises(UserError, match="step-8: cannot be written: File too large") as caught,
    ):
        pool.submit(train, make_config(), dataset, run_dir, [Fill(run_dir)]).result()
    assert ".tmp-" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert [p.name for p in (run_dir / "checkpoints").glob("*step*")] == ["step-4"]
    train(make_config(), dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


def save_again(config, dataset, run_dir, target, folders, shard_bytes=None):
    """Read the newest checkpoint and save it again to `target`; the ranks work in `folders`."""
    os.chdir(folders[int(os.environ["RANK"]) % len(folders)])
    if shard_bytes is not None:
        weights_files.SHARD_BYTES = checkpoint.SHARD_BYTES = shard_bytes
    with join_world(config.launch) as world:
        setup = build_setup(config, dataset, run_dir, world)
        setup.checkpointer.save_to(target, setup.start)
        setup.checkpointer.writer.close()
        setup.loader.close()
        setup.train_module.close()


def test_sharded_checkpoints_are_whole_files_for_any_number_of_ranks(
    dataset, make_config, tmp_path
):
    def config(batch_size):
        return make_config(
            launch={"strategy": "fsdp"},
            # Rows that two and three ranks cannot divide evenly.
            model={**make_config().model.model_dump(), "intermediate_size": 35},
            training={
                **make_config().training.model_dump(),
                "max_steps": 2,
                "batch_size": batch_size,
            },
        )

    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    run_dir, pieces, again = here / "run", here / "pieces", Path("again")
    on_two_ranks(train, config(6), dataset, run_dir)
    (saved,) = (run_dir / "checkpoints").glob("step-2")
    names = ["model/model.safetensors", "optimizer.safetensors"]
    expected = [(saved / name).read_bytes() for name in names]
    optimizer = load_file(saved / "optimizer.safetensors")
    assert optimizer["model.layers.0.mlp.gate_proj.weight/exp_avg"].shape == (35, 32)

    # Files of a few tensors each, as of a large model.
    arguments = (dataset, run_dir, pieces, [here])
    on_two_ranks(save_again, config(6), *arguments, 20_000)
    verify_checkpoint(pieces / "checkpoints/step-2")
    assert len([*pieces.rglob("optimizer-*.safetensors")]) > 3
    for count, folders in ((1, [here]), (2, [here, there]), (3, [here]), (3, [here, there, there])):
        on_ranks(count, save_again, config(12 // count), dataset, pieces, again, folders)
        found = here / again / "checkpoints/step-2"
        assert [(found / name).read_bytes() for name in names] == expected, (count, folders)
        assert not (there / again).exists()
        shutil.rmtree(here / again)


def save_where_one_fails(config, dataset, run_dir, folders, failing):
    """Save as ranks in `folders`, twice: at first `failing` cannot write its rows, or another's."""
    rank, write, calls = int(os.environ["RANK"]), tensor_files._write, []
    os.chdir(folders[rank])

    def write_but_once(*args):
        calls.append(args)
        if rank == failing and len(calls) == 2 - failing:
            raise OSError(errno.ENOSPC, "full")
        write(*args)

    tensor_files._write = write_but_once
    with join_world(config.launch) as world:
        setup, writers = build_setup(config, dataset, run_dir, world), world.beside()
        snapshot = HostCopy(world).take(setup.model, setup.optimizer)
        arguments = Path("again"), snapshot, setup.state(0, 0), 1, NO_TOKENS, None, writers
        with pytest.raises(UserError, match="step-0: the disk is full"):
            save_checkpoint(*arguments)
        save_checkpoint(*arguments)
        setup.loader.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_fails_all_ranks_and_leaves_nothing(
    failing, dataset, make_config, tmp_path
):
    """Rank 0 what it is sent, rank 1 what it holds."""
    folders = [tmp_path, tmp_path / "there"] if failing == 0 else [tmp_path, tmp_path]
    folders[1].mkdir(exist_ok=True)
    config = make_config(launch={"strategy": "fsdp"})
    on_two_ranks(save_where_one_fails, config, dataset, tmp_path / "run", folders, failing)
    (folder,) = (tmp_path / "again/checkpoints").iterdir()
    verify_checkpoint(folder)
