"""Trainings in child processes: how they are started, how they fail, and how that is reported."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from commands import PATIENCE, eventually
from curves import curve, repeatable, weights
from disks import frozen
from ports import free_port
from stopping import Halt, is_pending
from trainings import trainers

from infini_model.config import dump_config, merge
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import open_windows
from infini_model.objectives.causal import CausalLM
from infini_model.runtime import processes
from infini_model.runtime.errors import DataError, DeviceError, UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.storage import write_json
from infini_model.training import AGENT
from infini_model.training.callbacks import heartbeat
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.launch import launcher
from infini_model.training.launch.devices import Gpu, choose_gpus
from infini_model.training.launch.failures import (
    Crashed,
    Hung,
    NonFiniteFailure,
    OutOfMemory,
    Preempted,
    TimedOut,
    explain,
)
from infini_model.training.launch.launcher import launch
from infini_model.training.launch.reservation import waiting_note
from infini_model.training.loop import train

LAUNCH = """
import sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.training.launch.launcher import launch
config, dataset, run_dir = map(Path, sys.argv[1:])
launch(load_config(file=config), dataset, run_dir)
"""
# It does not end by itself: not before a test has waited in vain for it to be ended.
LONG = {
    "training": {"max_steps": 100_000},
    "logging": {"eval_steps": 50},
    "checkpoint": {"save_steps": 20},
}
PAIR = merge(LONG, {"training": {"batch_size": 4}, "launch": {"processes": 2}})
# For ranks that halt for the test.
PATIENT = {"launch": {"hang_timeout_seconds": PATIENCE}}
# Python reads it at its start; a rank then runs `fault` after every forward pass.
SITE = """
import sys
if "infini_model.training" in sys.orig_argv and not {{
    "infini_model.runtime.processes", "infini_model.training.launch.agent"
}} & set(sys.orig_argv):
    import os, signal, time, torch
    def fault(inputs, loss):
        {fault}
    def hook(module, args, output):
        return fault(args[0], output) if type(module).__name__ == "LossModule" else None
    torch.nn.modules.module.register_module_forward_hook(hook)
"""


def has_reached(run_dir, step):
    lines = read_metrics(run_dir)
    return bool(lines) and lines[-1]["step"] >= step


def ranks(run_dir):
    agents = "infini_model.training.launch.agent"
    everyone = [p for p in trainers(run_dir) if agents not in p.cmdline()]
    return [p for p in everyone if "infini_model.training" in p.cmdline()]


def agent(run_dir):
    (found,) = [p for p in trainers(run_dir) if "infini_model.training.launch.agent" in p.cmdline()]
    return found


def rank_of(run_dir, number):
    (found,) = [p for p in ranks(run_dir) if p.environ()["RANK"] == str(number)]
    return found


def none_left(run_dir):
    """Wait until every process of a run has ended, those too that have only just been killed."""
    eventually(lambda: not trainers(run_dir), "the end of every process")


class Once:
    """Does something as soon as a line with `text` is printed."""

    def __init__(self, text, act, prefix=""):
        self.text, self.act, self.prefix, self.is_done = text, act, prefix, False

    def __call__(self, line):
        if not self.is_done and self.text in line and line.startswith(self.prefix):
            self.is_done = True
            self.act()


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


def sum_of_ids(config, dataset, consumed):
    """Identifies rank 0's part of the global batch that starts after `consumed` windows."""
    windows = open_windows(dataset, "train", config.packing, config.model.segment_length)
    training = config.training
    with Loader(
        windows, batch_size=training.batch_size, seed=config.run.seed, consumed=consumed
    ) as loader:
        return int(CausalLM().inputs(next(loader)[0]).input_ids.sum())


