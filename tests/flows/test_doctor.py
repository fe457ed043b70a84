"""What `infini doctor` reports about a machine, and the fixes it suggests."""

import resource
from pathlib import Path

import pytest

from flows import doctor
from infini_model.config import Config, load_config
from infini_model.training.launch.devices import Driver, Gpu

H200 = Gpu("0", 0, "NVIDIA H200", 140 << 30, 141 << 30, 3, "GPU-1")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(overrides=[f"run.output_dir={tmp_path}"])


def remedies(config: Config) -> dict[str, str]:
    return {finding.subject: finding.remedy for finding in doctor.examine(config)}


@pytest.mark.parametrize(
    ("driver", "built", "remedy"),
    [
        (Driver("580.1", (13, 0)), (13, 0), ""),
        (Driver("580.1", (13, 0)), (13, 2), ""),
        (Driver("580.1", (13, 0)), (12, 8), ""),
        (Driver("550.1", (12, 4)), (13, 0), "update the driver to support CUDA 13"),
        (Driver("580.1", (13, 0)), None, "install torch with CUDA"),
        (None, (13, 0), "install NVIDIA's driver"),
    ],
)
def test_a_driver_that_does_not_suit_torch_is_told(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    driver: Driver | None,
    built: tuple[int, int] | None,
    remedy: str,
) -> None:
    monkeypatch.setattr(doctor, "list_gpus", lambda: [H200])
    monkeypatch.setattr(doctor, "find_driver", lambda: driver)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: built)
    found = remedies(config)
    assert found["driver"].startswith(remedy)
    assert bool(found["driver"]) == bool(remedy)
    assert found["GPU 0"] == ""


def test_limits_and_folders_that_are_wrong_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 500))
    monkeypatch.setattr(doctor, "NEEDED_SHARED_GIB", 1 << 30)
    monkeypatch.setattr(doctor, "NEEDED_MEMORY_GIB", 1 << 30)
    (tmp_path / "file").write_text("")
    broken = config.run.model_copy(update={"output_dir": tmp_path / "file"})
    found = remedies(config.model_copy(update={"run": broken}))
    assert found["open files"] == "ulimit -n 500"
    assert found["memory"].startswith("close other programs")
    assert "--shm-size" in found["shared memory"]
    assert "--output-dir" in found["output folder"]
