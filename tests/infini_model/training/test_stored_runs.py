"""A training whose run or dataset is in a store: whatever is lost, it goes on with the same bits.

Its machines have nothing in common but the store: no folder, no disk.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import PATIENCE, Running, eventually
from curves import repeatable, weights
from ports import free_port
from stopping import Halt
from stored_datasets import without_shards

from infini_model.config import Config, dump_config, merge, validate
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.stored_runs import complete_steps

# A flow without Prefect.
COMMAND = """
import logging, sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.runtime import claims, owner
from infini_model.runtime.errors import StageError, UserError
from infini_model.training.launch.launcher import Job, launch
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
owner.RENEWAL_SECONDS, owner.SILENCE_SECONDS, owner.LOOK_SECONDS = 0.5, 10.0, 0.5
config, dataset = load_config(file=Path(sys.argv[1])), Path(sys.argv[2])
try:
    with claims.claim_run(config, "key", dataset) as run_dir:
        print("in", run_dir, flush=True)
        launch(Job(config, dataset, run_dir, on_line=lambda line: print(line, flush=True)))
except (StageError, UserError) as error:
    if isinstance(error, StageError):
        print("recorded", (run_dir / "recovery.json").exists())
    sys.exit(str(error))
"""
# Python reads it at its start; one rank of the training fails in its fifth step.
OUT_OF_MEMORY = """
import os, sys
if "infini_model.training" in sys.orig_argv and os.environ.get("RANK") == "1":
    import torch
    passes = 0
    def fault(module, args, output):
        global passes
        if type(module).__name__ == "LossModule" and module.training:
            passes += 1
            if passes == 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
    torch.nn.modules.module.register_module_forward_hook(fault)
"""
STEPS = 9
Start = Callable[..., list[Running]]


@pytest.fixture
def start(
    make_config: Callable[..., Config], tmp_path: Path, dataset: Path, bucket: str
) -> Iterator[Start]:
    """Starts the launchers of one or two machines.

    Each has a cache folder and a dataset folder of its own.
    """
    started: list[Running] = []
    common = make_config(
        run={"name": "gang"},
        training={"max_steps": STEPS, "batch_size": 4, "warmup_steps": 2},
        checkpoint={"save_steps": 3},
        logging={"logging_steps": 1, "eval_steps": 3},
    ).model_dump(mode="json")
    del common["run"]["store"]
    common["run"]["output_dir"] = f"{bucket}/team"

    def on(*machines: str, env: dict[str, str] | None = None, **sections: Any) -> list[Running]:
        # Of two machines each trains with one process, one alone with two.
        launch: dict[str, Any] = {"processes": 2}
        if len(machines) > 1:
            endpoint = f"127.0.0.1:{free_port()}"
            launch = {"processes": 1, "num_nodes": 2, "rdzv_endpoint": endpoint}
        for rank, machine in enumerate(machines):
            tree = merge(merge(common, {"launch": launch | {"node_rank": rank}}), sections)
            cache, file = tmp_path / machine, tmp_path / f"{machine}.yaml"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("INFINI_CACHE_DIR", str(cache))
                file.write_text(dump_config(validate(tree)))
            if not (folder := cache / "dataset").exists():
                without_shards(dataset, folder, f"{bucket}/partitions")
            command = [sys.executable, "-c", COMMAND, str(file), str(folder)]
            own = os.environ | {"INFINI_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": ""}
            log = tmp_path / f"{machine}-{len(started)}.log"
            started.append(Running(command, log, own | (env or {})))
        return started[-len(machines) :]

    yield on
    for running in started:
        running.end()


def folder(running: Running) -> Path:
    """The run folder that a launcher works in."""
    return Path(running.output.split("in ", 1)[1].split("\n", 1)[0])


def saved_steps(store: ObjectStore) -> set[int]:
    return complete_steps(each.key for each in store.list_below())


@pytest.mark.story
def test_both_machines_are_lost_and_the_run_goes_on_with_the_same_bits(
    start: Start, bucket: str, tmp_path: Path
) -> None:
    store = ObjectStore(f"{bucket}/team/runs/gang")
    (undisturbed,) = start("u", run={"output_dir": f"{bucket}/undisturbed"})
    assert undisturbed.wait() == 0, undisturbed.output
    expected = folder(undisturbed)

    # The second checkpoint, which they may never finish, has waited for the first.
    halt = Halt(tmp_path / "halt", 7)
    patient = {"hang_timeout_seconds": PATIENCE}
    first, second = start("m0", "m1", env=halt.environment, launch=patient)
    halt.wait(2)
    eventually(lambda: bool(saved_steps(store)), lambda: first.output + second.output)
    for machine, running in (("m1", second), ("m0", first)):
        running.end()
        shutil.rmtree(tmp_path / machine)
    assert STEPS not in saved_steps(store)

    # The lost machine has not released the run: its silence is waited for.
    again = start("n0", "n1")
    assert [each.wait() for each in again] == [0, 0], again[0].output + again[1].output
    assert "Resuming from" in again[0].output
    run_dir, other = folder(again[0]), folder(again[1])
    assert run_dir != other
    assert weights(run_dir) == weights(expected)
    assert repeatable(run_dir) == repeatable(expected)
    assert STEPS in saved_steps(store)
    assert not (other / "checkpoints").exists()
    assert not (other / "model").exists()
    model = (run_dir / "model" / "model.safetensors").read_bytes()
    assert store.read(f"checkpoints/step-{STEPS}/model/model.safetensors")[0] == model
    assert {path.name for path in (other / "logs").iterdir()} >= {"rank-1.log"}


@pytest.mark.story
def test_the_first_machine_learns_why_a_rank_failed_on_another(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    failed = start("m0", "m1", env={"PYTHONPATH": path})
    assert [each.wait() for each in failed] == [1, 1]
    for each in failed:
        reason = "training failed: out of memory on rank 1: CUDA out of memory"
        assert each.output.splitlines()[-1] == reason
    assert "recorded False" in failed[1].output
    recovery = json.loads((folder(failed[0]) / "recovery.json").read_text())
    assert recovery["micro_batch_divisor"] == 2
    # The divisor reaches the ranks of the other machine.
    again = start("m0", "m1")
    assert [each.wait() for each in again] == [0, 0], again[0].output + again[1].output
    assert "Batch size per process: 2" in again[0].output
    assert "Gradient accumulation: 2" in again[0].output
