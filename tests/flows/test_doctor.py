"""What `infini doctor` reports about a machine, and the fixes it suggests."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from flows import doctor
from flows.presets import configure
from infini_model.config import Config, load_config
from infini_model.runtime.errors import DeviceError
from infini_model.training import memory_estimate
from infini_model.training.launch import devices
from infini_model.training.launch.devices import Driver, Gpu
from tasks.checks import check_training_memory

H200 = Gpu("0", 0, "NVIDIA H200", 140 << 30, 141 << 30, 3, "GPU-1", (9, 0))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Settings for a machine with one GPU."""
    monkeypatch.setattr(doctor, "list_gpus", lambda: [H200])
    return load_config(overrides=[f"run.output_dir={tmp_path}"])


def remedies(config: Config) -> dict[str, str]:
    return {finding.subject: finding.remedy for finding in doctor.examine(config)}


@pytest.mark.parametrize(
    ("driver", "built", "remedy"),
    [
        (Driver("580.1", (13, 0)), (13, 2), ""),
        (Driver("550.1", (12, 4)), (13, 0), "update the driver to support CUDA 13"),
        (Driver("580.1", (13, 0)), None, "install torch with CUDA"),
        (None, (13, 0), "install NVIDIA's driver"),
    ],
    ids=["suits", "old driver", "torch for the CPU", "no driver"],
)
def test_a_driver_that_does_not_suit_torch_is_told(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    driver: Driver | None,
    built: tuple[int, int] | None,
    remedy: str,
) -> None:
    monkeypatch.setattr(doctor, "find_driver", lambda: driver)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: built)
    found = remedies(config)
    assert found["driver"].startswith(remedy)
    assert bool(found["driver"]) == bool(remedy)


def test_what_a_gpu_needs_is_advised(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    found = remedies(config)
    assert found["GPU 0"] == ""
    assert found["flash-attn-4"] == "pip install 'infini-model[flash-attn-4]'"
    monkeypatch.setattr(doctor, "list_gpus", lambda: [replace(H200, capability=(8, 0))])
    assert remedies(config)["flash-attn"] == ""


def test_what_builds_kernels_is_missed_before_any_work_with_the_same_remedy(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: [H200])
    monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    without = tmp_path / "without"
    for lacks, remedy in (
        (lambda: monkeypatch.setattr("sysconfig.get_path", lambda *_: without), "python3.*-dev"),
        (lambda: monkeypatch.setenv("CC", str(without)), "gcc libc6-dev, or set CC"),
    ):
        lacks()
        found = remedies(config)["kernels"]
        assert re.match(f"apt-get install {remedy}", found)
        with disable_run_logger(), pytest.raises(DeviceError, match=re.escape(found)):
            check_training_memory(config)
    plain = config.model_copy(update={"model": config.model.model_copy(update={"memory": "none"})})
    with disable_run_logger():
        check_training_memory(plain)


def _refuse() -> None:
    raise DeviceError("NVML fails")


def test_scarce_shared_memory_and_folders_that_are_wrong_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "NEEDED_SHARED_GIB", 1 << 30)
    monkeypatch.setattr(doctor, "list_gpus", _refuse)
    (tmp_path / "file").write_text("")
    broken = config.run.model_copy(update={"output_dir": tmp_path / "file"})
    found = remedies(config.model_copy(update={"run": broken}))
    assert "--shm-size" in found["shared memory"]
    assert "--output-dir" in found["output folder"]
    assert "nvidia-smi" in found["GPU"]


def test_memory_is_told_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(*overrides: str, preset: str = "production", gpus: int = 0) -> doctor.Finding:
        monkeypatch.setattr(devices, "list_gpus", lambda: [H200] * gpus)
        monkeypatch.setattr(devices, "torch_cuda", lambda: (13, 0))
        monkeypatch.setattr(memory_estimate, "available_memory", lambda: 200 << 30)
        config = configure([preset], overrides=[f"run.output_dir={tmp_path}", *overrides])
        (finding,) = [each for each in doctor.examine(config) if each.subject == "training memory"]
        return finding

    fits = found(gpus=8)
    assert "(weights 3.7, gradients 3.7, moments 7.5, " in fits.found
    assert fits.remedy == ""
    whole = found("launch.strategy=ddp", gpus=8)
    assert "a training process needs about 1" in whole.found
    assert whole.remedy == "launch.strategy=fsdp would need 46 GiB a process"
    unknown = found("model={initial_weights: team/llama, segment_length: 2048}", preset="uptrain")
    assert "not known before the weights team/llama have been read" in unknown.found
    assert not any(tmp_path.iterdir())  # nothing is created


def test_mlflows_own_variables_are_shown_and_give_way_to_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*overrides: str) -> str:
        config = load_config(overrides=[f"run.output_dir={tmp_path / 'a?b%20'}", *overrides])
        (finding,) = [each for each in doctor.examine(config) if each.subject == "MLflow"]
        return finding.found

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    own = f"sqlite:///{tmp_path}/a%3Fb%2520/mlflow/mlflow.db; experiment infini-llama"
    assert shown() == own
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///of-the-team.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    assert shown() == "sqlite:///of-the-team.db (MLFLOW_TRACKING_URI); experiment ours"
    chosen = ("tracking.tracking_uri=sqlite:///mine.db", "tracking.experiment_name=mine")
    assert shown(*chosen) == "sqlite:///mine.db; experiment mine"
