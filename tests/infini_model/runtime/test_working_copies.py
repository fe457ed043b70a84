"""A run folder and its copy in a store: what goes up, what comes down, and what is never lost.

Two machines are two working folders. The checkpoints are small files with a manifest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import eventually, run

from infini_model.config import Config, load_config
from infini_model.runtime import owner, stored_runs
from infini_model.runtime.branches import branch_config
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import ConfigError, RunLostError, StoreError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.object_store import ObjectStore
from infini_model.runtime.owner import lost
from infini_model.runtime.runs import is_finished, local_steps, record_evaluation, run_holder
from infini_model.runtime.storage import atomic_folder, dump_json, sha256
from infini_model.runtime.stored_runs import (
    attach_unclaimed,
    complete_steps,
    refresh_run,
    refresh_runs,
)

Machine = Callable[..., Config]
# Its process is killed when one of the two files of its second checkpoint is stored.
UPLOAD = """
import json, os, signal, sys
from pathlib import Path
from infini_model.config import load_config
from infini_model.runtime.claims import claim_run
from infini_model.runtime.object_store import ObjectStore
from commands import eventually
from test_working_copies import save, steps_of, stored
upload = ObjectStore.upload
def killed(store, key, path):
    if key == "checkpoints/step-8/state.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return upload(store, key, path)
ObjectStore.upload = killed
config = load_config(overrides=json.loads(sys.argv[1]))
with claim_run(config, "k1", Path("data")) as run_dir:
    save(run_dir, 4)
    eventually(lambda: steps_of(stored(config)) == {4}, "the copy")
    save(run_dir, 8)
    signal.pause()
"""


def set_pace(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """How often an owner renews its claim, and how long others watch it, and how often."""
    for name, value in seconds.items():
        monkeypatch.setattr(owner, f"{name.upper()}_SECONDS", value)


@pytest.fixture
def machine(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The settings of a command on a machine; all machines have the same store.

    Who owns a run renews its claim often, and is not taken for dead because this machine is slow.
    """
    set_pace(monkeypatch, renewal=0.2, silence=1e6, look=0.05)

    def on(name: str, *overrides: str) -> Config:
        monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / name))
        places = ["run.preset=debug", f"run.output_dir={bucket}/team"]
        return load_config(overrides=[*places, *overrides])

    return on


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests give up in a second, and copies are not tried again before the next checkpoint."""
    monkeypatch.setattr(stored_runs, "PATIENCE", 1.0)
    monkeypatch.setattr(stored_runs, "POLL_SECONDS", 0.02)


@pytest.fixture
def hasty(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody renews a claim, and whoever wants a run takes it over."""
    set_pace(monkeypatch, renewal=1e6, silence=0.0, look=0.0)


def save(run_dir: Path, step: int, loss: float | None = None) -> Path:
    """A finished checkpoint, after its metrics."""
    metrics = MetricsFile(run_dir, step - 1)
    metrics.append(step, {"train/loss": 1.0} | ({} if loss is None else {"validation/loss": loss}))
    metrics.close()
    target = run_dir / "checkpoints" / f"step-{step}"
    with atomic_folder(target) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(bytes([step]) * 100)
        (folder / "state.json").write_text(json.dumps({"step": step}))
        names = ("model/weights", "state.json")
        dump_json(folder / "manifest.json", {"sha256": {n: sha256(folder / n) for n in names}})
    return target


def stored(config: Config, name: str = "debug-1") -> ObjectStore:
    return ObjectStore(f"{config.run.store}/runs/{name}")


def steps_of(store: ObjectStore) -> set[int]:
    return complete_steps(each.key for each in store.list_below())


def claimed(config: Config) -> contextlib.AbstractContextManager[Path]:
    return claim_run(config, "k1", Path("data"))


def claim(config: Config) -> Path:
    with claimed(config) as run_dir:
        return run_dir


def test_another_machine_finds_an_interrupted_run_and_goes_on(machine: Machine) -> None:
    one = machine("one")
    with claimed(one) as run_dir:
        saved = save(run_dir, 4)
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / "rank-0.log").write_text("line\n")
    two = machine("two")
    refresh_runs(two.run.runs_dir, two.run.store)
    here = two.run.runs_dir / "debug-1"
    assert (two.run.runs_dir / "latest").resolve() == here
    assert not local_steps(here)
    assert resume_config(here).run == two.run.model_copy(update={"name": "debug-1"})
    with claimed(two) as run_dir:
        assert run_dir == here
        for name in ("model/weights", "state.json", "manifest.json"):
            copy = here / "checkpoints" / "step-4" / name
            assert copy.read_bytes() == (saved / name).read_bytes()
        assert (here / "logs" / "rank-0.log").read_text() == "line\n"
        record_evaluation(here, two.training.max_steps, "k1", {})
    one = machine("one")
    assert claim(one).name == "debug-2"
    assert is_finished(one.run.runs_dir / "debug-1")
    assert not [each for each in ObjectStore(one.run.store).list_below() if "/." in each.key]


