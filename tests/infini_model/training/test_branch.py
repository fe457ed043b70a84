"""A branch goes on from a checkpoint of another run, with whatever settings may differ."""

import json
import shutil

import pytest
from curves import curve, weights
from stopping import StopAfter

from infini_model.config import validate
from infini_model.data.build import build_dataset
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import read_manifest
from infini_model.data.sources.listing import list_sources
from infini_model.runtime import branches, claims
from infini_model.runtime.branches import branch_config
from infini_model.runtime.claims import check_branch, claim_run, resume_config
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.runs import read_run
from infini_model.runtime.storage import retire
from infini_model.training.checkpoint import read_state
from infini_model.training.train import train

CONSTANT = {"schedule": "constant", "max_steps": 8, "batch_size": 8, "warmup_steps": 2}


@pytest.fixture
def run(make_config, dataset):
    """Trains what a configuration means, in the folder that it claims."""

    def claim_and_train(config=None, folder=dataset, callbacks=(), **sections):
        config = config or make_config(**sections)
        with claim_run(config, read_manifest(folder).key, folder) as run_dir:
            train(config, folder, run_dir, callbacks)
        return run_dir

    return claim_and_train


@pytest.fixture
def parent(run):
    return run(run={"name": "stable", "seed": 3}, training=CONSTANT)


def longer(parent, step=None, **training):
    return branch_config(parent, step, [{"training": {"max_steps": 16} | training}])


def test_a_branch_takes_the_steps_of_a_longer_run_and_is_interrupted_and_resumed(run, parent):
    whole = run(run={"name": "whole", "seed": 3}, training=CONSTANT | {"max_steps": 16})
    branch = run(longer(parent, 4), callbacks=[StopAfter(10)])
    record = read_run(branch)
    assert (branch.name, record.parent, record.parent_step) == ("stable-branch-1", "stable", 4)
    assert record.max_steps == 16
    # It needs its parent no more, and the same settings resume it.
    resumed = resume_config(branch)
    assert run(resumed) == branch
    assert weights(branch) == weights(whole)
    trained, expected = (curve(each, "train/loss") for each in (branch, whole))
    assert trained == {step: loss for step, loss in expected.items() if step > 4}


def test_the_checkpoint_is_not_copied_and_outlives_the_parent(run, parent):
    saved = parent / "checkpoints/step-8/optimizer.safetensors"
    inode = saved.stat().st_ino
    config = longer(parent)
    with claim_run(config, "key", parent) as branch:
        assert (branch / "checkpoints/step-8/optimizer.safetensors").stat().st_ino == inode
    shutil.rmtree(parent)
    # Claimed again, as after a kill: the settings are those of the branch itself.
    with claim_run(config, "key", branch) as again:
        assert again == branch


def test_another_rate_batch_and_schedule_are_those_of_the_branch(run, parent):
    config = longer(parent, None, schedule="wsd", decay_steps=4, batch_size=4, learning_rate=1e-3)
    branch = run(config)
    rates = curve(branch, "train/learning_rate")
    assert (rates[10], rates[16]) == pytest.approx((1e-3, 1e-4))
    state = read_state(branch / "checkpoints/step-16")
    # Eight steps of eight windows, then eight of four.
    assert (state.windows_read, state.global_batch) == (96, 4)


def test_other_documents_are_read_from_their_beginning(run, parent, tmp_path, make_config):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"{number}. Another text entirely. " * 90)
    source = {"paths": [str(tmp_path / "*.txt")]}
    splits = {"train": 0.7, "validation": 0.2, "test": 0.1}
    config = branch_config(
        parent, None, [{"training": {"max_steps": 12}, "data": {"source": source}}]
    )
    assert config.data.folder is None
    data = validate({"data": {"source": source, "splits": splits}}).data
    manifest = build_dataset(list_sources(data, tmp_path), data, tmp_path / "datasets")
    branch = run(config, tmp_path / "datasets" / manifest.folder_name)
    state = read_state(branch / "checkpoints/step-12")
    assert (state.windows_read, state.dataset_key) == (4 * 8, manifest.key)
    assert state.origin.step == 8


