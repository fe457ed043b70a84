"""A training that is killed goes on elsewhere, with the same bits, from what its store has."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import PATIENCE, Running, eventually, kill
from curves import repeatable, weights
from stopping import Halt

from infini_model.config import Config, dump_config, merge, validate
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.stored import lease
from infini_model.runtime.stored.copies import complete_steps

# A flow without Prefect.
COMMAND = """
import logging, sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.errors import UserError
from infini_model.runtime.stored import lease
from infini_model.training.launch.launcher import launch
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
lease.RENEWAL_SECONDS = 0.5
config, dataset = load_config(file=Path(sys.argv[1])), Path(sys.argv[2])
try:
    with claim_run(config, "key", dataset) as run_dir:
        print("in", run_dir, flush=True)
        launch(config, dataset, run_dir, on_line=lambda line: print(line, flush=True))
except UserError as error:
    sys.exit(str(error))
"""
Start = Callable[..., Running]


@pytest.fixture
def settings(make_config: Callable[..., Config], bucket: str) -> dict[str, Any]:
    tree = make_config(
        training={"max_steps": 9, "batch_size": 8, "warmup_steps": 2},
        checkpoint={"save_steps": 3},
        logging={"logging_steps": 1, "eval_steps": 3},
    ).model_dump(mode="json")
    del tree["run"]["store"]
    return tree


@pytest.fixture
def start(tmp_path: Path, dataset: Path, settings: dict[str, Any]) -> Start:
    """Starts the command on a machine, that is, with a cache folder of its own."""
    started: list[Running] = []

    def on(
        machine: str, output_dir: object, env: dict[str, str] | None = None, **sections: Any
    ) -> Running:
        tree = merge(settings, {"run": {"output_dir": str(output_dir)}, **sections})
        file = tmp_path / f"{machine}.yaml"
        own = {"INFINI_CACHE_DIR": str(tmp_path / machine), "CUDA_VISIBLE_DEVICES": ""}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INFINI_CACHE_DIR", own["INFINI_CACHE_DIR"])
            file.write_text(dump_config(validate(tree)))
        command = [sys.executable, "-c", COMMAND, str(file), str(dataset)]
        log = tmp_path / f"{machine}-{len(started)}.log"
        started.append(Running(command, log, os.environ | own | (env or {})))
        return started[-1]

    yield on
    for running in started:
        running.end()


def steps(store: ObjectStore) -> set[int]:
    return complete_steps(each.key for each in store.list_below())


def folder(running: Running) -> Path:
    """The run folder that a command works in."""
    return Path(running.output.split("in ", 1)[1].split("\n", 1)[0])


def kill_all(running: Running) -> None:
    for process in running.tree():
        kill(process, signal.SIGKILL)
    running.wait()


@pytest.mark.slow
@pytest.mark.story
def test_a_killed_training_goes_on_elsewhere_with_the_same_bits(
    start: Start, bucket: str, tmp_path: Path
) -> None:
    undisturbed = start("undisturbed", tmp_path / "local")
    store = ObjectStore(f"{bucket}/team/runs/run-1")
    # The second checkpoint, which it may never finish, has waited for the first.
    halt = Halt(tmp_path / "halt", 7)
    patient = {"hang_timeout_seconds": PATIENCE}
    held = start("one", f"{bucket}/team", halt.environment, launch=patient)
    halt.wait()
    eventually(lambda: bool(steps(store)), lambda: held.output)
    kill_all(held)
    assert undisturbed.wait() == 0, undisturbed.output
    assert 9 not in steps(store)
    resumed = start("two", f"{bucket}/team")
    assert resumed.wait() == 0, resumed.output
    assert "Resuming from" in resumed.output
    assert folder(resumed) != folder(held)
    assert folder(resumed).name == folder(held).name
    assert weights(folder(resumed)) == weights(folder(undisturbed))
    assert repeatable(folder(resumed)) == repeatable(folder(undisturbed))
    assert 9 in steps(store)
    model = folder(resumed) / "model" / "model.safetensors"
    assert store.read("model/model.safetensors")[0] == model.read_bytes()


def test_a_training_that_loses_its_run_is_stopped_and_says_to_whom(
    start: Start, bucket: str
) -> None:
    store = ObjectStore(f"{bucket}/team/runs/run-1")
    held = start("one", f"{bucket}/team", training={"max_steps": 100_000})
    # Any step: the newest goes up first, and a busy machine may never come to the third.
    eventually(lambda: bool(steps(store)), lambda: held.output)
    rank = next(p for p in psutil.Process(held.process.pid).children(recursive=True))
    store.write("lease.json", lease.LeaseRecord(2, "another").dumps())
    assert held.wait() == 1
    assert held.output.splitlines()[-1].startswith(
        "run.name: run-1 was taken over by another process, since this machine could not reach"
    )
    assert not rank.is_running()
    run_dir = folder(held)
    assert weights(run_dir)[0] == f"step-{repeatable(run_dir)[-1]['step']}"
    assert lease.read_lease(store)[0].token == "another"
