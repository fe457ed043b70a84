"""Background checkpoints: what is written is the snapshot, whatever happens meanwhile."""

import os
import resource
import sys
import threading

import pytest
import torch
from commands import PATIENCE, run
from curves import repeatable, weights
from trainings import in_a_fork

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

# Saves three checkpoints again and again, killed before the first change of a file, before the
# second and so on; prints how often.
WRITE_AND_DIE = """
import os, signal, sys
from itertools import count
from pathlib import Path
import torch
from infini_model.config import ModelConfig, TrainingConfig
from infini_model.model.llama import InfiniLlama
from infini_model.training.checkpoints.background import HostCopy
from infini_model.training.checkpoints.checkpoint import Position, save_checkpoint
from infini_model.training.parallel.distributed import World
from infini_model.training.optimizer import make_optimizer
model = InfiniLlama(ModelConfig(vocab_size=256, hidden_size=64, num_attention_heads=2))
optimizer = make_optimizer(model, TrainingConfig())
snapshot = HostCopy(World(0, 1, torch.device("cpu"))).take(model, optimizer)
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
def save(run_dir, fatal):
    changes = 0
    def strike(event, arguments):
        nonlocal changes
        if event in CHANGES:
            changes += 1
            if changes == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(strike)
    # The third one deletes the first.
    for step in (1, 2, 3):
        save_checkpoint(run_dir, snapshot, Position(step, 0, 0, 1, "", None, {}), keep=2)
for fatal in count(1):
    child = os.fork()
    if child == 0:
        save(Path(sys.argv[1], str(fatal)), fatal)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert status == signal.SIGKILL, status
print(fatal - 1)
"""


@pytest.fixture
def writer():
    writer = Writer()
    yield writer
    writer.close()


def test_a_job_does_not_block_the_caller_but_the_next_job_waits(writer, monkeypatch):
    may_end, done = threading.Event(), []

    def job():
        assert may_end.wait(PATIENCE)
        done.append("first")

    writer.start(job)
    writer.check()
    assert done == []
    # The job ends only when it is waited for.
    wait = writer.wait
    monkeypatch.setattr(writer, "wait", lambda: (may_end.set(), wait()))
    writer.start(lambda: done.append("second"))
    assert done[:1] == ["first"]
    wait()
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


class Fill(Callback):
    """Limits the size of files after step 6, as on a full disk."""

    def after_step(self, step, metrics):
        if step.number == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def test_a_full_disk_names_the_checkpoint_and_the_previous_one_resumes_to_the_same_bits(
    dataset, make_config, tmp_path
):
    train(make_config(), dataset, tmp_path / "whole")
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match="step-8: cannot be written: File too large") as caught:
        in_a_fork(train, make_config(), dataset, run_dir, [Fill()])
    assert ".tmp-" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert [p.name for p in (run_dir / "checkpoints").glob("*step*")] == ["step-4"]
    train(make_config(), dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


def test_a_kill_during_a_write_leaves_only_complete_checkpoints(tmp_path):
    done = run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)], dict(os.environ))
    assert done.returncode == 0, done.stderr
    killed = int(done.stdout)
    assert killed > 20
    newest = []
    for number in range(1, killed + 1):
        run_dir = tmp_path / str(number)
        complete = list((run_dir / "checkpoints").glob("step-*"))
        for checkpoint in complete:
            verify_checkpoint(checkpoint)
        newest.append(newest_checkpoint(run_dir))
        assert newest[-1] in complete or (newest[-1] is None and not complete)
    assert {path and path.name for path in newest} == {None, "step-1", "step-2", "step-3"}
