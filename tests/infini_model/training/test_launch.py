"""Trainings in processes of their own, started as users start them and killed as life does."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from test_loop import curve, free_ports, repeatable, weights

from infini_model.config import dump_config
from infini_model.errors import DeviceError, UserError
from infini_model.training.checkpoint import newest_checkpoint
from infini_model.training.devices import choose_gpus
from infini_model.training.failures import (
    Crashed,
    NonFinite,
    OutOfMemory,
    Preempted,
    TimedOut,
    explain,
)
from infini_model.training.launch import launch
from infini_model.training.loop import train
from infini_model.training.metrics_file import read_metrics

LAUNCH = """
import sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.training.launch import launch
config, dataset, run_dir = map(Path, sys.argv[1:])
launch(load_config(file=config), dataset, run_dir)
"""
LONG = {"max_steps": 150, "save_steps": 20, "eval_steps": 50}


def wait_for(condition, what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {seconds} s"
        time.sleep(0.01)


def has_reached(run_dir, step):
    lines = read_metrics(run_dir)
    return bool(lines) and lines[-1]["step"] >= step


def trainers(run_dir):
    """Every live process that has the run folder among its arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(run_dir) in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def ranks(run_dir):
    agents = "infini_model.training.agent"
    everyone = [p for p in trainers(run_dir) if agents not in p.cmdline()]
    return [p for p in everyone if "infini_model.training" in p.cmdline()]


@pytest.fixture
def start(tmp_path, dataset):
    """Start a command on a configuration in the background; it is killed at the end of the test."""
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
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_training_goes_on_to_the_same_bits(dataset, make_config, tmp_path, start):
    config = make_config(training=LONG)
    train(config, dataset, tmp_path / "whole")
    run_dir = tmp_path / "killed"
    process = start(["-m", "infini_model.training"], config, run_dir)
    wait_for(lambda: has_reached(run_dir, 45), "step 45")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    train(config, dataset, run_dir)
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


def test_sigterm_to_a_rank_saves_and_exits_143(make_config, tmp_path, start):
    run_dir = tmp_path / "run"
    process = start(["-m", "infini_model.training"], make_config(training=LONG), run_dir)
    wait_for(lambda: has_reached(run_dir, 5), "step 5")
    process.terminate()
    assert process.wait(timeout=30) == 143
    last = read_metrics(run_dir)[-1]["step"]
    assert newest_checkpoint(run_dir).name == f"step-{last}"
    assert last < 150


