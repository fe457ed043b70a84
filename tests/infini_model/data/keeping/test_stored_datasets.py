"""A dataset in an object store is the local one, and only what is new of it is made."""

import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from builds import Machine, in_a_fork, killed_in_a_request, killed_with_a_scratch_folder
from commands import run_here
from corpora import build, files_config, make_texts, write_files
from s3_server import CREDENTIALS

from infini_model import __main__ as stages
from infini_model.config import PackingConfig, load_config
from infini_model.data.keeping.holds import cache_lock, held_partitions
from infini_model.data.keeping.scratch import scratch_folder
from infini_model.data.keeping.staging import staged_dataset
from infini_model.data.keeping.stored_partitions import StoredPartitions
from infini_model.data.loading.windows import open_windows
from infini_model.data.manifest import read_manifest
from infini_model.data.shards import plan as planning
from infini_model.data.shards.plan import finished_dataset
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.verification import examine_dataset, verify_dataset
from infini_model.runtime import storage
from infini_model.runtime.claims import claim_run, resume_config
from infini_model.runtime.errors import DataError, StoreError, UnreachableError
from infini_model.runtime.object_stores.object_store import ObjectStore
from infini_model.runtime.runs import dataset_here
from infini_model.runtime.stored.working_copy import refresh_runs


@pytest.fixture
def address(bucket):
    return f"{bucket}/team/datasets"


@pytest.fixture
def corpus(tmp_path):
    """Files of several partitions."""
    raw = write_files(tmp_path / "raw", [text * 120 for text in make_texts(16)])
    return files_config(raw / "*", partition_megabytes=1, workers=2)


@pytest.fixture
def trained(corpus):
    """The same with a tokenizer that is trained on them."""
    tokenizer = corpus.tokenizer.model_copy(update={"spec": "train", "vocab_size": 260})
    return corpus.model_copy(update={"tokenizer": tokenizer})


@pytest.fixture
def machine(tmp_path, address):
    return Machine(tmp_path / "first", address)


@pytest.fixture
def other(tmp_path, address):
    return Machine(tmp_path / "second", address)


def partition_keys(address):
    return StoredPartitions(address, Path()).keys()


def shard_bytes(folder):
    return {name: (folder / name).read_bytes() for name, _ in read_manifest(folder).files()}


def leftovers(folder):
    return [*folder.rglob(".tmp-*")]


def test_it_has_the_shards_of_the_local_dataset_byte_for_byte(tmp_path, trained, machine):
    import datasets

    expected, local = build(trained, tmp_path / "local")
    manifest = machine.build(trained)
    folder = machine.folder / manifest.folder_name
    assert (manifest.key, manifest.splits) == (expected.key, expected.splits)
    assert len(set(manifest.partitions)) > 2
    assert not [name for name, _ in manifest.files() if (folder / name).exists()]
    assert verify_dataset(folder) == manifest
    assert load_dataset_tokenizer(folder).fingerprint == manifest.tokenizer.fingerprint
    assert machine.stage(trained) == folder
    assert shard_bytes(folder) == shard_bytes(local)
    assert verify_dataset(folder) == manifest
    loaded = datasets.load_from_disk(str(folder))
    assert len(loaded["train"]) == manifest.splits["train"].documents
    assert not leftovers(machine.folder)
    assert [path.name for path in (machine.folder / ".scratch").iterdir()] == [".lock"]


def test_another_machine_makes_and_copies_only_what_is_new_and_opens_the_same_windows(
    tmp_path, trained, machine, other
):
    manifest = machine.build(trained)
    plan, count = other.plan(trained), len(set(manifest.partitions))
    assert (plan.intact, plan.new, plan.reused) == (True, 0, count)
    assert plan.folder == other.folder / manifest.folder_name
    assert plan.address == f"{other.address}/{manifest.folder_name}"
    assert plan.model_copy(update={"folder": None}) == other.finished(trained).model_copy(
        update={"folder": None}
    )
    packing = PackingConfig(context_length=128)
    tokens = []
    for each in (machine, other):
        windows = open_windows(each.stage(trained), "train", packing, 64)
        tokens.append(windows.gather(np.arange(len(windows))).tokens)
    assert np.array_equal(*tokens)
    # It goes on with the tokenizer that the first one has trained.
    copies = {path: path.stat().st_ino for path in (other.folder / ".staged").rglob("*.arrow")}
    (tmp_path / "raw" / "more.txt").write_text("quite different " * 99)
    plan = other.plan(trained)
    assert (plan.intact, plan.new, plan.reused) == (False, 1, count - 1)
    assert other.build(trained).tokenizer == manifest.tokenizer
    assert len(other.made) == 1
    other.stage(trained)
    now = {path: path.stat().st_ino for path in (other.folder / ".staged").rglob("*.arrow")}
    assert copies.items() <= now.items()
    assert {path.parent.name for path in now.keys() - copies.keys()} == set(other.made)


