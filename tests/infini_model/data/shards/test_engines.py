"""Who makes partitions: threads, GPUs, shares or other processes all make the same ones, once."""

import os
import random
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from corpora import build, files_config, make_texts, shard_bytes, write_files, write_parquet

from infini_model.config import DataConfig
from infini_model.data.shards import dataset, partition_store
from infini_model.data.shards.dataset import build_dataset, make_share, requested_dataset
from infini_model.data.shards.on_ray import worker
from infini_model.data.shards.on_ray.room import check_room, reserved
from infini_model.data.shards.on_ray.worker import Job, make_partition
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.shards.workers import worker_devices
from infini_model.data.sources.download import download
from infini_model.data.threads import for_each
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.load import on_device
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.data.tokenizers.vocabulary import dataset_tokenizer
from infini_model.runtime.errors import ConfigError, DeviceError, UserError
from infini_model.runtime.on_ray.nodes import attempt, sources_fingerprint


def report_until_stopped(advance):
    """Only the error that a report raises ends it; without one the test hangs."""
    while True:
        advance(1)
        time.sleep(0.001)


def test_threads_process_every_item_once_and_report_one_at_a_time():
    done, inside = [], threading.Lock()

    def advance(count):
        assert inside.acquire(blocking=False)
        time.sleep(0.0001)
        done.append(count)
        inside.release()

    for_each(iter(range(100)), [lambda item, report: report(item)] * 4, advance)
    assert sorted(done) == list(range(100))


def test_the_first_error_of_a_thread_is_raised_and_stops_the_others():
    started, all_at_work = [], threading.Barrier(3)

    def work(item, advance):
        started.append(item)
        all_at_work.wait()
        if item == 1:
            raise ValueError("item 1")
        report_until_stopped(advance)

    with pytest.raises(ValueError, match="item 1"):
        for_each(range(100), [work] * 3, lambda _: None)
    assert sorted(started) == [0, 1, 2]


def test_ctrl_c_stops_the_threads():
    def work(_item, advance):
        os.kill(os.getpid(), signal.SIGINT)
        report_until_stopped(advance)

    with pytest.raises(KeyboardInterrupt):
        for_each([1], [work], lambda _: None)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([make_texts(20)], 280)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("auto", 2, ["cpu"] * 3),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("mixed", 2, ["cuda:0", "cuda:1", "cpu"]),
    ],
)
def test_workers_have_devices(monkeypatch, trained, device, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert worker_devices(DataConfig(device=device, workers=3), trained) == expected


@pytest.mark.parametrize(
    ("device", "gpus", "lacking", "reason"),
    [
        ("cuda", 2, "tokenizer", "tokenizer bytes is not supported on a GPU"),
        ("mixed", 0, "GPU", "this machine has no GPU"),
        ("cuda:1", 2, "triton", "Triton, which a GPU needs to tokenise, is not installed"),
    ],
)
def test_a_device_without_effect_is_one_warning(
    monkeypatch, trained, caplog, device, gpus, lacking, reason
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if lacking == "triton":
        monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
        assert on_device(trained, device) is trained
        assert reason in warnings_of(caplog)[0]
        caplog.clear()
    tokenizer = ByteTokenizer() if lacking == "tokenizer" else trained
    assert worker_devices(DataConfig(device=device, workers=2), tokenizer) == ["cpu", "cpu"]
    assert warnings_of(caplog) == [
        f"data.device={device} has no effect: {reason}; tokenising on the CPU with 2 threads "
        "instead"
    ]


def test_a_gpu_that_gives_other_ids_is_replaced_by_the_cpu(monkeypatch, tmp_path, caplog):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu import device_tokenizer

    def disagree(tokenizer, device):
        raise UnsupportedTokenizerError(f"{device} and tokenizers disagree")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_tokenizer, "put_on_device", disagree)
    raw = write_parquet(tmp_path / "a.parquet", make_texts(5))
    config = files_config(raw, device="cuda", tokenizer={"spec": "train", "vocab_size": 280})
    manifest, _ = build(config, tmp_path)
    assert manifest.documents == 5
    assert warnings_of(caplog) == [
        "cuda:0 is not used: cuda:0 and tokenizers disagree; tokenising on the CPU"
    ]


@pytest.mark.cuda
def test_shards_do_not_depend_on_the_device(monkeypatch, tmp_path, gpu):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer

    raw = write_parquet(tmp_path / "a.parquet", make_texts(7, longest=40))
    config = files_config(raw, tokenizer={"spec": "train", "vocab_size": 300}, workers=1)
    expected, _ = build(config, tmp_path / "host")

    def on_tensors(*asked):
        asked_for = dataset_tokenizer(*asked)
        tensors = DeviceTokenizer(asked_for.tokenizer, gpu, 1 << 12)
        return asked_for._replace(tokenizer=tensors)

    monkeypatch.setattr(dataset, "dataset_tokenizer", on_tensors)
    manifest, _ = build(config.model_copy(update={"batch_size": 3}), tmp_path / "device")
    assert manifest.key == expected.key
    assert manifest.splits == expected.splits


def made(output_dir):
    return LocalPartitions(output_dir / "datasets").keys()


@pytest.mark.parametrize("count", [3, 20])
def test_shares_in_any_order_make_each_partition_once_and_the_same_dataset(
    tmp_path, several, count, caplog
):
    """Of more shares than partitions, some are empty."""
    caplog.set_level("INFO")
    expected, _ = build(several, tmp_path / "whole")
    total, output = len(set(expected.partitions)), tmp_path / "shares"

    def share(number, folder):
        config = several.model_copy(update={"share": f"{number}/{count}"})
        return make_share(download(config, folder), config, folder / "datasets")

    parts = []
    for number in random.Random(0).sample(range(1, count + 1), count):
        before = made(output)
        missing = share(number, output)
        parts.append(made(output) - before)
        assert len(parts[-1]) in (total // count, total // count + 1)
        assert missing == total - len(made(output))
        caplog.clear()
        share(number, output)
        again = f"share {number}/{count}: 0 partitions to make, {len(parts[-1])} present"
        assert again in caplog.text
    assert missing == 0
    assert not list((output / "datasets").glob("corpus-*"))
    manifest = build_dataset(download(several, output), several, output)
    assert shard_bytes(output) == shard_bytes(tmp_path / "whole")
    assert manifest.splits == expected.splits
    # They do not depend on each other.
    share(number, tmp_path / "elsewhere")
    assert made(tmp_path / "elsewhere") == parts[-1]


def test_a_partition_that_two_want_at_once_is_made_once(tmp_path, several, monkeypatch):
    """Here threads: the locks do not tell them apart from processes."""
    wanted = requested_dataset(download(several, tmp_path), several, tmp_path / "datasets")
    plain, keys = partition_store.make_partition, []

    def noted(spec, *arguments):
        keys.append(spec.key)
        return plain(spec, *arguments)

    def make_all(_):
        store = LocalPartitions(tmp_path / "datasets")
        for spec in wanted.specs():
            store.make(spec, wanted.tokenizer, lambda count: None)

    monkeypatch.setattr(partition_store, "make_partition", noted)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make_all, range(2)))
    assert sorted(keys) == sorted(made(tmp_path))
    assert len(keys) > 3