def test_another_tokenizer_is_refused(run, parent, dataset, tmp_path):
    other = tmp_path / "datasets" / f"other-{'0' * 16}"
    shutil.copytree(dataset, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest |= {"key": "0" * 64}
    manifest["tokenizer"]["fingerprint"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"stable was trained with another tokenizer than that"):
        run(longer(parent), other)


def test_epochs_are_those_of_the_whole_training(run, parent, dataset):
    config = branch_config(parent, None, [{"training": {"epochs": 0.5}}])
    branch = run(config)
    windows = len(open_windows(dataset, "train", config.packing, config.model.segment_length))
    assert read_run(branch).max_steps == -(-windows // 16)
    few = branch_config(parent, None, [{"training": {"epochs": 0.001}}])
    with pytest.raises(
        ConfigError, match=r"epochs: 0\.001 end by step \d, and the branch begins at"
    ):
        run(few)


@pytest.mark.parametrize(
    ("step", "change", "complaint"),
    [
        (5, {}, r"branch_of: stable has no checkpoint of step 5; it has: 4, 8$"),
        (None, {"max_steps": 8}, r"max_steps: is 8, and the branch begins at step 8; set a larger"),
        (
            None,
            {"objective": "block_diffusion"},
            r"and the optimizer of its parent \(training\.obj",
        ),
        (None, {"optimizer": "muon"}, r"\(training\.optimizer is 'adamw', not 'muon'\)$"),
    ],
)
def test_what_cannot_begin_is_refused_in_one_line(parent, step, change, complaint):
    with pytest.raises((ConfigError, CheckpointError), match=complaint):
        check_branch(longer(parent, step, **change))


def test_a_damaged_checkpoint_is_named_and_nothing_begins(run, parent):
    damaged = parent / "checkpoints/step-8/optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"stable/checkpoints/step-8/optimizer\S+: is damaged"
    ):
        run(longer(parent))
    # In the branch itself it is found before a step is taken from random weights.
    branch = run(longer(parent, 4), callbacks=[StopAfter(5)])
    for path in branch.glob("checkpoints/*/manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no intact checkpoint; training\.branch_of needs"):
        run(resume_config(branch))


def test_a_branch_that_is_killed_as_it_begins_leaves_nothing_to_another_run(
    run, parent, monkeypatch, make_config
):
    def kill(*_):
        raise KeyboardInterrupt

    named = branch_config(parent, 4, [{"training": {"max_steps": 9}, "run": {"name": "x"}}])
    with monkeypatch.context() as patch:
        patch.setattr(claims, "write_record", kill)
        with pytest.raises(KeyboardInterrupt):
            run(named)
    assert [path.name for path in (parent.parent / "x/checkpoints").glob("step-*")] == ["step-4"]
    anew = run(run={"name": "x", "seed": 3}, training=CONSTANT, logging={"logging_steps": 1})
    assert min(curve(anew, "train/loss")) == 1


def test_a_parent_that_deletes_the_checkpoint_meanwhile_gives_its_newest(run, parent, monkeypatch):
    link, newest = branches.link, parent / "checkpoints/step-8"

    def delete_first(source, target):
        if newest.exists():
            shutil.copytree(newest, newest.with_name("step-12"))
            shutil.rmtree(retire(newest))
        link(source, target)

    monkeypatch.setattr(branches, "link", delete_first)
    with claim_run(longer(parent), "key", parent) as branch:
        assert [path.name for path in (branch / "checkpoints").glob("step-*")] == ["step-12"]


def test_the_seed_and_the_windows_decide_whether_the_data_goes_on(run, parent):
    """With both the same, it does; see `test_mixture.py` for other weights."""
    for change, begins_at in (({"run": {"seed": 4}}, 0), ({"packing": {"context_length": 32}}, 0)):
        config = branch_config(parent, None, [{"training": {"max_steps": 9}}, change])
        state = read_state(run(config) / "checkpoints/step-9")
        assert state.origin.windows_read == begins_at
        assert state.windows_read == 8
