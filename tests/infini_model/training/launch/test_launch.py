"""Trainings in child processes: how they are started, how they fail, and how that is reported."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from commands import PATIENCE, eventually
from curves import repeatable, weights
from disks import frozen
from stopping import IN_A_RANK, Halt, is_pending
from trainings import trainers

from infini_model.config import dump_config, merge
from infini_model.runtime import owner, processes
from infini_model.runtime.errors import DeviceError, RunLostError, UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training import AGENT as AGENT_ID
from infini_model.training.launch import heartbeat, launcher
from infini_model.training.launch.devices import Gpu
from infini_model.training.launch.failures import TrainingFailure
from infini_model.training.launch.launcher import Job, launch
from infini_model.training.train import train

AGENT = "infini_model.training.launch.torchrun"
BY_HAND = ["-m", "infini_model.training"]
LAUNCH = [
    "-c",
    """
import sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.training.launch.launcher import Job, launch
config, dataset, run_dir = map(Path, sys.argv[2::2])
launch(Job(load_config(file=config), dataset, run_dir))
""",
]
# It does not end by itself: not before a test has waited in vain for it to be ended.
LONG = {
    "training": {"max_steps": 100_000},
    "logging": {"eval_steps": 50},
    "checkpoint": {"save_steps": 20},
}
PAIR = merge(LONG, {"training": {"batch_size": 4}, "launch": {"processes": 2}})
# For ranks that halt for the test.
PATIENT = {"launch": {"hang_timeout_seconds": PATIENCE}}
# A rank runs `fault` after every forward pass.
SITE = (
    IN_A_RANK
    + """
    import os, signal, time, torch
    def fault(inputs, loss):
        {fault}
    def hook(module, args, output):
        return fault(args[0], output) if type(module).__name__ == "LossModule" else None
    torch.nn.modules.module.register_module_forward_hook(hook)
"""
)
# A rank hangs, until it is released, after a call of the method at `place`.
HANG = (
    IN_A_RANK
    + """
    import os, pathlib, pkgutil, time
    from infini_model.data.loading.loader import Loader
    folder, batches = pathlib.Path({folder!r}), []
    def hang():
        (folder / "hangs").touch()
        while not (folder / "released").exists():
            time.sleep(0.01)
    def patch(place, then):
        owner, _, name = place.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        original = getattr(owner, name)
        def call(*args):
            result = original(*args)
            then()
            return result
        setattr(owner, name, call)
    patch("infini_model.data.loading.loader.Loader.__next__", lambda: batches.append(None))
    if os.environ.get("RANK", "0") == "{rank}":
        patch({place!r}, lambda: len(batches) >= 3 and hang())
"""
)


def agent(run_dir):
    (found,) = [p for p in trainers(run_dir) if AGENT in p.info["cmdline"]]
    return found


def ranks(run_dir):
    everyone = [p for p in trainers(run_dir) if AGENT not in p.info["cmdline"]]
    return [p for p in everyone if "infini_model.training" in p.info["cmdline"]]


def rank_of(run_dir, number):
    (found,) = [p for p in ranks(run_dir) if p.environ()["RANK"] == str(number)]
    return found


def none_left(run_dir):
    """Wait until every process of a run has ended, those too that have only just been killed."""
    eventually(lambda: not trainers(run_dir), "the end of every process")


def has_saved_its_last_step(run_dir):
    return newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"


def ignore(_line):
    pass


def once(text, act):
    """Does something as soon as a line with `text` is printed."""
    left = [act]

    def on_line(line):
        if left and text in line:
            left.pop()()

    return on_line


@pytest.fixture
def halt(tmp_path, monkeypatch):
    """Every rank stops itself once it has logged step 6."""
    halt = Halt(tmp_path / "halt", 6)
    for name, value in halt.environment.items():
        monkeypatch.setenv(name, value)
    return halt


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Make every rank run a Python statement on each of its batches."""

    def make(fault):
        folder = tmp_path / "site"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITE.format(fault=fault))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return make