def test_ray_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    raw = write_files(tmp_path / "raw", make_texts(3))
    with pytest.raises(ConfigError, match=r"^data\.engine: ray is not installed: pip .*$"):
        build(files_config(raw / "*", engine="ray"), tmp_path)
    build(files_config(raw / "*"), tmp_path)


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


def test_a_ray_task_that_fits_no_node_is_refused():
    nodes = [node(CPU=4.0, memory=8e9), node(CPU=2.0, GPU=1.0, memory=8e9)]
    nodes.append(node(alive=False, CPU=16.0, GPU=8.0, memory=1e12))
    check_room(reserved(DataConfig(ray_cpus=2, device="cuda", engine="ray")), nodes, "head:1")
    for asked, there, complaint in (
        ({"ray_cpus": 8}, nodes, "data.ray_cpus: got 8: no node of head:1 has more than 4"),
        ({"device": "cuda", "ray_gpus": 2}, nodes, "data.ray_gpus: got 2: no node of head:1 has"),
        ({"ray_memory_gigabytes": 9}, nodes, "data.ray_memory_gigabytes: got 9: no node of head:1"),
        ({"ray_cpus": 4, "device": "cuda"}, nodes, "data.ray_cpus, data.ray_gpus: no node of head"),
        ({"device": "cuda"}, nodes[:1], "data.device: got 'cuda': no node of head:1 has a G"),
    ):
        with pytest.raises((UserError, DeviceError)) as refused:
            check_room(reserved(DataConfig(engine="ray", **asked)), there, "head:1")
        assert str(refused.value).startswith(complaint)


def test_a_ray_node_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_benches", {})
    config = files_config(write_files(tmp_path / "raw", make_texts(3)) / "*")
    wanted = requested_dataset(download(config, tmp_path), config, tmp_path / "datasets")
    (spec,) = wanted.specs()
    job = Job(
        place=str(tmp_path / "datasets"),
        mark=str(tmp_path / "datasets" / "mark"),
        sources=sources_fingerprint(),
        device="cpu",
    )
    refused = attempt(make_partition, job.model_dump_json(), spec.model_dump_json())
    assert refused is not None
    kind, message = refused
    assert kind == "user"
    assert message.startswith(f"{job.place}: is not the folder of this name on the machine that")
    assert message.endswith(f"(on {socket.gethostname()})")
    assert not made(tmp_path)
    (tmp_path / "datasets").mkdir(exist_ok=True)
    (tmp_path / "datasets" / "mark").touch()
    assert attempt(make_partition, job.model_dump_json(), spec.model_dump_json()) is None
    assert made(tmp_path) == {spec.key}