@pytest.fixture
def start(tmp_path, dataset):
    """Start a command with a configuration in the background, killed at the end of the test."""
    started = []

    def begin(command, config, run_dir):
        file = tmp_path / "config.yaml"
        file.write_text(dump_config(config))
        arguments = [str(file), str(dataset), str(run_dir)]
        if command != ["-c", LAUNCH]:
            flags = ("--config", "--dataset", "--run-dir")
            arguments = [x for pair in zip(flags, arguments, strict=True) for x in pair]
        started.append(
            subprocess.Popen(
                [sys.executable, *command, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # As a shell does: the terminal's signals go to the whole group.
                process_group=0,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_sigterm_to_a_rank_started_by_hand_saves_and_exits_143(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    process = start(["-m", "infini_model.training"], make_config(**LONG), run_dir)
    halt.wait()
    process.terminate()
    halt.resume()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    last = read_metrics(run_dir)[-1]["step"]
    assert newest_checkpoint(run_dir).name == f"step-{last}"
    assert "Step [4/100000]" in output
    # Progress is for the launcher alone.
    assert "::" not in output


@pytest.fixture
def gpus_5_and_3(monkeypatch):
    """Make the launcher believe that it has reserved two GPUs; the ranks train on the CPU."""

    @contextlib.contextmanager
    def reserve(config, run_dir, **hooks):
        yield [Gpu(str(n), n, "NVIDIA H200", 0, 0, 0, f"GPU-{n}") for n in (5, 3)]

    monkeypatch.setattr(launcher, "reserve", reserve)


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_is_named_with_its_gpu(
    dataset, make_config, tmp_path, gpus_5_and_3
):
    run_dir = tmp_path / "run"
    kill = Once("Step [20/", lambda: rank_of(run_dir, 1).kill())
    with pytest.raises(Crashed) as caught:
        launch(make_config(**PAIR), dataset, run_dir, on_line=kill)
    assert str(caught.value) == "training failed: crash on rank 1 (GPU 3): killed by SIGKILL"
    assert not caught.value.is_final
    none_left(run_dir)
    for rank, gpu in enumerate((5, 3)):
        lines = (run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert any("Step [2/" in line for line in lines)
        assert all(line.startswith(f"GPU{gpu}:") for line in lines)


@pytest.mark.story
def test_a_rank_that_fails_is_named_with_its_gpu(
    dataset, make_config, tmp_path, faulty, gpus_5_and_3
):
    faulty("if os.environ['RANK'] == '1': raise torch.OutOfMemoryError('CUDA out of memory')")
    lines = []
    with pytest.raises(OutOfMemory) as caught:
        launch(make_config(**PAIR), dataset, tmp_path / "run", on_line=lines.append)
    assert (
        str(caught.value) == "training failed: out of memory on rank 1 (GPU 3): CUDA out of memory"
    )
    assert any(line.startswith("GPU3:ERROR | ") for line in lines)


@pytest.mark.story
def test_progress_arrives_to_the_last_step_and_no_log_shows_it(dataset, make_config, tmp_path):
    run_dir, progress, lines = tmp_path / "run", [], []
    config = make_config(training={"batch_size": 4}, launch={"processes": 2})
    report = lambda *counts: progress.append(counts)  # noqa: E731
    launch(config, dataset, run_dir, on_line=lines.append, on_progress=report)
    assert progress[-1] == (12, 12)
    assert len(progress) > 1
    assert progress == sorted(set(progress))
    assert any("Step [12/12]" in line for line in lines)
    logs = [(run_dir / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert all("Step [12/12]" in log for log in logs)
    assert not any("::" in line for line in [*lines, *"".join(logs).splitlines()])


@pytest.mark.story
def test_no_rank_outlives_a_killed_agent(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    kill = Once("Step [20/", lambda: agent(run_dir).kill())
    with pytest.raises(Crashed, match="killed by SIGKILL"):
        launch(make_config(**PAIR), dataset, run_dir, on_line=kill)
    none_left(run_dir)


@pytest.mark.story
def test_no_process_outlives_a_killed_launcher(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    process = start(["-c", LAUNCH], make_config(**merge(PAIR, PATIENT)), run_dir)
    halt.wait(2)
    process.kill()
    none_left(run_dir)


@pytest.mark.story
def test_a_launcher_that_is_stopped_finds_the_training_finished(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    pair = {"training": {"batch_size": 4}, "launch": {"processes": 2}}
    process = start(["-c", LAUNCH], make_config(**merge(pair, PATIENT)), run_dir)
    halt.wait(2)
    process.send_signal(signal.SIGSTOP)
    launcher = psutil.Process(process.pid)
    eventually(lambda: launcher.status() == psutil.STATUS_STOPPED, "the stop of the launcher")
    halt.resume()
    eventually(lambda: not ranks(run_dir), "the end of the ranks")
    assert (run_dir / "model").exists()
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=PATIENCE) == 0
    none_left(run_dir)


@pytest.mark.story
def test_sigterm_to_an_agent_saves_first(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    process = start(["-c", LAUNCH], make_config(**merge(PAIR, PATIENT)), run_dir)
    halted = halt.wait(2)
    agent(run_dir).terminate()
    for rank in halted:
        eventually(lambda rank=rank: is_pending(rank, signal.SIGTERM), "SIGTERM for the ranks")
    halt.resume()
    assert process.wait(timeout=PATIENCE) != 0
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    none_left(run_dir)


@pytest.mark.story
def test_a_folder_that_turns_read_only_is_named_and_the_run_resumes_once_it_is_writable(
    dataset, make_config, tmp_path, start, halt
):
    run_dir = tmp_path / "run"
    config = make_config(**PATIENT)
    process = start(["-c", LAUNCH], config, run_dir)
    halt.wait()
    checkpoints = run_dir / "checkpoints"
    with frozen(checkpoints) as done:
        if not done:
            pytest.skip("needs the right to mount a folder read-only")
        halt.resume()
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert re.search(rf"{checkpoints}/step-\d+: cannot be written", errors)
    launch(config, dataset, run_dir, on_line=lambda _: None)
    train(config, dataset, tmp_path / "undisturbed")
    assert repeatable(run_dir) == repeatable(tmp_path / "undisturbed")
    assert weights(run_dir) == weights(tmp_path / "undisturbed")


@pytest.mark.story
@pytest.mark.parametrize(("victim", "rank"), [("rank", 1), ("agent", None)])
def test_a_stopped_process_is_a_hang_that_names_it(
    dataset, make_config, tmp_path, faulty, victim, rank
):
    run_dir = tmp_path / "run"
    config = make_config(**merge(PAIR, {"launch": {"hang_timeout_seconds": 3}}))
    # In the first validation, where the silence of a slow rank is no hang for half an hour.
    pid = "os.getpid()" if victim == "rank" else f"int(os.environ[{AGENT!r}])"
    faulty(f"os.environ['RANK'] == '1' and os.kill({pid}, signal.SIGSTOP); time.sleep(600)")
    with pytest.raises(Hung, match="has been stopped for 3 s") as caught:
        launch(config, dataset, run_dir, on_line=lambda _: None)
    assert caught.value.rank == rank
    none_left(run_dir)


def test_a_rank_that_hangs_leaves_its_stack(dataset, make_config, tmp_path, faulty, monkeypatch):
    run_dir, clock = tmp_path / "run", Clock()
    log = run_dir / "logs" / "rank-0.log"
    # The rank may have to wait for a core before it can write.
    clock.sleep = lambda _: eventually(lambda: "in _take_step" in log.read_text(), "the stack")
    monkeypatch.setattr(heartbeat, "time", clock)
    config = make_config(**merge(LONG, {"launch": {"hang_timeout_seconds": 10}}))
    # The third step is the first that is limited.
    faulty(f"inputs.input_ids.sum() == {sum_of_ids(config, dataset, 2 * 8)} and time.sleep(3600)")
    with pytest.raises(Hung, match="no step within 10 s") as caught:
        launch(config, dataset, run_dir, on_line=lambda _: None)
    assert caught.value.rank == 0
    none_left(run_dir)
    assert "in fault" in log.read_text()


def test_a_terminal_that_is_closed_saves_first(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    process = start(["-c", LAUNCH], make_config(**merge(LONG, PATIENT)), run_dir)
    (rank,) = halt.wait()
    os.killpg(process.pid, signal.SIGHUP)
    eventually(lambda: is_pending(rank, signal.SIGTERM), "SIGTERM for the rank")
    halt.resume()
    assert process.wait(timeout=PATIENCE) == 128 + signal.SIGHUP
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    none_left(run_dir)


@pytest.mark.story
def test_ctrl_c_in_a_terminal_saves_first_however_often(make_config, tmp_path, start, halt):
    run_dir = tmp_path / "run"
    process = start(["-c", LAUNCH], make_config(**merge(PAIR, PATIENT)), run_dir)
    halted = halt.wait(2)
    os.killpg(process.pid, signal.SIGINT)
    for rank in halted:
        eventually(lambda rank=rank: is_pending(rank, signal.SIGTERM), "SIGTERM for the ranks")
    # The launcher acts on the first one: it waits for the ranks.
    os.killpg(process.pid, signal.SIGINT)
    halt.resume()
    assert process.wait(timeout=PATIENCE) == -signal.SIGINT
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    none_left(run_dir)


class Clock:
    """The clock of the launcher, which a test sets forward."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead


@pytest.mark.story
def test_a_training_that_takes_too_long_is_saved_and_ended(
    dataset, make_config, tmp_path, monkeypatch
):
    run_dir, clock = tmp_path / "run", Clock()
    monkeypatch.setattr(processes, "time", clock)
    later = Once("Step [10/", lambda: setattr(clock, "ahead", 3600.0))
    with pytest.raises(TimedOut, match="not finished after 3600 s"):
        launch(make_config(**LONG), dataset, run_dir, timeout_seconds=3600, on_line=later)
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    none_left(run_dir)


def test_an_error_in_the_caller_ends_the_training(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"

    def leave(line):
        if "Step [10/" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(make_config(**LONG), dataset, run_dir, on_line=leave)
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    none_left(run_dir)


def test_a_preemption_is_reported_as_a_stop(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"

    def preempt(line):
        if "Step [10/" in line:
            for process in ranks(run_dir):
                process.terminate()

    with pytest.raises(Preempted, match=r"^training stopped: preempted: .*step \d+ is saved$"):
        launch(make_config(**LONG), dataset, run_dir, on_line=preempt)


def test_non_finite_numbers_are_reported(make_config, tmp_path, start):
    config = make_config(training={"learning_rate": 1e30})
    process = start(["-m", "infini_model.training"], config, tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 3
    assert len(errors.splitlines()) == 1
    failure = explain(tmp_path / "run", 3)
    assert isinstance(failure, NonFiniteFailure)
    assert failure.rank == 0
    assert "the step was not taken" in str(failure)


def test_a_failed_allocation_is_out_of_memory(dataset, make_config, tmp_path):
    config = make_config(model={"vocab_size": 1 << 44}, launch={"force": True})
    with pytest.raises(OutOfMemory, match="allocate"):
        launch(config, dataset, tmp_path / "run", on_line=lambda _: None)


def test_a_kill_by_the_oom_killer_is_out_of_memory(dataset, make_config, tmp_path, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr(processes, "oom_kills", lambda: next(counts))
    run_dir = tmp_path / "run"
    kill = Once("Step [2/", lambda: ranks(run_dir)[0].kill())
    with pytest.raises(OutOfMemory, match="killed by the kernel"):
        launch(make_config(**LONG), dataset, run_dir, on_line=kill)


@pytest.mark.story
def test_out_of_memory_is_retried_with_smaller_micro_batches(
    dataset, make_config, tmp_path, faulty
):
    config = make_config(evaluation={"max_windows": 8})
    train(config, dataset, tmp_path / "whole")
    faulty("if len(inputs.input_ids) > 2: raise torch.OutOfMemoryError('CUDA out of memory')")
    run_dir, lines = tmp_path / "run", []
    for _ in range(2):
        with pytest.raises(OutOfMemory) as caught:
            launch(config, dataset, run_dir, on_line=lambda _: None)
        assert not caught.value.is_final
    launch(config, dataset, run_dir, on_line=lines.append)
    assert lines[0] == (
        "Resuming after: out of memory at step 1; batch_size 2, gradient_accumulation_steps 4, "
        "the same global batch"
    )
    positions = [read_position(newest_checkpoint(tmp_path / name)) for name in ("whole", "run")]
    assert positions[0].consumed == positions[1].consumed
    for name in ("train/loss", "validation/loss"):
        whole, parts = (curve(tmp_path / folder, name) for folder in ("whole", "run"))
        assert parts == pytest.approx(whole, abs=5e-5)


@pytest.mark.story
def test_a_non_finite_batch_is_skipped_as_if_it_had_never_been_there(
    dataset, make_config, tmp_path, faulty
):
    config = make_config(launch={"skip_non_finite": True})
    consumed = 6 * 8
    expected = {"attempts": [], "micro_batch_divisor": 1, "skipped": [consumed]}
    write_json(tmp_path / "expected" / "recovery.json", expected)
    train(config, dataset, tmp_path / "expected")
    culprit = sum_of_ids(config, dataset, consumed)
    faulty(f"return loss * float('nan') if inputs.input_ids.sum() == {culprit} else None")
    run_dir = tmp_path / "run"
    with pytest.raises(NonFiniteFailure, match="step 7") as caught:
        launch(config, dataset, run_dir, on_line=lambda _: None)
    assert caught.value.consumed == consumed
    assert not caught.value.is_final
    launch(config, dataset, run_dir, on_line=lambda _: None)
    assert repeatable(run_dir) == repeatable(tmp_path / "expected")
    assert weights(run_dir) == weights(tmp_path / "expected")
    assert read_position(newest_checkpoint(run_dir)).consumed == (12 + 1) * 8


def test_damaged_data_is_a_user_error(dataset, make_config, tmp_path):
    damaged = tmp_path / dataset.name
    shutil.copytree(dataset, damaged)
    next((damaged / "train").glob("*.arrow")).write_bytes(b"")
    with pytest.raises(DataError) as caught:
        launch(make_config(), damaged, tmp_path / "run", on_line=lambda _: None)
    assert str(damaged) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_user_error_is_one_line_and_exit_2(make_config, tmp_path, start):
    config = make_config(model={"vocab_size": 100})
    process = start(["-m", "infini_model.training"], config, tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    failure = explain(tmp_path / "run", 2)
    assert isinstance(failure, UserError)
    assert str(failure).startswith("model.vocab_size: 100 is less")
    assert str(failure) in errors


def test_an_unwritable_run_folder_is_a_user_error(dataset, make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run"):
        launch(make_config(), dataset, tmp_path / "file" / "run", on_line=lambda _: None)


@pytest.mark.story
def test_a_second_training_waits_for_the_devices_until_the_first_is_killed(
    make_config, tmp_path, start, monkeypatch
):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    config = make_config(**LONG)
    one, two = tmp_path / "one", tmp_path / "two"
    first = start(["-c", LAUNCH], config, one)
    eventually(lambda: has_reached(one, 5), "step 5")
    second = start(["-c", LAUNCH], config, two)
    line = second.stdout.readline()
    held = f"the CPU is held by process {first.pid}, which trains {one}"
    assert line == f"Waiting for the CPU: {held}\n"
    assert waiting_note(two).read_text() == line.strip()
    assert not ranks(two)
    first.kill()
    eventually(lambda: ranks(two), "the second training")
    assert not waiting_note(two).exists()


@pytest.fixture
def two_nodes(dataset, make_config, tmp_path):
    """Run two launchers as on two machines that share the run folder; returns their errors."""

    def run(run_dir, on_line, **sections):
        endpoint = f"127.0.0.1:{free_port()}"

        def node(rank):
            where = {"num_nodes": 2, "node_rank": rank, "rdzv_endpoint": endpoint}
            shared = {
                "run": {"name": "two"},
                "training": {"batch_size": 4},
                "launch": where | {"processes": 1},
            }
            config = make_config(**merge(shared, sections))
            launch(config, dataset, run_dir, on_line=on_line)

        with ThreadPoolExecutor(2) as pool:
            return [end.exception() for end in [pool.submit(node, rank) for rank in (0, 1)]]

    return run


@pytest.mark.story
def test_two_nodes_train_as_one(dataset, make_config, tmp_path, two_nodes):
    train(make_config(), dataset, tmp_path / "one")
    assert two_nodes(tmp_path / "two", lambda _: None) == [None, None]
    one, two = (curve(tmp_path / name, "train/loss") for name in ("one", "two"))
    assert two == pytest.approx(one, abs=5e-5)


@pytest.mark.story
def test_a_rank_that_is_killed_on_one_node_ends_both(tmp_path, two_nodes):
    run_dir = tmp_path / "run"
    kill = Once("Step [20/", lambda: rank_of(run_dir, 1).kill(), prefix="GPU0:")
    ends = two_nodes(run_dir, kill, **LONG)
    assert all(isinstance(end, Crashed) for end in ends)
    assert ends[1].rank == 1
    none_left(run_dir)


def test_a_gpu_that_does_not_exist_is_named(monkeypatch, dataset, make_config, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_gpus("auto") == []
    with pytest.raises(DeviceError, match="GPU 3 does not exist; this machine has none"):
        choose_gpus("3")
    with pytest.raises(DeviceError, match=r"launch\.gpus=all: no GPU"):
        launch(make_config(launch={"gpus": "all"}), dataset, tmp_path / "run")
    assert not (tmp_path / "run").exists()
