"""Background checkpoints: what is written is the snapshot, whatever happens meanwhile."""

import contextlib
import resource
import subprocess
import sys
import threading
import time

import pytest
import torch
from curves import repeatable, weights

from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError
from infini_model.training.callbacks.callback import Callback
from infini_model.training.checkpoints.background import HostCopy, Writer
from infini_model.training.checkpoints.checkpoint import newest_checkpoint
from infini_model.training.checkpoints.folders import verify_checkpoint
from infini_model.training.loop import train
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel.distributed import World

WRITE_FOREVER = """
import sys
from itertools import count
from pathlib import Path
import torch
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.llama import InfiniLlama
from infini_model.training.callbacks.callback import Callback
from infini_model.training.checkpoints.background import HostCopy
from infini_model.training.checkpoints.checkpoint import Position, save_checkpoint
from infini_model.training.parallel.distributed import World
from infini_model.training.optimizer import make_optimizer
model = InfiniLlama(ModelConfig(vocab_size=256, hidden_size=256))
optimizer = make_optimizer(model, TrainingConfig())
snapshot = HostCopy(World(0, 1, torch.device("cpu"))).take(model, optimizer)
for step in count(1):
    save_checkpoint(Path(sys.argv[1]), snapshot, Position(step, 0, 0, 1, "", None, {}), keep=2)
"""


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.close()


def test_a_job_does_not_block_the_caller_but_the_next_job_waits(writer):
    may_end, done = threading.Event(), []

    def job():
        may_end.wait()
        done.append("first")

    writer.start(job)
    writer.check()
    assert done == []
    threading.Timer(0.1, may_end.set).start()
    writer.start(lambda: done.append("second"))
    assert done[0] == "first"
    writer.wait()
    assert done == ["first", "second"]


def test_an_error_is_raised_once_by_the_next_call(writer):
    failed = threading.Event()

    def fail():
        failed.set()
        raise UserError("step-3: the disk is full")

    writer.start(fail)
    failed.wait()
    with pytest.raises(UserError, match="step-3"):
        writer.wait()
    writer.check()
    writer.wait()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_snapshot_does_not_change_with_the_training(ahead):
    torch.manual_seed(0)
    model = InfiniLlama(ModelConfig(vocab_size=11, hidden_size=16, num_attention_heads=2))
    optimizer = make_optimizer(model, TrainingConfig())
    ids = torch.randint(0, 11, (2, 128))

    def step():
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    step()
    copy = HostCopy(World(0, 1, torch.device("cpu")))
    if ahead:
        copy.preallocate(model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    snapshot = copy.take(model, optimizer)
    step()
    assert snapshot.parameters.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(snapshot.parameters[name], value)
        assert snapshot.moments[f"{name}/step"].item() == 1.0


@contextlib.contextmanager
def limit_file_size(size, step):
    """A callback that limits the size of files after `step`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(Callback):
        def after_step(self, taken, metrics):
            if taken.number == step:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        yield Fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_checkpoint_and_the_previous_one_resumes_to_the_same_bits(
    dataset, make_config, tmp_path
):
    train(make_config(), dataset, tmp_path / "whole")
    run_dir = tmp_path / "run"
    with (
        pytest.raises(UserError, match="step-8: cannot be written: File too large") as caught,
        limit_file_size(1 << 16, step=6) as fill,
    ):
        train(make_config(), dataset, run_dir, [fill])
    assert ".tmp-" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert [p.name for p in (run_dir / "checkpoints").glob("*step*")] == ["step-4"]
    train(make_config(), dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


def test_a_kill_during_a_write_leaves_only_complete_checkpoints(tmp_path):
    folder = tmp_path / "checkpoints"
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        # The third one, so that sometimes an old one is being deleted as well.
        while not ((folder / "step-2").exists() and list(folder.glob(".tmp-step-*/model/*"))):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    complete = list(folder.glob("step-*"))
    assert complete
    for checkpoint in complete:
        verify_checkpoint(checkpoint)
    assert newest_checkpoint(tmp_path) in complete
