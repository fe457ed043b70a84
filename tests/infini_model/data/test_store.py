"""A dataset in an object store is the local one, and only what is new of it is made."""

import hashlib
import os
import re
import shutil
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from builds import Machine, in_a_fork, killed_in_a_request, verify_dataset
from commands import leftovers, run_here
from corpora import build, files_config, shard_bytes
from s3_server import CREDENTIALS

from infini_model import __main__ as stages
from infini_model.config import PackingConfig, load_config
from infini_model.data.downloads import download_shards
from infini_model.data.loading.windows import open_windows
from infini_model.data.lookup import finished_dataset
from infini_model.data.manifest import read_manifest
from infini_model.data.store import StoredDatasets
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.verify import examine_dataset
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.object_store import ObjectStore, StoredObject, Version
from infini_model.runtime.runs import dataset_here
from infini_model.runtime.stored_runs import refresh_runs


@pytest.fixture
def address(bucket):
    return f"{bucket}/team/datasets"


@pytest.fixture
def trained(several):
    """The configuration of several partitions with a tokenizer that is trained on them."""
    tokenizer = several.tokenizer.model_copy(update={"spec": "train", "vocab_size": 260})
    return several.model_copy(update={"tokenizer": tokenizer})


@pytest.fixture
def machine(tmp_path, address):
    return Machine(tmp_path / "first", address)


@pytest.fixture
def other(tmp_path, address):
    return Machine(tmp_path / "second", address)


def test_it_has_the_shards_of_the_local_dataset_and_another_machine_downloads_only_what_is_new(
    tmp_path, trained, machine, other
):
    expected, local = build(trained, tmp_path / "local")
    manifest = machine.build(trained)
    folder = machine.folder / manifest.folder_name
    assert (manifest.key, manifest.splits) == (expected.key, expected.splits)
    assert not [name for name, _ in manifest.files() if (folder / name).exists()]
    assert verify_dataset(folder) == manifest
    assert load_dataset_tokenizer(folder).fingerprint == manifest.tokenizer.fingerprint
    assert not leftovers(machine.folder)

    plan, count = other.plan(trained), len(set(manifest.partitions))
    assert (plan.intact, plan.new, plan.reused) == (True, 0, count)
    assert plan.folder == other.folder / manifest.folder_name
    assert plan.address == f"{other.address}/{manifest.folder_name}"
    folder = other.download(trained)
    assert shard_bytes(folder) == shard_bytes(local)
    assert verify_dataset(folder) == manifest
    # A working copy that is used looks new.
    os.utime(folder / "manifest.json", (0, 0))
    assert other.download(trained) == folder
    assert (folder / "manifest.json").stat().st_mtime > 0

    # It goes on with the tokenizer that the first one has trained.
    copies = {path: path.stat().st_ino for path in (other.folder / ".partitions").rglob("*.arrow")}
    (tmp_path / "raw" / "more.txt").write_text("quite different " * 99)
    plan = other.plan(trained)
    assert (plan.intact, plan.new, plan.reused) == (False, 1, count - 1)
    assert other.build(trained).tokenizer == manifest.tokenizer
    assert len(other.made) == 1
    other.download(trained)
    now = {path: path.stat().st_ino for path in (other.folder / ".partitions").rglob("*.arrow")}
    assert copies.items() <= now.items()
    assert {path.parent.name for path in now.keys() - copies.keys()} == set(other.made)


def test_a_run_resumes_elsewhere_with_its_dataset(several, machine, bucket, tmp_path, monkeypatch):
    machine.build(several)
    run = {"output_dir": f"{bucket}/runs", "preset": "debug"}
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    config = load_config(overrides=[{"run": run | {"data_dir": machine.address}}])
    plan = finished_dataset(config)
    with claim_run(config, plan.key, plan.folder, address=plan.address) as run_dir:
        pass
    (tmp_path / "one").rename(tmp_path / "gone")

    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "two"))
    places = load_config(overrides=[{"run": run}]).run
    refresh_runs(places.runs_dir, places.store)
    resumed = resume_config(places.runs_dir / run_dir.name)
    found = finished_dataset(resumed)
    assert (found.key, found.address) == (plan.key, plan.address)
    assert found.folder.is_relative_to(tmp_path / "two")
    with claim_run(resumed, found.key, found.folder, address=found.address) as again:
        assert again == places.runs_dir / run_dir.name
        assert dataset_here(again) == found.folder


def build_at_once(*builds):
    """Build on several machines at once, in threads: they have no folder in common."""
    with ThreadPoolExecutor(len(builds)) as pool:
        list(pool.map(lambda each: each[0].build(each[1]), builds))


def test_two_builds_at_once_do_no_harm(tmp_path, several, machine, other):
    with pytest.raises(DataError, match=r"latest: there is no finished dataset yet"):
        machine.finished(several)
    build_at_once((machine, several), (other, several))
    _, local = build(several, tmp_path / "local")
    for each in (machine, other):
        assert each.plan(several).intact
        assert shard_bytes(each.download(several)) == shard_bytes(local)


