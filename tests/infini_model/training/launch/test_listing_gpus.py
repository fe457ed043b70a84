"""Listing the GPUs that NVML or torch finds; a driver of two GPUs stands in for NVML."""

import logging
from types import SimpleNamespace

import pynvml
import pytest
import torch

from infini_model.runtime.errors import DeviceError
from infini_model.training.launch import devices
from infini_model.training.launch.devices import choose_gpus, first_device, list_gpus

WHOLE = ("GPU-8932f937-d72c", "GPU-8a01b2c3-ffff")
SLICES = ("MIG-1b2c0000-aaaa", "MIG-1b2d0000-bbbb")


@pytest.fixture
def driver(monkeypatch):
    """Two GPUs; the second one is divided into two slices if the value returned says so.

    A handle is a UUID.
    """
    state = SimpleNamespace(divided=False, error=None)

    def init():
        if state.error is not None:
            raise pynvml.NVMLError(state.error)

    def refuse(*arguments):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def mode(handle):
        return (1, 1) if state.divided and handle == WHOLE[1] else refuse()

    def slice_of(handle, index):
        return SLICES[index] if index < len(SLICES) else refuse()

    replies = {
        "Init": init,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: len(WHOLE),
        "DeviceGetHandleByIndex": lambda index: WHOLE[index] if index < 2 else refuse(),
        "DeviceGetUUID": lambda handle: handle,
        "DeviceGetIndex": WHOLE.index,
        "DeviceGetName": lambda handle: "NVIDIA H100",
        "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(free=8 << 30, total=9 << 30),
        "DeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "DeviceGetUtilizationRates": refuse,
        "DeviceGetMigMode": mode,
        "DeviceGetMaxMigDeviceCount": lambda handle: 7,
        "DeviceGetMigDeviceHandleByIndex": slice_of,
        "DeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: (
            WHOLE[1] if handle in SLICES else refuse()
        ),
    }
    for name, reply in replies.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", reply)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    devices._warn_once.cache_clear()
    return state


def listed():
    return [(gpu.identifier, gpu.number) for gpu in list_gpus()]


def test_whole_gpus_have_numbers_and_slices_their_uuids(driver, monkeypatch):
    assert listed() == [("0", 0), ("1", 1)]
    assert [gpu.capability for gpu in list_gpus()] == [(9, 0)] * 2
    driver.divided = True
    assert listed() == [("0", 0), (SLICES[0], 1), (SLICES[1], 1)]
    assert [gpu.identifier for gpu in choose_gpus("auto")] == ["0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(SLICES))
    assert [gpu.identifier for gpu in choose_gpus("auto")] == [SLICES[0]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICES[1])
    # CUDA shows a process one slice, whatever its place in the list.
    assert [gpu.identifier for gpu in choose_gpus("auto")] == [SLICES[1]]
    assert first_device("auto") == "cuda:0"


@pytest.mark.parametrize(
    ("visible", "found"),
    [("GPU-89", [("GPU-89", 0)]), ("MIG-1b2d,1", [("MIG-1b2d", 1), ("1", 1)])],
)
def test_a_uuid_may_be_abbreviated(driver, monkeypatch, visible, found):
    driver.divided = True
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert listed() == found


@pytest.mark.parametrize("visible", ["GPU-8", "GPU-77", "7"])
def test_what_names_no_gpu_or_several_is_refused(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(DeviceError, match=f"{visible} does not exist; this machine has 2 GPUs"):
        list_gpus()


def test_where_nvml_fails_torch_counts_the_gpus_and_a_warning_says_so(driver, monkeypatch, caplog):
    driver.error = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert list_gpus() == []  # no driver of CUDA: a machine without a GPU
    monkeypatch.setattr(devices, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (8 << 30, 9 << 30))
    about = SimpleNamespace(name="NVIDIA H100", uuid="1", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    with caplog.at_level(logging.WARNING):
        assert [len(choose_gpus("auto")) for _ in range(2)] == [8, 8]
    (record,) = caplog.records
    assert "torch finds 8 GPUs" in record.message
    assert devices.nvml_error() is not None


def test_gpus_that_torch_was_not_built_for_are_told(driver, monkeypatch, caplog):
    monkeypatch.setattr(devices, "torch_cuda", lambda: None)
    assert choose_gpus("auto") == []
    assert "2 GPUs are not used: the installed torch was built without CUDA" in caplog.text
