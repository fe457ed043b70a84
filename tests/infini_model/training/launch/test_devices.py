"""The GPUs of a machine: which are found, which a training reserves, and which a rank has.

A driver of two GPUs stands in for NVML.
"""

import contextlib
import ctypes
import os
import sys
from types import SimpleNamespace

import pynvml
import pytest

from infini_model.config import load_config
from infini_model.runtime.errors import DeviceError
from infini_model.training.launch import devices, reservation
from infini_model.training.launch.devices import (
    GPU_NUMBERS,
    Gpu,
    choose_gpus,
    first_device,
    list_gpus,
    log_prefix,
    number_visible_gpus,
    physical_gpu,
)
from infini_model.training.launch.reservation import reserve, waiting_note

WHOLE = ("GPU-8932f937-d72c", "GPU-8a01b2c3-ffff")
SLICES = ("MIG-1b2c0000-aaaa", "MIG-1b2d0000-bbbb")


@pytest.fixture
def driver(monkeypatch):
    """Two GPUs; the second one is divided into two slices if the value returned says so.

    A handle is a UUID.
    """
    state = SimpleNamespace(divided=False)

    def refuse(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    replies = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: len(WHOLE),
        "DeviceGetHandleByIndex": lambda index: WHOLE[index] if index < 2 else refuse(),
        "DeviceGetUUID": lambda handle: handle,
        "DeviceGetName": lambda handle: "NVIDIA H100",
        "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=8 << 30, total=9 << 30),
        "DeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "DeviceGetUtilizationRates": refuse,
        "DeviceGetMigMode": lambda h: (1, 1) if state.divided and h == WHOLE[1] else refuse(),
        "DeviceGetMaxMigDeviceCount": lambda handle: 7,
        "DeviceGetMigDeviceHandleByIndex": lambda h, n: SLICES[n] if n < len(SLICES) else refuse(),
    }
    for name, reply in replies.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", reply)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    devices._warn_once.cache_clear()
    return state


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [("0", 0), (SLICES[0], 1), (SLICES[1], 1)]),
        ("GPU-89", [("GPU-89", 0)]),
        ("MIG-1b2d,1", [("MIG-1b2d", 1), ("1", 1)]),
    ],
)
def test_whole_gpus_have_numbers_and_slices_uuids_that_may_be_abbreviated(
    driver, monkeypatch, visible, found
):
    assert [(gpu.identifier, gpu.number) for gpu in list_gpus()] == [("0", 0), ("1", 1)]
    driver.divided = True
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(gpu.identifier, gpu.number) for gpu in list_gpus()] == found


def test_auto_means_whole_gpus_or_else_one_slice(driver, monkeypatch):
    driver.divided = True
    assert [gpu.identifier for gpu in choose_gpus("auto")] == ["0"]
    for visible, chosen in ((",".join(SLICES), SLICES[0]), (SLICES[1], SLICES[1])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.identifier for gpu in choose_gpus("auto")] == [chosen]
    # CUDA shows a process one slice, whatever its place in the list.
    assert first_device("auto") == "cuda:0"


@pytest.mark.parametrize("visible", ["GPU-8", "GPU-77", "7"])
def test_what_names_no_gpu_or_several_is_refused(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=f"{visible} does not exist; this machine has 2 GPUs"):
        list_gpus()