def test_two_machines_that_train_a_tokenizer_agree_on_one(tmp_path, trained, machine, other):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("some other text entirely " * 500)
    different = files_config(tmp_path / "other" / "*", tokenizer=trained.tokenizer.model_dump())
    build_at_once((machine, trained), (other, different))
    newest = [read_manifest(each.folder / "latest") for each in (machine, other)]
    assert newest[0].tokenizer.fingerprint == newest[1].tokenizer.fingerprint


def test_a_tokenizer_damaged_here_or_in_the_store_is_mended(tmp_path, trained, machine, other):
    size = trained.tokenizer.model_copy(update={"vocab_size": 300})
    trained = trained.model_copy(update={"tokenizer": size})
    first = machine.build(trained).tokenizer
    (tmp_path / "raw" / "more.txt").write_text("text for another tokenizer " * 99)
    (here,) = (machine.folder / ".tokenizers").glob("*/tokenizer.json")
    whole = here.read_text()
    here.write_text(whole[:1000])
    # The one in the store counts, so that no partition has to be made again.
    assert machine.build(trained).tokenizer == first
    assert here.read_text() == whole

    store = ObjectStore(f"{machine.address}/.tokenizers")
    key = f"{here.parent.name}/tokenizer.json"
    for content in (whole[:1000], whole.replace("0", "1", 9)):
        store.write(key, content.encode())
        here.unlink()
        (tmp_path / "raw" / "more.txt").unlink(missing_ok=True)
        assert machine.build(trained).tokenizer == first
        assert store.read(key)[0].decode() == here.read_text() == whole
    assert other.build(trained).tokenizer == first


def test_what_was_finished_before_a_kill_is_kept(tmp_path, several, bucket):
    whole = shard_bytes(build(several, tmp_path / "local")[1])
    for task, method, calls in (
        ("build", "upload", 3),
        ("build", "write", 6),
        ("build", "_request", 12),
        ("download", "download", 4),
    ):
        machine = Machine(tmp_path / method, f"{bucket}/{method}")
        if task == "download":
            machine.build(several)
        with pytest.raises(BrokenProcessPool):
            in_a_fork(killed_in_a_request, machine, task, several, method, calls)
        store = ObjectStore(f"{machine.address}/.partitions")
        names = (each.key.partition("/") for each in store.list_below())
        finished = {key for key, _, name in names if name == "partition.json"}
        made = StoredDatasets(machine.address, Path())
        assert made.count_missing({*finished, "another"}) == 1
        here = machine.folder / ".partitions"
        downloaded = {path: path.stat().st_ino for path in here.glob("[!.]*/*.arrow")}
        machine.build(several)
        assert finished.isdisjoint(machine.made)
        assert shard_bytes(machine.download(several)) == whole
        assert all(path.stat().st_ino == inode for path, inode in downloaded.items())
        assert not leftovers(machine.folder)


def flip(store, key):
    content = bytearray(store.read(key)[0])
    content[len(content) // 2] ^= 1
    store.write(key, bytes(content))


def test_a_torn_partition_is_made_again_alone(several, machine, other):
    manifest = machine.build(several)
    store = ObjectStore(f"{machine.address}/.partitions")
    shard = manifest.splits["train"].shards[1]
    key = shard.path.partition("/")[0]
    for harm in (
        lambda: store.delete([f"{key}/partition.json"]),
        lambda: store.delete([shard.path]),
        lambda: flip(store, shard.path),
    ):
        harm()
        plan = machine.plan(several)
        if not plan.intact:
            assert key in plan.fault
        else:
            with pytest.raises(DataError, match=rf"{shard.path}: is damaged: SHA-256 \w+, not"):
                other.download(several)
            assert "partition.json: is missing" in machine.plan(several).fault
        assert machine.build(several).splits == manifest.splits
        assert machine.made == [key]
        assert machine.plan(several).intact
    assert examine_dataset(other.download(several), reads_all=True)[1] == []


def test_a_damaged_copy_is_downloaded_again(several, machine, caplog):
    machine.build(several)
    folder = machine.download(several)
    name, shard = next(read_manifest(folder).files())
    (folder / name).write_bytes(bytes(shard.bytes))
    with pytest.raises(DataError, match="is damaged"):
        verify_dataset(folder)
    with caplog.at_level("INFO"):
        assert machine.download(several) == folder
    (key,) = set(re.findall(r"(\w+)/train-0.arrow: is damaged", caplog.text))
    assert key == shard.path.partition("/")[0]
    assert "downloading 1 of 1 partitions" in caplog.text
    assert caplog.text.count("is damaged") == 1
    assert verify_dataset(folder)


def test_a_partition_of_another_version_gives_way_to_the_one_in_the_store(several, machine):
    machine.build(several)
    folder = machine.download(several)
    name, shard = next(read_manifest(folder).files())
    whole = (folder / name).read_bytes()
    here = machine.folder / ".partitions" / shard.path
    other = whole[:-9] + b"\1" + whole[-8:]
    record = here.with_name("partition.json")
    text = record.read_text().replace(shard.sha256, hashlib.sha256(other).hexdigest())
    for path, content in ((here, other), (record, text.encode())):
        path.unlink()
        path.write_bytes(content)
    (folder / name).unlink()
    machine.download(several)
    assert (folder / name).read_bytes() == here.read_bytes() == whole
    assert not list(folder.rglob("*.new"))
    # Whoever describes the dataset anew takes no shard from a training.
    (folder / "origin.json").write_text("{}")
    assert machine.build(several)
    assert (folder / name).read_bytes() == whole


def test_a_dataset_larger_than_the_disk_is_refused_before_anything_is_downloaded(
    several, machine, tmp_path, monkeypatch, s3
):
    machine.build(several)
    folder = machine.finished(several).folder
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"GB of .* are to be downloaded, 1e-06 GB are free; .*"):
        download_shards(folder)
    assert not list(tmp_path.rglob("*/.partitions/*/*.arrow"))


