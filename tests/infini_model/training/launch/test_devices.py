"""The physical GPU of a rank, from the launcher or from the visible devices."""

import pytest

from infini_model.training.launch import devices
from infini_model.training.launch.devices import (
    GPU_NUMBERS,
    Gpu,
    gpu_numbers,
    number_visible_gpus,
    physical_gpu,
)

GPUS = [Gpu(f"GPU-{n}", n, "NVIDIA H200", 0, 0, 0, f"GPU-{n}") for n in (5, 3)]


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch):
    # Set first, so that it is restored although the code under test sets it.
    monkeypatch.setenv(GPU_NUMBERS, "")
    monkeypatch.delenv(GPU_NUMBERS)
    monkeypatch.setattr(devices, "list_gpus", lambda: GPUS)
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))


def numbered():
    return [physical_gpu(local_rank) for local_rank in range(3)]


def test_the_launcher_passes_the_gpu_numbers(monkeypatch):
    assert numbered() == [None, None, None]
    monkeypatch.setenv(GPU_NUMBERS, gpu_numbers(GPUS[:1]))
    number_visible_gpus("auto")
    assert numbered() == [5, None, None]
    monkeypatch.setenv(GPU_NUMBERS, gpu_numbers([]))
    number_visible_gpus("auto")
    assert numbered() == [None, None, None]


@pytest.mark.parametrize(("gpus", "numbers"), [("auto", [5, 3, None]), ("cpu", [None] * 3)])
def test_without_a_launcher_the_visible_gpus_count(gpus, numbers):
    number_visible_gpus(gpus)
    assert numbered() == numbers


def test_a_torch_without_cuda_trains_on_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "torch_cuda", lambda: None)
    number_visible_gpus("auto")
    assert numbered() == [None, None, None]