def test_the_gpu_of_a_rank_is_named_by_the_launcher_or_else_the_visible_ones_count(
    monkeypatch, caplog
):
    gpus = [Gpu(f"GPU-{n}", n, "NVIDIA H200", 0, 0, 0, f"GPU-{n}") for n in (5, 3)]
    monkeypatch.setattr(devices, "list_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))

    def numbered(how, launcher=None):
        # Set first, so that it is restored although the code under test sets it.
        monkeypatch.setenv(GPU_NUMBERS, launcher or "")
        if launcher is None:
            monkeypatch.delenv(GPU_NUMBERS)
        number_visible_gpus(how)
        return [physical_gpu(local_rank) for local_rank in range(3)]

    assert numbered("auto", "5") == [5, None, None]
    assert numbered("auto", "") == [None] * 3
    assert numbered("auto") == [5, 3, None]
    assert numbered("cpu") == [None] * 3
    monkeypatch.setattr(devices, "torch_cuda", lambda: None)
    devices._warn_once.cache_clear()
    assert numbered("auto") == [None] * 3
    assert choose_gpus("auto") == []
    assert "2 GPUs are not used: the installed torch was built without CUDA" in caplog.text


def test_log_lines_name_the_gpu_of_their_rank_or_the_cpu():
    assert [log_prefix(rank, gpu, 2) for rank, gpu in ((0, 5), (1, 3))] == ["GPU5", "GPU3"]
    assert [log_prefix(rank, None, 2) for rank in (0, 1)] == ["CPU0", "CPU1"]
    assert log_prefix(0, None, 1) == "CPU"


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_nvml_there_are_no_gpus_unless_cuda_works(
    driver, monkeypatch, caplog, is_installed
):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def absent(name):
        raise OSError(name)

    def library(status):
        return lambda name: SimpleNamespace(cuInit=lambda flags: status)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    if not is_installed:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert choose_gpus("auto") == []
    assert not caplog.records
    monkeypatch.setattr(ctypes, "CDLL", library(100))
    assert choose_gpus("auto") == []
    assert "and so does CUDA (error 100)" in caplog.text
    monkeypatch.setattr(ctypes, "CDLL", library(0))
    with pytest.raises(DeviceError, match=r"CUDA works, but NVML.* fails \(.*\).*gpus=cpu$"):
        choose_gpus("auto")
    assert choose_gpus("cpu") == []


class WaitedError(Exception):
    """Ends the wait."""


@pytest.fixture
def reserved(tmp_path, monkeypatch):
    """Reserve such of three GPUs as are free now; otherwise `WaitedError` holds the line."""
    three = [Gpu(str(n), n, "NVIDIA H200", 140 << 30, 141 << 30, 0, f"GPU-{n}") for n in range(3)]
    monkeypatch.setattr(devices, "list_gpus", lambda: three)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(reservation, "POLL_SECONDS", 0.01)

    @contextlib.contextmanager
    def take(name, gpus, processes=None, **nodes):
        launch = {"gpus": gpus, "processes": processes} | nodes
        run = {"output_dir": str(tmp_path), "name": "both"}
        config, lines = load_config(overrides=[{"run": run, "launch": launch}]), []
        stop = lambda: WaitedError(*lines) if lines else None  # noqa: E731
        run_dir = tmp_path / "runs" / name
        with reserve(config, run_dir, on_line=lines.append, stop=stop) as taken:
            yield [gpu.identifier for gpu in taken]

    return take


def test_auto_takes_what_is_free(reserved):
    with reserved("one", "auto", 1) as one, reserved("two", "auto", 2) as two:
        assert (one, two) == (["0"], ["1", "2"])
        held = "Waiting for 1 of 3 GPUs: GPU 0 is held by process"
        with pytest.raises(WaitedError, match=held), reserved("three", "auto", 1):
            pass
    with reserved("three", "auto") as three:
        assert three == ["0", "1", "2"]
    with (
        pytest.raises(DeviceError, match=r"launch\.processes=4: only 3 GPUs"),
        reserved("one", "auto", 4),
    ):
        pass


def test_a_list_waits_for_exactly_those_and_holds_nothing_meanwhile(reserved, tmp_path):
    with reserved("one", "1"):
        held = f"GPU 1 is held by process {os.getpid()}, which trains {tmp_path}/runs/one"
        expected = pytest.raises(WaitedError, match=f"Waiting for GPU 0, GPU 1: {held}$")
        with expected, reserved("two", "0,1"):
            pass
        assert not waiting_note(tmp_path / "runs" / "two").exists()
        with reserved("two", "0,1", 1) as first, reserved("three", "2"):
            assert first == ["0"]
        with reserved("four", "cpu") as cpu:
            assert cpu == []


def test_the_machines_of_one_training_share_a_device_and_those_of_another_do_not(reserved):
    nodes = {"num_nodes": 2, "rdzv_endpoint": "localhost:1"}
    with reserved("one", "cpu", node_rank=0, **nodes), reserved("one", "cpu", node_rank=1, **nodes):
        waiting = pytest.raises(WaitedError, match="Waiting for the CPU: the CPU is held by")
        with waiting, reserved("two", "cpu", node_rank=0, **nodes):
            pass
    with reserved("one", "cpu"), pytest.raises(WaitedError), reserved("one", "cpu"):
        pass