@pytest.mark.parametrize("given", ["dataset", "newest", "path"])
def test_an_address_names_a_dataset_or_the_newest(corpus, machine, tmp_path, given, monkeypatch):
    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "cache"))
    manifest = machine.build(corpus)
    folder = {
        "dataset": f"{machine.address}/{manifest.folder_name}",
        "newest": machine.address,
        "path": "/of/another/machine/" + manifest.folder_name,
    }[given]
    elsewhere = Machine(tmp_path / "elsewhere", machine.address)
    plan = elsewhere.finished(corpus.model_copy(update={"folder": folder}))
    assert plan.key == manifest.key
    assert read_manifest(plan.folder) == manifest
    # A folder that is whole needs no store.
    elsewhere.stage(corpus.model_copy(update={"folder": folder}))
    alone = Machine(tmp_path / "alone", "s3://nowhere/at-all")
    assert alone.finished(corpus.model_copy(update={"folder": plan.folder})).intact


@pytest.mark.parametrize("own", [True, False])
def test_a_run_is_resumed_elsewhere_with_its_dataset(
    corpus, machine, bucket, tmp_path, monkeypatch, own
):
    manifest = machine.build(corpus)
    # The datasets are in a place of their own, or the run was given one by its address.
    place = {"run": {"data_dir": machine.address}}
    if not own:
        place = {"data": {"folder": f"{machine.address}/{manifest.folder_name}"}}
    run = {"output_dir": f"{bucket}/runs", "preset": "debug"}

    monkeypatch.setenv("INFINI_CACHE_DIR", str(tmp_path / "one"))
    config = load_config(overrides=[{"run": run}, place])
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
    assert not (tmp_path / "one").exists()
    with claim_run(resumed, found.key, found.folder, address=found.address) as again:
        assert again == places.runs_dir / run_dir.name
        assert dataset_here(again) == found.folder


@pytest.mark.parametrize(("given", "staged"), [("address", False), ("folder", True)])
def test_a_working_copy_that_is_about_to_be_used_looks_new(
    corpus, machine, monkeypatch, given, staged
):
    folder = machine.folder / machine.build(corpus).folder_name
    if staged:
        machine.stage(corpus)
    os.utime(folder / "manifest.json", (0, 0))
    before = folder.parent / "before"
    before.touch()
    asked = {"address": f"{machine.address}/{folder.name}", "folder": folder}[given]
    verified = []
    monkeypatch.setattr(
        planning, "verify_dataset", lambda path: verified.append(path) or verify_dataset(path)
    )
    assert machine.finished(corpus.model_copy(update={"folder": asked})).folder == folder
    assert (folder / "manifest.json").stat().st_mtime_ns >= before.stat().st_mtime_ns
    assert verified == ([folder] if given == "folder" else [])


def test_what_is_no_dataset_is_named(corpus, machine, bucket):
    with pytest.raises(DataError, match=r"latest: there is no finished dataset yet"):
        machine.finished(corpus)
    folder = f"{bucket}/of/none"
    with pytest.raises(DataError, match=r"/of/none/latest: there is no finished dataset yet"):
        machine.finished(corpus.model_copy(update={"folder": folder}))


def build_at_once(*builds):
    """Build on several machines at once, in threads: they have no folder in common."""
    with ThreadPoolExecutor(len(builds)) as pool:
        list(pool.map(lambda each: each[0].build(each[1]), builds))


def test_two_machines_that_train_a_tokenizer_agree_on_one(tmp_path, trained, machine, other):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("some other text entirely " * 500)
    different = files_config(tmp_path / "other" / "*", tokenizer=trained.tokenizer.model_dump())
    build_at_once((machine, trained), (other, different))
    fingerprints = {
        read_manifest(each.folder / "latest").tokenizer.fingerprint for each in (machine, other)
    }
    assert len(fingerprints) == 1
    retrain = {"tokenizer": trained.tokenizer.model_copy(update={"retrain": True})}
    again = machine.build(trained.model_copy(update=retrain))
    assert other.build(trained).tokenizer == again.tokenizer


