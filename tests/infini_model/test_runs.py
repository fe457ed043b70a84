"""Run folders: one holder, one configuration; what was interrupted goes on, what ended does not."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infini_model.config import Config, load_config
from infini_model.errors import ConfigError, DataError
from infini_model.runs import (
    claim_run,
    dataset_of,
    is_finished,
    latest_run,
    read_run_config,
)


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config("debug", overrides=[f"run.output_dir={folder}", *overrides])


def claim(config: Config, key: str = "k1", *, finish: bool = False) -> Path:
    with claim_run(config, key, Path("data")) as run_dir:
        if finish:
            (run_dir / "report.md").write_text("done")
        return run_dir


def test_an_interrupted_run_is_gone_on_with_and_a_finished_one_is_not(tmp_path: Path) -> None:
    first = claim(config_of(tmp_path))
    assert first.name == "debug-1"
    assert claim(config_of(tmp_path), finish=True) == first
    assert is_finished(first)
    second = claim(config_of(tmp_path))
    assert second.name == "debug-2"
    assert (tmp_path / "runs" / "latest").resolve() == second


def test_other_settings_or_other_data_are_another_run(tmp_path: Path) -> None:
    first = claim(config_of(tmp_path))
    assert claim(config_of(tmp_path, "training.learning_rate=1e-4")) != first
    assert claim(config_of(tmp_path), "k2") != first
    free = ("training.save_steps=3", "run.log_level=info", "training.processes=2")
    assert claim(config_of(tmp_path, *free)) == first


def test_two_at_once_never_share_a_folder(tmp_path: Path) -> None:
    with (
        claim_run(config_of(tmp_path), "k1", Path("data")) as one,
        claim_run(config_of(tmp_path), "k1", Path("data")) as two,
    ):
        assert one != two


def test_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; "
        "from infini_model.config import load_config; from infini_model.runs import claim_run\n"
        "config = load_config('debug', overrides=['run.output_dir=' + sys.argv[1]])\n"
        "with claim_run(config, 'k1', Path('data')): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert claim(config_of(tmp_path)).name == "debug-1"


def test_a_named_run_is_that_folder_or_an_error(tmp_path: Path) -> None:
    named = config_of(tmp_path, "run.name=mine")
    assert claim(named, finish=True) == claim(named) == tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match=r"run\.name: .*mine .*training\.learning_rate is"):
        claim(config_of(tmp_path, "run.name=mine", "training.learning_rate=1e-4"))
    with pytest.raises(ConfigError, match="the dataset is another"):
        claim(named, "k2")
    with claim_run(named, "k1", Path("data")), pytest.raises(ConfigError, match="in use"):
        claim(named)


def test_the_other_machines_join_the_run_that_the_first_one_holds(tmp_path: Path) -> None:
    shared = ["run.name=mine", "training.num_nodes=2", "training.rdzv_endpoint=first:29500"]
    first = config_of(tmp_path, *shared)
    second = config_of(tmp_path, *shared, "training.node_rank=1")
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(claim, second)
        with claim_run(first, "k1", Path("data")) as run_dir:
            assert joined.result(timeout=30) == run_dir


def test_a_claim_killed_before_it_began_leaves_a_usable_name(tmp_path: Path) -> None:
    (tmp_path / "runs" / "debug-1").mkdir(parents=True)
    assert claim(config_of(tmp_path)).name == "debug-1"


def test_the_configuration_of_a_run_can_be_read_back(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_dir = claim(config)
    recorded = read_run_config(run_dir)
    assert recorded.run.name == run_dir.name
    assert recorded.training == config.training
    assert latest_run(config) == run_dir
    assert dataset_of(run_dir) == Path("data").resolve()
    with pytest.raises(DataError, match="no run folder"):
        read_run_config(tmp_path)
    with pytest.raises(DataError, match="no run folder"):
        dataset_of(tmp_path)
    with pytest.raises(DataError, match="there is no such run"):
        latest_run(config_of(tmp_path / "elsewhere"))