@pytest.mark.slow
def test_no_rank_outlives_the_launcher_and_two_ranks_resume_to_the_same_bits(
    dataset, make_config, tmp_path, start
):
    config = make_config(training=LONG | {"processes": 2, "batch_size": 4})
    launch(config, dataset, tmp_path / "whole", on_line=lambda _: None)
    run_dir = tmp_path / "killed"
    process = start(["-c", LAUNCH], config, run_dir)
    wait_for(lambda: has_reached(run_dir, 45), "step 45")
    assert len(ranks(run_dir)) == 2
    process.kill()
    wait_for(lambda: not trainers(run_dir), "the end of every process", seconds=10)
    launch(config, dataset, run_dir, on_line=lambda _: None)
    assert repeatable(run_dir) == repeatable(tmp_path / "whole")
    assert weights(run_dir) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_is_the_one_named(dataset, make_config, tmp_path):
    config = make_config(training=LONG | {"processes": 2, "batch_size": 4, "max_steps": 5000})
    run_dir = tmp_path / "run"
    killed = []

    def kill_one(line):
        if "Step [20/" in line and not killed:
            killed.append(next(p for p in ranks(run_dir) if p.environ()["RANK"] == "1"))
            killed[0].kill()

    with pytest.raises(Crashed, match="killed by SIGKILL") as caught:
        launch(config, dataset, run_dir, on_line=kill_one)
    assert caught.value.rank == 1
    assert not trainers(run_dir)
    for rank in (0, 1):
        lines = (run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert any(f"[GPU {rank}] Step [2/5000]" in line for line in lines)
        assert all(line.startswith(f"GPU{rank}:") for line in lines)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_first(make_config, tmp_path, start):
    run_dir = tmp_path / "run"
    config = make_config(training=LONG | {"max_steps": 5000, "processes": 2, "batch_size": 4})
    process = start(["-c", LAUNCH], config, run_dir)
    wait_for(lambda: has_reached(run_dir, 5), "step 5")
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    assert not trainers(run_dir)


def test_a_training_that_takes_too_long_is_ended(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"
    config = make_config(training=LONG | {"max_steps": 100_000})
    with pytest.raises(TimedOut, match="not done after 6 s"):
        launch(config, dataset, run_dir, timeout_seconds=6, on_line=lambda _: None)
    assert not trainers(run_dir)


def test_an_error_in_the_caller_ends_the_training(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"

    def leave(line):
        if "Step [10/" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(make_config(training=LONG | {"max_steps": 5000}), dataset, run_dir, on_line=leave)
    assert newest_checkpoint(run_dir).name == f"step-{read_metrics(run_dir)[-1]['step']}"
    assert not trainers(run_dir)


def test_a_preempted_training_is_told_as_such(dataset, make_config, tmp_path):
    run_dir = tmp_path / "run"

    def preempt(line):
        if "Step [10/" in line:
            for process in ranks(run_dir):
                process.terminate()

    with pytest.raises(Preempted, match=r"step \d+ is saved"):
        launch(make_config(training=LONG | {"max_steps": 5000}), dataset, run_dir, on_line=preempt)


def test_numbers_that_are_not_finite_are_told_as_such(make_config, tmp_path, start):
    config = make_config(training={"learning_rate": 1e30})
    process = start(["-m", "infini_model.training"], config, tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 3
    assert len(errors.splitlines()) == 1
    failure = explain(tmp_path / "run", 3)
    assert isinstance(failure, NonFinite)
    assert failure.rank == 0
    assert "the step was not taken" in str(failure)


def test_memory_that_is_not_there_is_told_as_such(dataset, make_config, tmp_path):
    config = make_config(model={"vocab_size": 1 << 44})
    with pytest.raises(OutOfMemory, match="allocate"):
        launch(config, dataset, tmp_path / "run", on_line=lambda _: None)


def test_a_users_mistake_is_one_line_and_exit_2(make_config, tmp_path, start):
    config = make_config(model={"vocab_size": 100})
    process = start(["-m", "infini_model.training"], config, tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    failure = explain(tmp_path / "run", 2)
    assert isinstance(failure, UserError)
    assert str(failure).startswith("model.vocab_size: 100 is less")
    assert str(failure) in errors


def test_a_run_folder_that_cannot_be_written_is_a_users_mistake(dataset, make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file/run"):
        launch(make_config(), dataset, tmp_path / "file" / "run", on_line=lambda _: None)


@pytest.mark.slow
def test_two_nodes_train_as_one(dataset, make_config, tmp_path):
    """Two launchers on one machine stand for two machines that share the run folder."""
    train(make_config(), dataset, tmp_path / "one")
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    run_dir = tmp_path / "two"

    def node(rank):
        where = {"num_nodes": 2, "node_rank": rank, "rdzv_endpoint": endpoint}
        training = {"batch_size": 4, "processes": 1} | where
        config = make_config(run={"name": "two"}, training=training)
        launch(config, dataset, run_dir, timeout_seconds=120, on_line=lambda _: None)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(node, rank) for rank in (0, 1)]:
            done.result()
    one, two = (curve(tmp_path / name, "train/loss") for name in ("one", "two"))
    assert two == pytest.approx(one, abs=5e-5)


def test_a_gpu_that_does_not_exist_is_named(monkeypatch, dataset, make_config, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_gpus("auto") == []
    with pytest.raises(DeviceError, match="GPU 3 does not exist; this machine has none"):
        choose_gpus("3")
    with pytest.raises(DeviceError, match=r"training\.gpus=all: no GPU"):
        launch(make_config(training={"gpus": "all"}), dataset, tmp_path / "run")
    assert not (tmp_path / "run").exists()