def test_another_machine_branches_from_any_stored_checkpoint(machine: Machine) -> None:
    with claimed(machine("one", "checkpoint.save_total_limit=3")) as run_dir:
        for step in (2, 4):
            saved = save(run_dir, step)
    two = machine("two")
    refresh_runs(two.run.runs_dir, two.run.store)
    here = two.run.runs_dir / "debug-1"
    assert not local_steps(here)
    config = branch_config(here, 2, [{"run": {"store": two.run.store}}])
    with claimed(config) as branch:
        assert local_steps(branch) == local_steps(here) == {2}
    assert steps_of(stored(two, branch.name)) == {2}
    weights = stored(two, branch.name).read("checkpoints/step-2/model/weights")[0]
    assert weights != (saved / "model" / "weights").read_bytes()


def test_who_holds_a_run_is_known_everywhere(machine: Machine) -> None:
    with claimed(machine("one", "run.name=mine")) as run_dir:
        two = machine("two", "run.name=mine")
        with pytest.raises(ConfigError, match="mine is in use by process"):
            claim(two)
        assert run_holder(two.run.runs_dir / "mine") == run_holder(run_dir)
        # Without a name it is another run, numbered across machines.
        with claimed(machine("one")) as first, claimed(machine("two")) as second:
            assert (first.name, second.name) == ("debug-1", "debug-2")


def test_retention_holds_in_the_store_too(machine: Machine) -> None:
    config = machine("one", "checkpoint.save_total_limit=2")
    for begin in (1, 4):
        with claimed(config) as run_dir:
            for step in range(begin, begin + 3):
                save(run_dir, step, loss=0.5 if step == 1 else 1.0)
    assert steps_of(stored(config)) == {1, 5, 6}
    keys = [each.key for each in stored(config).list_below("checkpoints")]
    assert {key.split("/")[1] for key in keys} == {"step-1", "step-5", "step-6"}


def test_the_later_checkpoint_wins_wherever_it_is(machine: Machine) -> None:
    config = machine("one")
    with claimed(config) as run_dir:
        save(run_dir, 4)
    with claimed(machine("two")) as elsewhere:
        assert local_steps(elsewhere) == {4}
        save(elsewhere, 8)
    config = machine("one")
    with claimed(config) as run_dir:
        assert local_steps(run_dir) == {4, 8}
    # Another machine took step 8 up, but this one has been further without telling the store.
    claim(machine("two"))
    save(run_dir, 12)
    before = (run_dir / "metrics.jsonl").read_bytes()
    config = machine("one")
    refresh_runs(config.run.runs_dir, config.run.store)
    with claimed(config) as run_dir:
        assert (run_dir / "metrics.jsonl").read_bytes() == before
        assert max(local_steps(run_dir)) == 12
    assert max(steps_of(stored(config))) == 12