def test_a_dataset_in_a_mounted_bucket_is_read_by_its_manifest(tmp_path, several, machine, bucket):
    """A plain folder that is laid out as the bucket is."""
    manifest = machine.build(several)
    store, mounted = ObjectStore(machine.address), tmp_path / "mounted"
    for each in store.list_below():
        store.download(each.key, mounted / each.key)
    folder = mounted / manifest.folder_name
    _, local = build(several, tmp_path / "local")
    for place in (folder, mounted):
        asked = several.model_copy(update={"folder": place})
        assert Machine(tmp_path / "work", None).finished(asked).folder == folder
    packing = PackingConfig(context_length=64)
    here, there = (open_windows(each, "train", packing, 16) for each in (local, folder))
    numbers = np.arange(len(here))
    assert torch.equal(here.gather(numbers).tokens, there.gather(numbers).tokens)
    shard = mounted / ".partitions" / manifest.splits["train"].shards[0].path
    shard.write_bytes(bytes(len(shard.read_bytes())))
    faults = examine_dataset(folder, reads_all=True)[1]
    assert faults == [f"{shard}: is damaged: its checksum differs from its record"]
    shard.unlink()
    with pytest.raises(DataError, match=f"^{shard}: is missing"):
        verify_dataset(folder)


def test_a_build_lists_the_partitions_once_and_reads_no_shard(several, machine, other, monkeypatch):
    listed, read = [], []
    plain, plain_read = ObjectStore.visit_below, ObjectStore.read
    monkeypatch.setattr(
        ObjectStore, "visit_below", lambda self, *below: listed.append(self) or plain(self, *below)
    )
    monkeypatch.setattr(
        ObjectStore, "read", lambda self, key: read.append(key) or plain_read(self, key)
    )
    machine.build(several)
    other.plan(several.model_copy(update={"name": "other"}))
    assert [each.address for each in listed] == [f"{machine.address}/.partitions"] * 2
    assert not [key for key in read if key.endswith(".arrow")]


def test_a_listing_of_many_partitions_takes_little_memory(tmp_path, monkeypatch):
    """The names of its objects alone would take some 100 bytes each."""
    count, written = 20_000, datetime.now(UTC)

    def visit_below(self, folder, visit):
        for number in range(count):
            key = f"{number:032x}/train-0.arrow"
            visit(StoredObject(f"{self.address}/{key}", key, number, Version(key), written))

    monkeypatch.setattr(ObjectStore, "visit_below", visit_below)
    datasets = StoredDatasets("s3://bucket/datasets", tmp_path)
    tracemalloc.start()
    try:
        assert datasets.find_partitions(["none"]) == {}
        assert tracemalloc.get_traced_memory()[1] < 130 * count
    finally:
        tracemalloc.stop()


def test_credentials_are_in_no_file_and_no_output(tmp_path, several, address, s3, caplog):
    """The stages as Prefect runs them, and everything that they write."""
    caplog.set_level("DEBUG")
    config = Machine(tmp_path / "work", address).config(several)
    file = tmp_path / "work" / "config.json"
    file.parent.mkdir()
    file.write_text(config.model_dump_json())

    def run(stage, *arguments):
        done = run_here(stages.main, stage, "--config", file, *arguments)
        return done.stdout + done.stderr

    output = run("download")
    listing = next((tmp_path / "work" / ".listings").glob("*.json"))
    output += run("plan", "--listing", listing) + run("shard", "--listing", listing)
    with s3.refusing():
        refused = run("plan", "--listing", listing)
    assert f'"address": "{address}/corpus-' in output
    assert "access denied" in refused
    told, store = output + refused + caplog.text, ObjectStore(address)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    written += [store.read(each.key)[0] for each in store.list_below()]
    for secret in CREDENTIALS.values():
        assert secret not in told
        assert not [content for content in written if secret.encode() in content]
