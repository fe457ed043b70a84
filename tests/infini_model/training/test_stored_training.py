"""A training from a store is that from a folder, bit for bit; an outage ends it to be retried."""

import functools
import os

import pytest
from curves import curve, repeatable, weights
from stored_datasets import without_shards
from trainings import on_two_ranks

from infini_model.data.manifest import read_manifest
from infini_model.data.shards.stored import objects
from infini_model.evaluation.tasks.sample import draw_sample
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UnreachableError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.training.callbacks.callback import Callback
from infini_model.training.loop import train


class Disconnect(Callback):
    """Cuts the line to a store after a step."""

    def __init__(self, line, step):
        self.line, self.step = line, step

    def after_step(self, step, metrics):
        if step.number == self.step:
            self.line.disconnect()


@pytest.fixture
def stored(dataset, tmp_path, bucket):
    """The dataset folder without any shard."""
    return without_shards(dataset, tmp_path / "stored", f"{bucket}/partitions")


def train_reaching(environment, *arguments):
    """Train in a process that does not inherit this one's environment."""
    os.environ.update(environment)
    train(*arguments)


@pytest.mark.parametrize("mode", ["packed", "document", "aligned"])
def test_a_training_from_a_store_is_that_from_a_folder(
    dataset, stored, make_config, tmp_path, mode
):
    config = make_config(packing={"mode": mode})
    for name, folder in (("folder", dataset), ("store", stored)):
        train(config, folder, tmp_path / name)
    assert repeatable(tmp_path / "folder") == repeatable(tmp_path / "store")
    assert weights(tmp_path / "folder") == weights(tmp_path / "store")


@pytest.mark.story
def test_two_ranks_train_from_a_store(dataset, stored, make_config, tmp_path, s3):
    config = make_config(packing={"mode": "document"}, training={"max_steps": 5, "batch_size": 4})
    for name, folder in (("folder", dataset), ("store", stored)):
        on_two_ranks(train_reaching, s3.environment(), config, folder, tmp_path / name)
    assert len(curve(tmp_path / "store", "train/loss")) == 5
    assert weights(tmp_path / "folder") == weights(tmp_path / "store")


def test_a_store_that_goes_away_fails_the_training_which_then_resumes(
    dataset, stored, make_config, tmp_path, s3, bucket, monkeypatch
):
    monkeypatch.setattr(objects, "ObjectStore", functools.partial(ObjectStore, patience=0.3))
    config, run_dir = make_config(), tmp_path / "run"
    try:
        with pytest.raises(UnreachableError, match=f"^{bucket}/.*: cannot be reached"):
            train(config, stored, run_dir, [Disconnect(s3.line, 6)])
    finally:
        s3.line.connect()
    monkeypatch.setattr(objects, "ObjectStore", ObjectStore)
    train(config, stored, run_dir)
    train(config, dataset, tmp_path / "folder")
    assert weights(run_dir) == weights(tmp_path / "folder")


def test_a_sample_continues_the_same_document(dataset, stored, make_config):
    manifest = read_manifest(dataset)
    config = make_config(model={"vocab_size": manifest.tokenizer.vocab_size})
    model = InfiniLlama(config.model)
    samples = [
        draw_sample(model, folder, manifest, config.evaluation.sample, 1)
        for folder in (dataset, stored)
    ]
    assert samples[0] == samples[1] is not None
