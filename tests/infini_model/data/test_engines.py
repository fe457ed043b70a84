"""Who makes partitions: threads, GPUs, shares or other processes all make the same ones, once."""

import gzip
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from corpora import build, files_config, make_texts, shard_bytes, write_files

from infini_model.config import Config, DataConfig
from infini_model.data.build import build_dataset, plan_dataset, requested_dataset
from infini_model.data.datasets import Datasets
from infini_model.data.engines import LocalEngine, devices_of
from infini_model.data.on_ray import Job, check_resources, make_partition, reserved
from infini_model.data.shares import make_share
from infini_model.data.sources import files
from infini_model.data.sources.listing import list_sources
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.load import usable_device
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.runtime import storage
from infini_model.runtime.errors import ConfigError, UserError
from infini_model.runtime.fact_cache import fact_cache
from infini_model.runtime.ray import on_node, sources_fingerprint


def report_until_stopped(advance):
    """Only the error that a report raises ends it; without one the test hangs."""
    while True:
        advance(1)
        time.sleep(0.001)


def make_by_threads(count, make):
    """Make as many partitions by three threads, where `make` stands for `Datasets.make`."""
    specs = [SimpleNamespace(bytes=number + 1) for number in range(count)]
    engine = LocalEngine(DataConfig(workers=3), ByteTokenizer())
    datasets = SimpleNamespace(make=make, remove_leftovers=lambda: None)
    engine.make(specs, datasets, lambda _: None)


def test_the_first_error_of_a_thread_is_raised_and_stops_the_others():
    started, all_at_work = [], threading.Barrier(3)

    def make(spec, _tokenizer, advance):
        started.append(spec.bytes)
        all_at_work.wait()
        if spec.bytes == 99:
            raise ValueError("spec 99")
        report_until_stopped(advance)

    with pytest.raises(ValueError, match="spec 99"):
        make_by_threads(100, make)
    assert sorted(started) == [98, 99, 100]


def test_ctrl_c_stops_the_threads():
    def make(_spec, _tokenizer, advance):
        os.kill(os.getpid(), signal.SIGINT)
        report_until_stopped(advance)

    with pytest.raises(KeyboardInterrupt):
        make_by_threads(1, make)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([make_texts(20)], 280)


NO_KERNELS = "tokenizer bytes is not supported on a GPU"
NO_TRITON = "Triton, which a GPU needs to tokenise, is not installed"


