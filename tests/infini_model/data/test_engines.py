"""Who makes partitions: threads, GPUs or other processes all make the same ones, once."""

import os
import shutil
import signal
import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from corpora import build, files_config, make_texts, write_files

from infini_model.config import DataConfig
from infini_model.data.build import build_dataset, requested_dataset
from infini_model.data.datasets import Datasets
from infini_model.data.engines import LocalEngine, devices_of
from infini_model.data.on_ray import check_resources, make_partition, reserved
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


def test_shards_of_others_are_not_read_to_assemble_nor_to_plan(tmp_path, several, monkeypatch):
    """As if a cluster had made them in a folder that all see."""
    listing, datasets_dir = list_sources(several, tmp_path), tmp_path / "datasets"
    _, folder = build(several, tmp_path)
    shutil.rmtree(folder)
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
        ({"ray_cpus": 8}, nodes, "data.ray_cpus: no node of head:1 has as much; ray status"),
        ({"device": "cuda", "ray_gpus": 2}, nodes, "data.ray_gpus: no node of head:1 has as much"),
        ({"ray_memory_gigabytes": 9}, nodes, "data.ray_memory_gigabytes: no node of head:1"),
        ({"ray_cpus": 4, "device": "cuda"}, nodes, "data.ray_cpus, data.ray_gpus: no node of head"),
        ({"device": "cuda"}, nodes[:1], "data.ray_gpus: no node of head:1 has as much"),
    ):
        with pytest.raises(UserError) as refused:
            check_resources(reserved(DataConfig(engine="ray", **asked)), there, "head:1")
        assert str(refused.value).startswith(complaint)


def test_a_ray_node_that_does_not_see_the_folder_is_named(tmp_path):
    raw, place = write_files(tmp_path / "raw", make_texts(3)), tmp_path / "datasets"
    config = files_config(raw / "*")
    wanted = requested_dataset(list_sources(config, tmp_path), config, Datasets(place))
    (spec,) = wanted.specs(wanted.keys[""])
    task = on_node(make_partition.__module__, make_partition.__name__)
    kind, message = task(
        str(place), place / "mark", sources_fingerprint(), "cpu", spec.model_dump_json()
    )
    assert kind == "user"
    assert message.startswith(f"{place}: is not the folder of this name on the machine that")
    assert message.endswith(f"(on {socket.gethostname()})")
    assert not made(tmp_path)
