"""Each device trains one run at a time; a run that waits says for what and holds nothing."""

import os

import pytest

from infini_model.config import Config, load_config
from infini_model.runtime.errors import DeviceError
from infini_model.training.launch import devices, reservation
from infini_model.training.launch.devices import Gpu
from infini_model.training.launch.reservation import reserve, waiting_note

GPUS = [
    Gpu(str(number), number, "NVIDIA H200", 140 << 30, 141 << 30, 0, f"GPU-{number}")
    for number in range(3)
]


@pytest.fixture(autouse=True)
def _three_gpus(monkeypatch):
    monkeypatch.setattr(devices, "list_gpus", lambda: GPUS)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0.01)


@pytest.fixture
def config_of(tmp_path):
    def make(gpus, processes=None, **launch) -> Config:
        tree = {"gpus": gpus, "processes": processes} | launch
        shared = {"run": {"output_dir": str(tmp_path), "name": "both"}, "launch": tree}
        return load_config(overrides=[shared])

    return make


class WaitedError(Exception):
    """Ends the wait."""


@pytest.fixture
def reserved(tmp_path):
    """Reserve devices that are free now; otherwise `WaitedError` holds the line about waiting."""

    def take(config, name):
        lines = []
        stop = lambda: WaitedError(*lines) if lines else None  # noqa: E731
        return reserve(config, tmp_path / "runs" / name, on_line=lines.append, stop=stop)

    return take


def numbers(gpus):
    """As in `CUDA_VISIBLE_DEVICES`."""
    return [gpu.identifier for gpu in gpus]


def test_auto_takes_what_is_free(config_of, reserved):
    with reserved(config_of("auto", 1), "one") as one, reserved(config_of("auto", 2), "two") as two:
        assert (numbers(one), numbers(two)) == (["0"], ["1", "2"])
        with pytest.raises(WaitedError, match="Waiting for 1 of 3 GPUs: GPU 0 is held by process"):
            reserved(config_of("auto", 1), "three").__enter__()
    with reserved(config_of("auto"), "three") as all_of_them:
        assert numbers(all_of_them) == ["0", "1", "2"]


def test_a_list_waits_for_exactly_those_and_holds_nothing_meanwhile(config_of, reserved, tmp_path):
    with reserved(config_of("1"), "one"):
        held = f"GPU 1 is held by process {os.getpid()}, which trains {tmp_path}/runs/one"
        with pytest.raises(WaitedError, match=f"Waiting for GPU 0, GPU 1: {held}$"):
            reserved(config_of("0,1"), "two").__enter__()
        assert not waiting_note(tmp_path / "runs" / "two").exists()
        with reserved(config_of("0,1", 1), "two") as first, reserved(config_of("2"), "three"):
            assert numbers(first) == ["0"]
        with reserved(config_of("cpu"), "four") as cpu:
            assert cpu == []


def test_the_machines_of_one_training_share_a_device_and_those_of_another_do_not(
    config_of, reserved
):
    def node(rank):
        return config_of("cpu", num_nodes=2, node_rank=rank, rdzv_endpoint="localhost:1")

    with (
        reserved(node(0), "one"),
        reserved(node(1), "one"),
        pytest.raises(WaitedError, match="Waiting for the CPU: the CPU is held by"),
    ):
        reserved(node(0), "two").__enter__()
    with pytest.raises(WaitedError), reserved(config_of("cpu"), "one"):
        reserved(config_of("cpu"), "one").__enter__()


def test_more_processes_than_gpus_are_refused(config_of, reserved):
    with pytest.raises(DeviceError, match=r"launch\.processes=4: only 3 GPUs"):
        reserved(config_of("auto", 4), "one").__enter__()