@pytest.mark.parametrize(
    ("device", "reason", "expected"),
    [
        ("auto", None, ["cpu"]),
        ("cuda", None, ["cuda:0", "cuda:1"]),
        ("cuda:1", None, ["cuda:1"]),
        ("cuda", NO_KERNELS, ["cpu"]),
        ("cuda:1", NO_TRITON, ["cpu"]),
    ],
)
def test_a_device_that_cannot_be_used_is_one_warning(
    monkeypatch, trained, caplog, device, reason, expected
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if reason == NO_TRITON:
        monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    tokenizer = ByteTokenizer() if reason == NO_KERNELS else trained
    assert devices_of(usable_device(tokenizer, device)) == expected
    said = f"{device} is not used: {reason}; tokenising on the CPU"
    assert [said] * bool(reason) == caplog.messages


def made(output_dir):
    return {path.name for path in (output_dir / "datasets" / ".partitions").glob("[!.]*")}


class Share:
    """A share of a dataset, made as if by a machine of its own that sees the same folders."""

    def __init__(self, config, output, number, count):
        self.config = config.model_copy(update={"share": f"{number}/{count}"})
        self.output = output

    def make(self):
        """The number of partitions that are still missing; lists the files first."""
        fact_cache.cache_clear()
        listing = list_sources(self.config, self.output)
        config = Config(data=self.config, run={"output_dir": self.output})
        return make_share(listing, config)[1]


@pytest.mark.parametrize("count", [3, 20])
def test_shares_in_any_order_make_each_partition_once_for_the_same_dataset(
    tmp_path, several, count
):
    """Of more shares than partitions, some are empty."""
    expected, _ = build(several, tmp_path / "whole")
    total, output = len(set(expected.partitions)), tmp_path / "shares"
    parts = []
    for number in random.Random(0).sample(range(1, count + 1), count):
        before = made(output)
        missing = Share(several, output, number, count).make()
        parts.append(made(output) - before)
        assert len(parts[-1]) in (total // count, total // count + 1)
        assert missing == total - len(made(output))
    assert missing == 0
    assert not list((output / "datasets").glob("corpus-*"))
    manifest = build_dataset(list_sources(several, output), several, output / "datasets")
    assert shard_bytes(output) == shard_bytes(tmp_path / "whole")
    assert manifest.splits == expected.splits
    # They do not depend on each other.
    Share(several, tmp_path / "elsewhere", number, count).make()
    assert made(tmp_path / "elsewhere") == parts[-1]


@pytest.fixture
def sources_read(monkeypatch):
    """The names of the source files whose checksums were computed."""
    read, sha256 = [], storage.sha256

    def noted(path):
        if str(path).endswith((".txt", ".gz")):
            read.append(Path(path).name)
        return sha256(path)

    monkeypatch.setattr(storage, "sha256", noted)
    monkeypatch.setattr(files, "SETTLED_NANOSECONDS", -1)
    return read


def test_a_large_file_is_read_by_one_share_and_no_file_twice(tmp_path, sources_read):
    texts = make_texts(60)
    raw = write_files(tmp_path / "raw", texts[:40])
    for number, text in enumerate(texts[40:48]):
        (raw / f"large-{number}.txt").write_text(text * (2500 + 100 * number))
    (raw / "packed.txt.gz").write_bytes(
        gzip.compress(random.Random(0).randbytes(1 << 19).hex().encode())
    )
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    expected, _ = build(config, tmp_path / "whole")
    everything, output = sorted(sources_read), tmp_path / "shares"
    assert sum(path.stat().st_size > 1 << 20 for path in raw.iterdir()) >= 4
    sources_read.clear()
    alone, before, missing = [], set(), []
    for number in range(1, 5):
        missing.append(Share(config, output, number, 4).make())
        now = made(output)
        alone.append(len(now - before))
        before = now
    assert sorted(sources_read) == everything
    assert min(alone) > 0
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0 < missing[-2]
    manifest = build_dataset(list_sources(config, output), config, output / "datasets")
    assert sorted(sources_read) == everything
    assert manifest.splits == expected.splits
    assert shard_bytes(output) == shard_bytes(tmp_path / "whole")


def test_a_share_that_does_not_know_all_files_is_no_earlier_dataset(tmp_path, sources_read):
    raw = write_files(tmp_path / "texts", make_texts(8))
    config = files_config(raw / "*", partition_megabytes=1, workers=1)
    earlier, _ = build(config, tmp_path)
    for number in range(3):
        (raw / f"large-{number}.txt").write_text(f"{number}" * (2 << 20))
    share = Share(config, tmp_path, 4, 4)
    listing = list_sources(share.config, tmp_path)
    # None of the new files is its own, so it knows those of the earlier dataset.
    assert len(listing.unread) == 3
    plan = plan_dataset(listing, Config(data=share.config, run={"output_dir": tmp_path}))
    assert plan.key == earlier.key
    assert not plan.intact
    assert share.make() == 6


def test_a_file_larger_than_a_share_is_divided(tmp_path, sources_read):
    (tmp_path / "one.txt").write_text("".join(f"{text}\n" for text in make_texts(3000)))
    config = files_config(tmp_path / "one.txt", partition_megabytes=1, workers=1)
    source = config.source.model_copy(update={"separator": "\n"})
    config = config.model_copy(update={"source": source})
    sizes = []
    for number in (1, 2):
        before = made(tmp_path)
        Share(config, tmp_path, number, 2).make()
        sizes.append(len(made(tmp_path) - before))
    assert min(sizes) > 0
    assert sources_read == ["one.txt"]


def test_shards_of_others_are_not_read_to_assemble_nor_to_plan(tmp_path, several, monkeypatch):
    """As if a cluster, or the machines of other shares, had made them in a folder that all see."""
    listing, datasets_dir = list_sources(several, tmp_path), tmp_path / "datasets"
    for number in (1, 2):
        Share(several, tmp_path, number, 2).make()
    fact_cache.cache_clear()
    read, plain = [], storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: read.append(path) or plain(path))
    manifest = build_dataset(listing, several, tmp_path / "datasets")
    fact_cache.cache_clear()
    assert Datasets(datasets_dir).find(manifest.folder_name) == manifest
    assert not [path for path in read if str(path).endswith(".arrow")]


@pytest.mark.parametrize(
    ("megabytes", "workers", "first", "alone"),
    [(1, 2, False, None), (99, 0, None, None), (1, 1, False, False)],
)
def test_only_a_single_worker_has_all_cores(
    tmp_path, trained, monkeypatch, megabytes, workers, first, alone
):
    (tmp_path / "tokenizer.json").write_text(trained.text)
    raw = write_files(tmp_path / "raw", [text * 400 for text in make_texts(12)])
    asked, plain = [], BPETokenizer.encode_batch

    def encode_batch(self, texts):
        asked.append(self.parallel)
        return plain(self, texts)

    monkeypatch.setattr(BPETokenizer, "encode_batch", encode_batch)
    fields = {"partition_megabytes": megabytes, "workers": workers}
    config = files_config(raw / "*", tokenizer={"spec": str(tmp_path)}, **fields)
    manifest, _ = build(config, tmp_path)
    assert (len(manifest.partitions) > 2) == (megabytes == 1)
    assert asked[0] is first
    assert set(asked) <= {first, alone}


def test_ray_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    raw = write_files(tmp_path / "raw", make_texts(3))
    with pytest.raises(ConfigError, match=r"^data\.engine: ray is not installed: pip .*$"):
        build(files_config(raw / "*", engine="ray"), tmp_path)
    build(files_config(raw / "*"), tmp_path)


def test_a_ray_task_that_fits_no_node_is_refused():
    resources = [{"CPU": 4.0, "memory": 8e9}, {"CPU": 2.0, "GPU": 1.0, "memory": 8e9}]
    dead = {"Alive": False, "Resources": {"CPU": 16.0, "GPU": 8.0, "memory": 1e12}}
    nodes = [*({"Alive": True, "Resources": each} for each in resources), dead]
    check_resources(reserved(DataConfig(ray_cpus=2, device="cuda", engine="ray")), nodes, "head:1")
    for asked, there, complaint in (
        ({"ray_cpus": 8}, nodes, "data.ray_cpus: got 8: no node of head:1 has more than 4"),
        ({"device": "cuda", "ray_gpus": 2}, nodes, "data.ray_gpus: got 2: no node of head:1 has"),
        ({"ray_memory_gigabytes": 9}, nodes, "data.ray_memory_gigabytes: got 9: no node of head:1"),
        ({"ray_cpus": 4, "device": "cuda"}, nodes, "data.ray_cpus, data.ray_gpus: no node of head"),
        ({"device": "cuda"}, nodes[:1], "data.device: got 'cuda': no node of head:1 has a G"),
    ):
        with pytest.raises(UserError) as refused:
            check_resources(reserved(DataConfig(engine="ray", **asked)), there, "head:1")
        assert str(refused.value).startswith(complaint)


def test_a_ray_node_that_does_not_see_the_folder_is_named(tmp_path):
    raw, place = write_files(tmp_path / "raw", make_texts(3)), tmp_path / "datasets"
    config = files_config(raw / "*")
    wanted = requested_dataset(list_sources(config, tmp_path), config, Datasets(place))
    (spec,) = wanted.specs(wanted.keys[""])
    job = Job(place=str(place), mark=place / "mark", sources=sources_fingerprint(), device="cpu")
    task = on_node(make_partition.__module__, make_partition.__name__)
    kind, message = task(job.model_dump_json(), spec.model_dump_json())
    assert kind == "user"
    assert message.startswith(f"{place}: is not the folder of this name on the machine that")
    assert message.endswith(f"(on {socket.gethostname()})")
    assert not made(tmp_path)