@pytest.fixture
def start(tmp_path, dataset):
    """Start a command with a configuration in the background, killed at the end of the test."""
    started = []

    def begin(command, config, run_dir):
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        command = [sys.executable, *command, "--config", file, "--dataset", dataset]
        # As a shell does: the terminal's signals go to the whole group.
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "process_group": 0}
        started.append(subprocess.Popen([*command, "--run-dir", run_dir], text=True, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def gpus_5_and_3(monkeypatch):
    """Make the launcher believe that it has reserved two GPUs; the ranks train on the CPU."""

    @contextlib.contextmanager
    def reserve(config, run_dir, **hooks):
        yield [Gpu(str(n), n, "NVIDIA H200", 0, 0, 0, f"GPU-{n}") for n in (5, 3)]

    monkeypatch.setattr(launcher, "reserve", reserve)


@pytest.mark.parametrize(
    ("victim", "where"),
    [
        (lambda run_dir: rank_of(run_dir, 1), " on rank 1 (GPU 3)"),
        pytest.param(agent, "", marks=pytest.mark.story),
    ],
    ids=["rank", "agent"],
)
def test_a_killed_process_ends_all_and_a_rank_is_named_with_its_gpu(
    dataset, make_config, tmp_path, gpus_5_and_3, victim, where, monkeypatch
):
    run_dir, in_mlflow = tmp_path / "run", []
    monkeypatch.setattr(launcher, "end_record", lambda _, status: in_mlflow.append(status))
    kill = once("Step [20/", lambda: victim(run_dir).kill())
    with pytest.raises(TrainingFailure) as caught:
        launch(Job(make_config(**PAIR), dataset, run_dir, on_line=kill))
    assert str(caught.value) == f"training failed: crash{where}: killed by SIGKILL"
    assert not caught.value.is_final
    assert in_mlflow == ["FAILED"]
    none_left(run_dir)
    for rank, gpu in enumerate((5, 3)):
        lines = (run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert any("Step [2/" in line for line in lines)
        assert all(line.startswith(f"GPU{gpu}:") for line in lines)


@pytest.mark.parametrize(
    ("command", "settings", "number", "status"),
    [
        (BY_HAND, LONG, signal.SIGTERM, 128 + signal.SIGTERM),
        (LAUNCH, LONG, signal.SIGHUP, 128 + signal.SIGHUP),
        pytest.param(LAUNCH, PAIR, signal.SIGINT, -signal.SIGINT, marks=pytest.mark.story),
        pytest.param(LAUNCH, PAIR, None, 1, marks=pytest.mark.story),
    ],
    ids=["a rank started by hand", "a closed terminal", "Ctrl-C twice", "the agent"],
)
def test_a_signal_saves_first_and_nothing_is_left(
    make_config, tmp_path, start, halt, command, settings, number, status
):
    run_dir = tmp_path / "run"
    process = start(command, make_config(**merge(settings, PATIENT)), run_dir)
    halted = halt.wait(2 if settings is PAIR else 1)
    if number is None:
        agent(run_dir).terminate()
    else:
        os.killpg(process.pid, number)
    for rank in halted:
        eventually(lambda rank=rank: is_pending(rank, signal.SIGTERM), "SIGTERM for the ranks")
    if number == signal.SIGINT:
        # The launcher acts on the first one: it waits for the ranks.
        os.killpg(process.pid, number)
    halt.resume()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == status
    assert has_saved_its_last_step(run_dir)
    # Progress is for the launcher alone.
    assert "Step [4/100000]" in output
    assert "::" not in output
    none_left(run_dir)


@pytest.mark.story
def test_a_folder_that_turns_read_only_is_named_and_the_run_resumes_once_it_is_writable(
    dataset, make_config, tmp_path, start, halt
):
    run_dir = tmp_path / "run"
    config = make_config(**PATIENT)
    process = start(LAUNCH, config, run_dir)
    halt.wait()
    checkpoints = run_dir / "checkpoints"
    with frozen(checkpoints):
        halt.resume()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert re.search(rf"{checkpoints}/step-\d+: cannot be written", errors)
    launch(Job(config, dataset, run_dir, on_line=ignore))
    train(config, dataset, tmp_path / "undisturbed")
    assert repeatable(run_dir) == repeatable(tmp_path / "undisturbed")
    assert weights(run_dir) == weights(tmp_path / "undisturbed")


@pytest.mark.story
@pytest.mark.parametrize(
    ("pid", "rank"),
    [("os.getpid()", 1), (f"int(os.environ[{AGENT_ID!r}])", None)],
    ids=["rank", "agent"],
)
def test_a_stopped_process_is_a_hang_that_names_it(
    dataset, make_config, tmp_path, faulty, pid, rank
):
    run_dir = tmp_path / "run"
    config = make_config(**merge(PAIR, {"launch": {"hang_timeout_seconds": 3}}))
    # In the first validation, where the silence of a slow rank is no hang for half an hour.
    faulty(f"os.environ['RANK'] == '1' and os.kill({pid}, signal.SIGSTOP); time.sleep(600)")
    with pytest.raises(TrainingFailure, match=r"hang.*has been stopped for 3 s") as caught:
        launch(Job(config, dataset, run_dir, on_line=ignore))
    assert caught.value.rank == rank
    none_left(run_dir)


class HangClock:
    """The launcher's clock. It stands still until a rank hangs and the others have come as far.

    From then on a minute passes, a second with each look; then the rank is released.
    """

    def __init__(self, folder, run_dir, rank, ranks):
        self.folder, self.run_dir, self.rank = folder, run_dir, rank
        self.others = set(range(ranks)) - {rank}
        self.now = 0.0

    def reached(self, rank):
        path = self.run_dir / "logs" / "heartbeats" / f"rank-{rank}"
        return int(path.read_text().split()[0])

    def others_follow(self):
        return all(self.reached(other) >= self.reached(self.rank) for other in self.others)

    def monotonic(self):
        if self.now >= 60.0:
            (self.folder / "released").touch()
        elif (self.folder / "hangs").exists():
            if self.now == 0.0:
                eventually(self.others_follow, "the others to come as far")
            self.now += 1.0
        return self.now

    def sleep(self, _seconds):
        # The rank may have to wait for a core before it can write.
        log = self.run_dir / "logs" / f"rank-{self.rank}.log"
        eventually(lambda: "in hang" in log.read_text(), "the stack")


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Make a rank hang at the end of a method, from its third batch on; returns the clock."""

    def make(place, rank, ranks):
        (tmp_path / "sitecustomize.py").write_text(
            HANG.format(place=place, rank=rank, folder=str(tmp_path))
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        clock = HangClock(tmp_path, tmp_path / "run", rank, ranks)
        monkeypatch.setattr(heartbeat, "time", clock)
        return clock

    return make


@pytest.mark.parametrize(
    ("settings", "last"),
    [(LONG, 0), pytest.param(PAIR, 1, marks=pytest.mark.story)],
    ids=["one rank", "two"],
)
def test_a_rank_that_hangs_leaves_its_stack(
    dataset, make_config, tmp_path, hanging, settings, last
):
    hanging("infini_model.objectives.objective.LossModule.forward", rank=last, ranks=last + 1)
    config = make_config(**merge(settings, {"launch": {"hang_timeout_seconds": 10}}))
    with pytest.raises(TrainingFailure, match=r"hang.*no step within 10 s") as caught:
        launch(Job(config, dataset, tmp_path / "run", on_line=ignore))
    # On the CPU the other rank waits within the same step, so that neither is behind.
    assert caught.value.rank == (0 if settings is LONG else None)
    none_left(tmp_path / "run")


@pytest.mark.story
def test_a_slow_checkpoint_of_one_rank_is_no_hang(dataset, make_config, tmp_path, hanging):
    clock = hanging("infini_model.training.checkpoint.Checkpointer.save", rank=0, ranks=2)
    pair = {"training": {"batch_size": 4}, "launch": {"processes": 2, "hang_timeout_seconds": 10}}
    launch(Job(make_config(**pair), dataset, tmp_path / "run", on_line=ignore))
    assert clock.now == 60.0
    assert has_saved_its_last_step(tmp_path / "run")


def test_a_training_that_is_ended_from_outside_is_saved(dataset, make_config, tmp_path):
    """By a signal to its ranks, or by a loss of its run."""
    run_dir = tmp_path / "run"

    def preempt():
        for process in ranks(run_dir):
            process.terminate()

    def lose():
        owner._lost[run_dir.resolve()] = RunLostError("taken over")

    for act, error, message in (
        (preempt, TrainingFailure, r"^training stopped: preempted: .*step \d+ is saved$"),
        (lose, RunLostError, "taken over"),
    ):
        then = once("Step [", act)
        with pytest.raises(error, match=message):
            launch(Job(make_config(**LONG), dataset, run_dir, on_line=then))
        assert has_saved_its_last_step(run_dir)
        none_left(run_dir)


def test_a_kill_by_the_oom_killer_is_out_of_memory(dataset, make_config, tmp_path, monkeypatch):
    counts, run_dir = iter([3, 4]), tmp_path / "run"
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    kill = once("Step [2/", lambda: ranks(run_dir)[0].kill())
    with pytest.raises(TrainingFailure, match="out of memory: killed by the kernel"):
        launch(Job(make_config(**LONG), dataset, run_dir, on_line=kill))


def test_ranks_share_cores_and_what_a_user_has_set_stays(monkeypatch):
    for name in ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "available_cores", lambda: 100)
    gpu = Gpu("0", 0, "NVIDIA H100", 0, 0, 0, "GPU-0")
    shared = launcher._environment([gpu], 2)
    assert (shared["OMP_NUM_THREADS"], shared["TORCHINDUCTOR_COMPILE_THREADS"]) == ("50", "32")
    assert shared["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    own = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert not launcher._environment([gpu], 2).keys() & {*own, "PYTORCH_ALLOC_CONF"}


def test_what_lets_no_training_begin_is_named_in_one_line(
    dataset, make_config, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    damaged = shutil.copytree(dataset, tmp_path / "damaged")
    next((damaged / "train").glob("*.arrow")).write_bytes(b"")
    (tmp_path / "file").write_text("")
    vast = {"vocab_size": 1 << 24, "hidden_size": 1 << 20}
    huge = {"model": vast, "launch": {"gpus": "cpu", "force": True}}
    for sections, data, run, error, message in (
        ({}, damaged, "run", UserError, str(damaged)),
        ({}, dataset, "file/run", UserError, "file/run"),
        ({"model": {"vocab_size": 100}}, dataset, "run", UserError, "model.vocab_size: 100 is les"),
        (huge, dataset, "run", TrainingFailure, "out of memory on rank 0"),
        ({"launch": {"gpus": "all"}}, dataset, "other", DeviceError, "launch.gpus=all: no GPU"),
        ({"launch": {"gpus": "3"}}, dataset, "other", DeviceError, "GPU 3 does not exist; this"),
    ):
        lines = []
        with pytest.raises(error) as caught:
            launch(Job(make_config(**sections), data, tmp_path / run, on_line=lines.append))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        errors = [line for line in lines if "ERROR" in line]
        assert error is TrainingFailure or len(errors) <= 1
    assert not (tmp_path / "other").exists()
