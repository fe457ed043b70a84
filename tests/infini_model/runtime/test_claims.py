"""Run folders: what they record, who holds one, which is resumed and with which settings."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import PATIENCE, eventually

from flows.evaluate import _as_trained
from flows.parameters import invoked
from infini_model.config import Config, load_config, merge
from infini_model.runtime import claims
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import ConfigError, DataError
from infini_model.runtime.holders import Owner
from infini_model.runtime.runs import (
    RUN,
    find_run,
    is_finished,
    is_started,
    latest_run,
    read_run,
    read_run_config,
    record_evaluation,
    run_holder,
)

UI, NIGHT = Owner("ui", adopts=False), Owner("night", adopts=False)
SHARED = ("run.name=mine", "launch.num_nodes=2", "launch.rdzv_endpoint=first:29500")


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(overrides=["run.preset=debug", f"run.output_dir={folder}", *overrides])


def claim(config: Config, key: str = "k1", *, finish: bool = False, **options: Any) -> Path:
    """Claim a run folder, and let go of it."""
    with claim_run(config, key, Path("data"), **options) as run_dir:
        if finish:
            record_evaluation(run_dir, config.training.max_steps, key, {})
        return run_dir


def test_an_interrupted_run_is_resumed_and_a_finished_one_is_not(tmp_path: Path) -> None:
    config = config_of(tmp_path, "training.max_steps=10")
    first = claim(config)
    assert first.name == "debug-1"
    record_evaluation(first, 5, "k1", {"evaluation/test_loss": 2.0})
    assert not is_finished(first)
    assert claim(config) == latest_run(config) == first
    record_evaluation(first, 10, "k1", {})
    assert is_finished(first)
    second = claim(config)
    assert second.name == "debug-2"
    assert latest_run(config) == second
    for damage in ("{", '"text"', '{"step": null}'):
        (first / "evaluation.json").write_text(damage)
        assert not is_finished(first)


def test_a_held_run_and_one_of_other_settings_or_data_are_left_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = claim(config)
    assert claim(config_of(tmp_path, "checkpoint.save_steps=3")) == first
    with claim_run(config, "k1", Path("data")) as held:
        assert held == first
        assert claim(config).name == "debug-2"
    assert claim(config_of(tmp_path, "training.learning_rate=1e-4")).name == "debug-3"
    assert claim(config, "k2").name == "debug-4"


# The width of a head is otherwise derived, and not written down.
DECIDING = (
    *("training.learning_rate=1e-4", "model.memory=linear", "model.head_dim=64"),
    *("packing.context_length=256", "run.seed=3"),
)
OTHERS = (
    *("run.log_level=debug", "launch.processes=2", "logging.logging_steps=3"),
    *("checkpoint.save_steps=3", "evaluation.max_windows=3", "comparison.runs=[a]"),
    *("tracking.mlflow=false", "stages.retries=7"),
)


@pytest.mark.parametrize("change", [*DECIDING, *OTHERS])
def test_a_change_makes_another_run_if_and_only_if_it_decides_the_weights(change: str) -> None:
    before = load_config(overrides=["run.preset=debug"])
    changed = load_config(overrides=["run.preset=debug", change])
    assert changed != before
    assert (changed.identity != before.identity) is (change in DECIDING)


def test_a_claim_that_is_killed_blocks_no_other_command(tmp_path: Path) -> None:
    (tmp_path / "runs" / "debug-1").mkdir(parents=True)  # As if killed before it recorded anything.
    config = config_of(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            with claim_run(config, "k1", Path("data")):
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert is_started(tmp_path / "runs" / "debug-1")
    assert claim(config).name == "debug-1"


def test_a_named_run_gets_its_folder_or_fails(tmp_path: Path) -> None:
    named = config_of(tmp_path, "run.name=mine")
    assert claim(named, finish=True) == claim(named) == tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match=r"run\.name: .*mine .*training\.learning_rate is"):
        claim(config_of(tmp_path, "run.name=mine", "training.learning_rate=1e-4"))
    with pytest.raises(ConfigError, match="the dataset differs"):
        claim(named, "k2")


def test_a_second_claim_fails_and_names_the_holder(tmp_path: Path) -> None:
    named = config_of(tmp_path, "run.name=mine")
    with claim_run(named, "k1", Path("data"), owner=UI) as run_dir:
        holder = run_holder(run_dir)
        assert holder is not None
        assert (holder.pid, holder.flow_run, holder.run) == (os.getpid(), "ui", str(run_dir))
        assert holder.is_on_this_machine()
        message = rf"mine is in use by process {os.getpid()} \(flow run {UI.id}\)$"
        with pytest.raises(ConfigError, match=message):
            claim(named, owner=NIGHT)
    assert run_holder(run_dir) is None


def test_other_machines_join_the_run_of_the_first_one_if_it_is_theirs(tmp_path: Path) -> None:
    first, second = config_of(tmp_path, *SHARED), config_of(tmp_path, *SHARED, "launch.node_rank=1")
    with claim_run(first, "k1", Path("data")) as run_dir:
        assert claim(second) == run_dir
        with pytest.raises(ConfigError, match=r"mine holds another run \(the dataset differs"):
            claim(second, "k2")


def test_a_machine_that_waits_for_the_first_one_says_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = config_of(tmp_path, *SHARED), config_of(tmp_path, *SHARED, "launch.node_rank=1")
    monkeypatch.setattr(time, "sleep", lambda _: claim(first))
    run_dir = claim(second)
    (line,) = caplog.messages
    assert f"(launch.node_rank=0) to start this run in {run_dir}" in line
    assert "must share run.output_dir or run.store" in line


def test_a_flow_run_gets_its_own_folder_back_until_another_has_resumed_it(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first = claim(config, owner=UI)
    assert find_run(tmp_path / "runs", "ui") == first
    assert find_run(tmp_path / "runs", "night") is None
    second = claim(config, owner=NIGHT)
    assert second != first
    for _ in range(2):
        assert claim(config, owner=UI, finish=True) == first
    assert read_run(first).owner == UI.id
    with pytest.raises(ConfigError, match=r"debug-2 holds another run \(the dataset differs"):
        claim(config, "k2", owner=NIGHT)

    other = Owner("other")
    assert claim(config, owner=other) == second
    message = r"debug-2 has since been resumed by flow run other; take it over with infini resume"
    with pytest.raises(ConfigError, match=message):
        claim(config, owner=NIGHT)
    assert find_run(tmp_path / "runs", "night") == second
    # Anyone may resume a run by its name if nobody holds it.
    assert claim(resume_config(second), owner=Owner("by name", adopts=False)) == second


def test_a_flow_run_waits_for_its_last_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path)
    begun, released = threading.Event(), threading.Event()

    def hold_until_released() -> None:
        with claim_run(config, "k1", Path("data"), owner=UI):
            begun.set()
            assert released.wait(PATIENCE)

    with ThreadPoolExecutor() as pool:
        pool.submit(hold_until_released)
        assert begun.wait(PATIENCE)
        with monkeypatch.context() as patch:
            patch.setattr(claims, "RELEASE_SECONDS", 0.0)
            with pytest.raises(ConfigError, match="in use by process"):
                claim(config, owner=UI)
        second = pool.submit(claim, config, owner=UI)
        eventually(lambda: "Waiting for process" in caplog.text, "the wait")
        assert not second.done()
        released.set()
        assert second.result(PATIENCE).name == "debug-1"


def test_a_run_is_resumed_with_its_own_settings_and_dataset(tmp_path: Path) -> None:
    begun = claim(config_of(tmp_path / "before", "training.learning_rate=2e-3"))
    run_dir = (tmp_path / "before").rename(tmp_path / "after") / "runs" / begun.name
    config = resume_config(run_dir, ["launch.gpus=cpu", "logging.logging_steps=7"])
    assert config.training.learning_rate == 2e-3
    assert config.logging.logging_steps == 7
    assert config.data.folder == Path("data").resolve()
    assert claim(config) == run_dir
    for override, message in {
        "training.learning_rate=1e-4": r"_rate is 0\.002, not 0\.0001\); infini branch \S+ begins",
        "model.head_dim=64": r"model\.head_dim is None, not 64\); infini run begins",
        "training.optimizer=muon": r"optimizer is 'adamw', not 'muon'\); infini run begins",
        "run.name=other": r"run\.name: .* can only be resumed under its own name",
    }.items():
        with pytest.raises(ConfigError, match=message):
            resume_config(run_dir, [override])
    assert read_run(run_dir).dataset == Path("data").resolve()
    for read in (resume_config, read_run_config, read_run):
        with pytest.raises(DataError, match="not a run folder"):
            read(begun)
    (run_dir / "run.json").write_text('{"dataset": ')
    for read_again in (lambda: read_run(run_dir), lambda: claim(config)):
        with pytest.raises(DataError, match=rf"^{run_dir}/run\.json: is damaged: .*EOF"):
            read_again()


def test_what_another_version_has_recorded_is_read_where_it_does_not_decide_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = claim(config_of(tmp_path))
    file, record = run_dir / "config.yaml", run_dir / RUN
    text = file.read_text()
    assert text.startswith("# infini-llama ")
    own = resume_config(run_dir)
    tree = yaml.safe_load(text)
    tree["launch"]["gone"], tree["data"]["source"]["old"], tree["before"] = 1, "a", {"a": 1}
    file.write_text(yaml.safe_dump(tree))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"since": 2}))
    for _ in range(2):
        assert resume_config(run_dir) == own
    first, second = (line.message.partition(": unknown here")[0] for line in caplog.records)
    assert (first, second) == (
        f"{file}: data.source.old, launch.gone, before",
        f"{record}: since",
    )
    for section, value in (("model", 1), ("training", 2)):
        file.write_text(yaml.safe_dump(tree | {section: tree[section] | {"gone": value}}))
        with pytest.raises(ConfigError, match=rf"^{file}: {section}\.gone: unknown key"):
            resume_config(run_dir)


def test_the_datasets_folder_of_another_machine_becomes_that_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("run.data_dir=s3://bucket/data", "data.folder=data")
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    run_dir = claim(config_of(tmp_path, *asked))
    own = ("run.name=own", "run.data_dir=/ssd", "run.data_store=s3://b")
    chosen = claim(config_of(tmp_path, *own))
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "two"))
    here = config_of(tmp_path, *asked).run.datasets_dir
    assert here.parent == tmp_path / "two"
    assert resume_config(run_dir).run.datasets_dir == here
    assert _as_trained(config_of(tmp_path), run_dir).run.datasets_dir == here
    assert resume_config(chosen).run.datasets_dir == Path("/ssd")
    other = resume_config(run_dir, ["run.data_dir=elsewhere"])
    assert other.run.datasets_dir == Path("elsewhere")


def test_a_run_is_evaluated_with_its_own_settings_and_what_was_asked_for(tmp_path: Path) -> None:
    own = ("evaluation.max_windows=77", "evaluation.tasks=[loss]", "data.name=own")
    run_dir = claim(config_of(tmp_path, *own))
    for asked, expected in (
        ({}, own),
        (
            {"windows": 5, "tasks": ["sample"]},
            ("evaluation.max_windows=5", "evaluation.tasks=sample"),
        ),
        ({"preset": "arxiv"}, ("evaluation.max_windows=64", "evaluation.tasks=[loss]")),
        ({"advanced": {"tracking": {"mlflow": False}}}, (*own, "tracking.mlflow=false")),
    ):
        places = {"run": {"output_dir": str(tmp_path)}}
        advanced = merge(places, asked.pop("advanced", {}))
        given = invoked(**({"preset": None, "advanced": advanced} | asked)).config
        meant, found = config_of(tmp_path, *own[2:], *expected), _as_trained(given, run_dir)
        assert found.evaluation == meant.evaluation
        assert found.tracking == meant.tracking
        assert found.data.updated(folder=None) == meant.data


def test_a_dataset_that_is_not_here_is_found_by_its_address(tmp_path: Path) -> None:
    """If it is in a store of its own; in the run's: `test_store.py`."""
    dataset, address = tmp_path / "copy" / "mine-1", "s3://other/datasets/mine-1"
    dataset.mkdir(parents=True)
    config = config_of(tmp_path)
    with claim_run(config, "k1", dataset, address=address) as run_dir:
        pass
    for asked in (resume_config(run_dir), _as_trained(config, run_dir)):
        assert asked.data.folder == dataset
    dataset.rmdir()
    for asked in (resume_config(run_dir), _as_trained(config, run_dir)):
        assert asked.data.folder == address
    assert resume_config(run_dir, ["data.folder=elsewhere"]).data.folder == Path("elsewhere")
