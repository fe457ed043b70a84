"""Run folders: their records can be read back, also those of earlier versions."""

import json
from pathlib import Path

import pytest
import yaml
from claiming import UI, claim, config_of

from infini_model.config.moved import MOVED
from infini_model.runtime.claims import resume_config
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.runs import (
    dataset_of,
    is_finished,
    latest_run,
    owner_of,
    read_run_config,
    record_evaluation,
)


def test_a_run_that_an_earlier_version_started_is_read_and_resumed(tmp_path: Path) -> None:
    run_dir = claim(config_of(tmp_path, "launch.attention_backend=math"))
    config = read_run_config(run_dir)
    tree = config.model_dump(mode="json")
    for old, new in MOVED.items():
        before, key = old.split(".")
        *path, name = new.split(".")
        section = tree
        for part in path:
            section = section[part]
        tree[before][key] = section.pop(name)
    for new in (
        "force",
        "compile",
        "launcher",
        "nodes",
        "ray_address",
    ):  # which earlier versions did not have
        tree["launch"].pop(new)
    for emptied in ("launch", "logging", "checkpoint"):
        assert tree.pop(emptied) == {}
    tree["training"]["eval_batches"] = 8
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    assert read_run_config(run_dir) == config
    assert claim(config_of(tmp_path)) == run_dir
    assert resume_config(run_dir, ["launch.gpus=0"]).launch.attention_backend == "math"
    with pytest.raises(ConfigError, match=r"training\.gpus: unknown key"):
        resume_config(run_dir, ["training.gpus=0"])


def test_the_configuration_of_a_run_can_be_read_back(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run_dir = claim(config)
    recorded = read_run_config(run_dir)
    assert recorded.run.name == run_dir.name
    assert recorded.training == config.training
    assert latest_run(config) == run_dir
    assert dataset_of(run_dir) == Path("data").resolve()
    with pytest.raises(DataError, match="not a run folder"):
        read_run_config(tmp_path)
    with pytest.raises(DataError, match="not a run folder"):
        dataset_of(tmp_path)
    with pytest.raises(DataError, match="no such run"):
        latest_run(config_of(tmp_path / "elsewhere"))


def test_an_evaluation_before_the_last_step_leaves_a_run_resumable(tmp_path: Path) -> None:
    config = config_of(tmp_path, "training.max_steps=10")
    first = claim(config)
    (first / "report.md").write_text("at step 5")
    record_evaluation(first, 5, "k1", {"evaluation/test_loss": 2.0})
    assert not is_finished(first)
    assert claim(config) == first
    record_evaluation(first, 10, "k1", {})
    assert is_finished(first)
    assert claim(config) != first


@pytest.mark.parametrize(
    ("step", "later", "finished"), [(10, 5, True), (9, 5, False), (10, -5, False)]
)
def test_a_run_of_an_older_version_is_finished_if_its_report_is_of_the_last_step(
    tmp_path: Path, step: int, later: int, finished: bool
) -> None:
    config = config_of(tmp_path, "training.max_steps=10")
    run_dir = claim(config)
    record = json.loads((run_dir / "run.json").read_text())
    old = {key: record[key] for key in ("dataset", "dataset_key")}
    (run_dir / "run.json").write_text(json.dumps(old))
    assert not is_finished(run_dir)
    (run_dir / "report.md").write_text("a report")
    written = (run_dir / "report.md").stat().st_mtime
    line = {"step": step, "time": written - later, "train/loss": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert is_finished(run_dir) is finished
    assert owner_of(run_dir) is None
    assert (claim(config, owner=UI) == run_dir) is not finished


def test_a_run_with_a_damaged_record_is_not_finished(tmp_path: Path) -> None:
    run_dir = claim(config_of(tmp_path), finish=True)
    (run_dir / "evaluation.json").write_text("{")
    assert not is_finished(run_dir)
    (run_dir / "evaluation.json").write_text('"text"')
    assert not is_finished(run_dir)