def test_two_builds_at_once_do_no_harm(tmp_path, corpus, machine, other):
    build_at_once((machine, corpus), (other, corpus))
    _, local = build(corpus, tmp_path / "local")
    for each in (machine, other):
        assert each.plan(corpus).intact
        assert shard_bytes(each.stage(corpus)) == shard_bytes(local)


@pytest.mark.parametrize(
    ("task", "method", "calls"),
    [
        ("build", "upload", 3),
        ("build", "write", 1),
        ("build", "write", 6),
        ("build", "_request", 12),
        ("stage", "_request", 5),
        ("stage", "download", 4),
    ],
)
def test_what_was_finished_before_a_kill_is_kept(tmp_path, corpus, machine, task, method, calls):
    _, local = build(corpus, tmp_path / "local")
    if task == "stage":
        machine.build(corpus)
    with pytest.raises(BrokenProcessPool):
        in_a_fork(killed_in_a_request, machine, task, corpus, method, calls)
    finished, cache = partition_keys(machine.address), machine.folder / ".staged"
    copied = {path: path.stat().st_ino for path in cache.rglob("*.arrow")}
    if method == "download":
        # The killed process held copies, and holds them no longer.
        assert list((cache / ".locks").iterdir())
        assert held_partitions(cache) == set()
    machine.build(corpus)
    assert finished.isdisjoint(machine.made)
    folder = machine.stage(corpus)
    assert shard_bytes(folder) == shard_bytes(local)
    assert all(path.stat().st_ino == inode for path, inode in copied.items())
    assert not leftovers(machine.folder)