def test_a_checkpoint_that_is_incomplete_damaged_or_names_files_elsewhere_is_not_taken(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    config = machine("one", "checkpoint.save_total_limit=9")
    with claimed(config) as run_dir:
        for step in (2, 4, 6):
            save(run_dir, step)
    store = stored(config)
    store.delete(["checkpoints/step-6/manifest.json"])
    store.write("checkpoints/step-4/model/weights", b"damage")
    for step, name in ((7, "../../evil"), (8, "/evil")):
        content = json.dumps({"sha256": {name: "0" * 64}}).encode()
        store.write(f"checkpoints/step-{step}/manifest.json", content)
    with claimed(machine("two")) as run_dir:
        assert local_steps(run_dir) == {2}
    assert "step-4/model/weights: is damaged: SHA-256" in caplog.text
    assert not list(run_dir.rglob(".tmp-*"))
    assert not list(run_dir.parents[3].rglob("evil"))


@pytest.mark.usefixtures("impatient")
def test_a_store_that_is_gone_stops_nothing_and_gets_later_what_it_lacks(
    s3, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = machine("one")
    with contextlib.ExitStack() as later:
        with claimed(config) as run_dir:
            save(run_dir, 2)
            # Not when the store has it: the answer could still be cut.
            eventually(lambda: "Copied step 2 of debug-1" in caplog.text, "the copy")
            with s3.line.gone():
                save(run_dir, 4)
                eventually(lambda: "training goes on" in caplog.text, "the warning")
            save(run_dir, 6)
            eventually(lambda: steps_of(stored(config)) == {4, 6}, "the next copy")
            later.enter_context(s3.line.gone())
            save(run_dir, 8)
        (line,) = [each for each in caplog.messages if "not in s3://" in each]
        assert line.startswith("debug-1: step 8 and the newest files are not in s3://bucket-")
        assert "cannot be reached: connection refused" in line
        assert "infini resume debug-1" in line
    with attach_unclaimed(run_dir, config):
        pass
    assert steps_of(stored(config)) == {6, 8}


@pytest.mark.usefixtures("hasty")
def test_a_kill_within_an_upload_leaves_what_was_complete(machine: Machine, bucket: str) -> None:
    config = machine("one")
    overrides = json.dumps(["run.preset=debug", f"run.output_dir={bucket}/team"])
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    killed = run([sys.executable, "-c", UPLOAD, overrides], os.environ | {"PYTHONPATH": path})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert local_steps(config.run.runs_dir / "debug-1") == {4, 8}
    assert steps_of(stored(config)) == {4}
    with claimed(machine("two")) as run_dir:
        assert run_dir.name == "debug-1"
        assert local_steps(run_dir) == {4}
    claim(machine("one"))
    assert steps_of(stored(config)) == {4, 8}


@pytest.mark.usefixtures("hasty")
def test_of_two_owners_one_stops_and_nothing_is_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is suspended while it uploads a checkpoint, and taken for dead."""
    upload, one = ObjectStore.upload, machine("one")
    later = contextlib.ExitStack()

    def suspended(store: ObjectStore, key: str, path: Path) -> object:
        if key == "checkpoints/step-4/state.json":
            monkeypatch.setattr(ObjectStore, "upload", upload)
            save(later.enter_context(claimed(machine("two"))), 6)
            eventually(lambda: steps_of(stored(one)) == {2, 6}, "the copy of the second owner")
        return upload(store, key, path)

    def work() -> None:
        with claimed(one) as run_dir:
            save(run_dir, 2)
            eventually(lambda: steps_of(stored(one)) == {2}, "the copy")
            monkeypatch.setattr(ObjectStore, "upload", suspended)
            save(run_dir, 4)
            eventually(lambda: lost(run_dir) is not None, "the loss")
            save(run_dir, 8)

    with pytest.raises(RunLostError, match="debug-1 was taken over by process") as caught:
        work()
    assert "\n" not in str(caught.value)
    run_dir = one.run.runs_dir / "debug-1"
    assert local_steps(run_dir) == {2, 4, 8}
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    assert stored(one).read("metrics.jsonl")[0] != metrics
    with later:
        assert steps_of(stored(one)) == {2, 6}
    # What it has on its disk is further on, and is not lost when it gets the run back.
    with claimed(machine("one")):
        assert local_steps(run_dir) == {2, 4, 8}
    assert steps_of(stored(one)) == {6, 8}
    assert stored(one).read("metrics.jsonl")[0] == metrics


def test_a_checkpoint_that_retention_deletes_during_its_upload_is_copied_all_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, config = ObjectStore.upload, machine("one")

    def retained(store: ObjectStore, key: str, path: Path) -> object:
        shutil.rmtree(config.run.runs_dir / "debug-1" / "checkpoints" / "step-4", True)
        return upload(store, key, path)

    monkeypatch.setattr(ObjectStore, "upload", retained)
    with claimed(config) as run_dir:
        save(run_dir, 4)
        eventually(lambda: steps_of(stored(config)) == {4}, "the copy")
    assert not local_steps(run_dir)
    with claimed(machine("two")) as run_dir:
        assert local_steps(run_dir) == {4}


def test_what_another_machine_has_evaluated_is_known_without_its_logs(machine: Machine) -> None:
    config = machine("one")
    with claimed(config) as first:
        save(first, 4)
    with claimed(machine("two")) as second:
        record_evaluation(second, config.training.max_steps, "k1", {})
        (second / "logs").mkdir()
        (second / "logs" / "rank-0.log").write_text("line\n")
    machine("one")
    assert refresh_run(first, config.run.store)
    assert is_finished(first)
    assert not (first / "logs").exists()
    assert refresh_run(first, config.run.store, logs=True)
    assert (first / "logs" / "rank-0.log").read_text() == "line\n"
    assert not refresh_run(first.with_name("debug-2"), config.run.store)


def test_nothing_is_begun_here_if_the_store_refuses(s3, machine: Machine) -> None:
    config = machine("one")
    with s3.refusing(), pytest.raises(StoreError, match="access denied"):
        claim(config)
    assert not list(config.run.runs_dir.glob("*"))