def flip(store, key):
    content = bytearray(store.read(key)[0])
    content[len(content) // 2] ^= 1
    store.write(key, bytes(content))


@pytest.mark.parametrize(
    "harm",
    [
        lambda store, key: store.delete([f"{key}/partition.json"]),
        lambda store, key: store.delete([f"{key}/train-0.arrow"]),
        lambda store, key: store.write(f"{key}/train-0.arrow", b"short"),
        lambda store, key: store.write(f"{key}/partition.json", b"{torn"),
    ],
    ids=["no record", "no shard", "short shard", "torn record"],
)
def test_a_torn_partition_is_made_again_alone(corpus, machine, harm):
    manifest = machine.build(corpus)
    store = ObjectStore(f"{machine.address}/.partitions")
    key = manifest.splits["train"].shards[1].path.partition("/")[0]
    harm(store, key)
    plan = machine.plan(corpus)
    if plan.intact:
        # A dataset does not read the records of its partitions, only the next one does.
        ObjectStore(machine.address).delete([f"{manifest.folder_name}/manifest.json"])
    else:
        assert key in plan.fault
        assert "\n" not in plan.fault
    assert machine.build(corpus).splits == manifest.splits
    assert machine.made == [key]
    assert machine.plan(corpus).intact
    assert examine_dataset(machine.stage(corpus), every=True).faults == []


def test_a_flipped_byte_is_named_and_its_partition_made_again_alone(corpus, machine, other):
    manifest = machine.build(corpus)
    shard = manifest.splits["train"].shards[1]
    flip(ObjectStore(f"{machine.address}/.partitions"), shard.path)
    with pytest.raises(DataError, match=rf"{shard.path}: is damaged: SHA-256 \w+, not \w+; run"):
        other.stage(corpus)
    assert not leftovers(other.folder)
    assert "partition.json: is missing" in machine.plan(corpus).fault
    machine.build(corpus)
    assert machine.made == [shard.path.partition("/")[0]]
    assert examine_dataset(other.stage(corpus), every=True).faults == []


def test_a_damaged_copy_is_copied_again(corpus, machine, caplog):
    machine.build(corpus)
    folder = machine.stage(corpus)
    name, shard = next(read_manifest(folder).files())
    copy = (folder / name).resolve()
    copy.write_bytes(bytes(shard.bytes))
    with pytest.raises(DataError, match="is damaged"):
        verify_dataset(folder)
    with caplog.at_level("INFO"):
        assert machine.stage(corpus) == folder
    assert f"{copy}: is damaged" in caplog.text
    assert verify_dataset(folder)


def test_the_least_recently_used_copies_make_room(tmp_path, corpus, machine, caplog):
    manifest = machine.build(corpus)
    total = sum(shard.bytes for _, shard in manifest.files())
    cache = tmp_path / "disk" / "cache"
    limited = corpus.model_copy(update={"cache_dir": cache, "cache_gigabytes": total * 1.2 / 1e9})
    folder = machine.stage(limited)
    assert (folder / "train").is_dir()
    assert sum(path.stat().st_size for path in cache.rglob("*.arrow")) == total
    for name in ("second", "third"):
        texts = [text * 40 for text in make_texts(10, len(name))]
        raw = write_files(tmp_path / name, texts)
        new = files_config(
            raw / "*", name=name, cache_dir=cache, cache_gigabytes=limited.cache_gigabytes
        )
        machine.build(new)
        assert examine_dataset(machine.stage(new), every=True).faults == []
        used = sum(path.stat().st_size for path in cache.rglob("*.arrow"))
        assert used <= total * 1.2
    assert not all((folder / name).exists() for name, _ in manifest.files())
    small = corpus.model_copy(
        update={"folder": folder, "cache_dir": cache, "cache_gigabytes": 1e-6}
    )
    with caplog.at_level("INFO"):
        machine.stage(small)
    assert "more than data.cache_gigabytes=1e-06" in caplog.text


def test_copies_that_a_training_uses_stay_and_others_are_read_from_the_store(
    tmp_path, corpus, machine, caplog
):
    manifest = machine.build(corpus)
    total = sum(shard.bytes for _, shard in manifest.files())
    limited = corpus.model_copy(update={"cache_gigabytes": total * 1.2 / 1e9})
    raw = write_files(tmp_path / "second", [text * 100 for text in make_texts(16, 7)])
    second = files_config(
        raw / "*", name="second", partition_megabytes=1, cache_gigabytes=limited.cache_gigabytes
    )
    packing = PackingConfig(context_length=128)
    with machine.staged(limited) as folder:
        windows = open_windows(folder, "train", packing, 64)  # Maps nothing yet.
        size = sum(shard.bytes for _, shard in machine.build(second).files())
        assert total * 0.2 < size < total * 1.2
        with caplog.at_level("INFO"), machine.staged(second) as other:
            assert "others that are in use" in caplog.text
            streamed = open_windows(other, "train", packing, 64)
            assert len(streamed.gather(np.arange(len(streamed))).tokens)
        assert len(windows.gather(np.arange(len(windows))).tokens) == len(windows)
        assert examine_dataset(folder, every=True).faults == []
    other = machine.stage(second)
    assert all((other / name).exists() for name, _ in read_manifest(other).files())
    assert not all((folder / name).exists() for name, _ in manifest.files())
    assert len([*(machine.folder / ".staged" / ".locks").iterdir()]) == 1


def test_who_waits_for_another_copy_says_so_and_can_be_stopped(corpus, machine):
    machine.build(corpus)
    folder, lines = machine.finished(corpus).folder, []
    reasons = iter([None, None, InterruptedError("enough")])
    with (
        storage.lock(cache_lock(machine.folder / ".staged")),
        pytest.raises(InterruptedError, match="enough"),
        staged_dataset(folder, tell=lines.append, stop=lambda: next(reasons)),
    ):
        pass
    waits = f"waiting for another process that copies shards to {machine.folder / '.staged'}"
    assert lines == [waits]


@pytest.mark.parametrize(
    ("trouble", "message"), [("refusing", "access denied"), ("away", "cannot be reached")]
)
def test_a_store_that_refuses_or_stays_away_is_one_line(
    corpus, machine, s3, monkeypatch, trouble, message
):
    monkeypatch.setattr(ObjectStore.__init__, "__defaults__", (0.2,))
    machine.build(corpus)
    with s3.refusing() if trouble == "refusing" else s3.line.gone():
        for action in (machine.build, machine.stage):
            with pytest.raises((StoreError, UnreachableError), match=message) as error:
                action(corpus)
            assert "\n" not in str(error.value)


def test_credentials_are_in_no_file_and_no_output(tmp_path, corpus, address, s3, caplog):
    """The stages as Prefect runs them, and everything that they write."""
    caplog.set_level("DEBUG")
    config = Machine(tmp_path / "work", address).config(corpus)
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
    told = output + refused + caplog.text
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    written += [
        ObjectStore(address).read(each.key)[0] for each in ObjectStore(address).list_below()
    ]
    for secret in CREDENTIALS.values():
        assert secret not in told
        assert not [content for content in written if secret.encode() in content]


def test_a_scratch_folder_stays_while_it_is_in_use_and_goes_with_a_killed_process(tmp_path):
    with scratch_folder(tmp_path) as mine:
        with pytest.raises(BrokenProcessPool):
            in_a_fork(killed_with_a_scratch_folder, tmp_path)
        (left,) = tmp_path.glob("*/half")
        with scratch_folder(tmp_path) as second:
            assert not left.exists()
            assert {*tmp_path.glob(".tmp-*")} == {mine, second}
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
