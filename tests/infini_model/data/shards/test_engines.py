"""Who makes partitions: threads, GPUs, shares or other processes all make the same ones, once."""

import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from builds import in_a_fork, make_partitions
from corpora import build, files_config, make_texts, write_files, write_parquet

from infini_model.config import DataConfig
from infini_model.data.keeping.staging import staged_dataset
from infini_model.data.keeping.stored_partitions import StoredPartitions
from infini_model.data.shards import dataset, partition_store
from infini_model.data.shards.dataset import build_dataset, make_share, requested_dataset
from infini_model.data.shards.on_ray import worker
from infini_model.data.shards.on_ray.room import check_room, reserved
from infini_model.data.shards.on_ray.worker import Job, make_partition
from infini_model.data.shards.partition_store import LocalPartitions
from infini_model.data.shards.workers import worker_devices
from infini_model.data.sources.download import download
from infini_model.data.threads import for_each
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.load import on_device
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.data.tokenizers.vocabulary import dataset_tokenizer
from infini_model.runtime.errors import ConfigError, DeviceError, UserError
from infini_model.runtime.on_ray.nodes import attempt, sources_fingerprint


@pytest.fixture
def several(tmp_path):
    """A configuration of several partitions."""
    raw = write_files(tmp_path / "raw", [text * 200 for text in make_texts(30)])
    return files_config(raw / "*", partition_megabytes=1, workers=1)


def shards_of(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.arrow"))
    }


def report_until_stopped(advance):
    """Only the error that a report raises ends it; without one the test hangs."""
    while True:
        advance(1)
        time.sleep(0.001)


def test_threads_process_every_item_once_and_report_one_at_a_time():
    done, total, inside = [], 0, threading.Lock()

    def advance(count):
        nonlocal total
        assert inside.acquire(blocking=False)
        before = total
        time.sleep(0.0001)
        total = before + count
        inside.release()

    def work(item, advance):
        advance(item)
        done.append(item)

    for_each(iter(range(100)), [work] * 4, advance)
    assert sorted(done) == list(range(100))
    assert total == sum(range(100))


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
    ("device", "gpus", "kind", "reason"),
    [
        ("cuda", 2, "bytes", "tokenizer bytes is not supported on a GPU"),
        ("cuda:1", 2, "normalizer", "normalizer NFC is not supported on a GPU"),
        ("mixed", 0, "trained", "this machine has no GPU"),
    ],
)
def test_a_device_without_effect_is_one_warning(
    monkeypatch, trained, caplog, device, gpus, kind, reason
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    tree = json.loads(trained.definition()) | {"normalizer": {"type": "NFC"}}
    tokenizers = {
        "bytes": ByteTokenizer(),
        "normalizer": BPETokenizer("x", json.dumps(tree)),
        "trained": trained,
    }
    assert worker_devices(DataConfig(device=device, workers=2), tokenizers[kind]) == ["cpu", "cpu"]
    assert warnings_of(caplog) == [
        f"data.device={device} has no effect: {reason}; tokenising on the CPU with 2 threads "
        "instead"
    ]


def test_a_gpu_needs_triton(monkeypatch, trained, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert on_device(trained, "cuda:1") is trained
    assert worker_devices(DataConfig(device="cuda", workers=1), trained) == ["cpu"]
    reason = "Triton, which a GPU needs to tokenise, is not installed"
    assert [reason in warning for warning in warnings_of(caplog)] == [True, True]


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


SHARES = 3


def share(config, output_dir, number, count=SHARES):
    """What the share stage does: how many partitions are missing then."""
    config = config.model_copy(update={"share": f"{number}/{count}"})
    return make_share(download(config, output_dir), config, output_dir / "datasets")


def made(output_dir):
    return LocalPartitions(output_dir / "datasets").keys()


def test_shares_in_any_order_make_each_partition_once_and_the_same_dataset(
    tmp_path, several, caplog
):
    caplog.set_level("INFO")
    expected, _ = build(several, tmp_path / "whole")
    total, output = len(set(expected.partitions)), tmp_path / "shares"
    assert total > 2 * SHARES
    for number in random.Random(0).sample(range(1, SHARES + 1), SHARES):
        before = made(output)
        missing = share(several, output, number)
        new = made(output) - before
        assert len(new) in (total // SHARES, total // SHARES + 1)
        assert f"share {number}/{SHARES}: {len(new)} partitions to make, 0 present" in caplog.text
        assert missing == total - len(made(output))
        share(several, output, number)
        again = f"share {number}/{SHARES}: 0 partitions to make, {len(new)} present"
        assert again in caplog.text
    assert missing == 0
    assert not list((output / "datasets").glob("corpus-*"))
    manifest = build_dataset(download(several, output), several, output)
    assert shards_of(output) == shards_of(tmp_path / "whole")
    assert manifest.splits == expected.splits


def test_shares_do_not_depend_on_each_other_and_more_than_partitions_leave_nothing_over(
    tmp_path, several
):
    missing, keys = [], [set()]
    for number in range(1, 21):
        missing.append(share(several, tmp_path, number, 20))
        keys.append(made(tmp_path))
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] == 0
    share(several, tmp_path / "elsewhere", 2, 20)
    assert made(tmp_path / "elsewhere") == keys[2] - keys[1] != set()


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


class ProcessEngine:
    """Two processes, each of which makes every partition: what is made twice does no harm.

    A process gets specs as JSON, has an empty folder of its own below `folder`, and shares nothing
    but the store. It may die after its first partition.
    """

    def __init__(self, folder, *, dies=False):
        self._folder, self._dies = folder, dies
        self.made = 0

    def __call__(self, config, tokenizer):
        return self

    def make(self, specs, store, advance):
        place = store.place.removesuffix("/.partitions")
        lines = [spec.model_dump_json() for spec in specs]

        def work(_):
            own = Path(tempfile.mkdtemp(dir=self._folder))
            return in_a_fork(make_partitions, place, own, lines, self._dies)

        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(work, range(2)))
        assert made == [[spec.key for spec in specs]] * 2
        self.made += len(specs)


def test_processes_that_share_nothing_but_a_store_lose_one_and_make_what_threads_make(
    tmp_path, bucket
):
    raw = write_files(tmp_path / "raw", [text * 80 for text in make_texts(20, 3)])
    write_parquet(tmp_path / "more.parquet", make_texts(300, 1), row_group_size=30)
    config = files_config(
        raw / "*",
        tmp_path / "more.parquet",
        partition_megabytes=1,
        tokenizer={"spec": "train", "vocab_size": 300},
    )
    expected, whole = build(config, tmp_path / "threads")
    output, store = tmp_path / "processes", f"{bucket}/data"
    listing = download(config, output)
    dying = ProcessEngine(tmp_path, dies=True)
    with pytest.raises(BrokenProcessPool):
        build_dataset(listing, config, output, store=store, make_engine=dying)
    kept = StoredPartitions(store, tmp_path / "elsewhere").keys()
    assert kept
    engine = ProcessEngine(tmp_path)
    for _ in range(2):
        manifest = build_dataset(listing, config, output, store=store, make_engine=engine)
        assert engine.made == len(set(manifest.partitions)) - len(kept) > 0
    assert manifest.splits == expected.splits
    folder = output / "datasets" / manifest.folder_name
    with staged_dataset(folder):
        assert shards_of(folder) == shards_of(whole)


def test_ray_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    raw = write_files(tmp_path / "raw", make_texts(3))
    with pytest.raises(ConfigError, match=r"^data\.engine: ray is not installed: pip .*$"):
        build(files_config(raw / "*", engine="ray"), tmp_path)
    build(files_config(raw / "*"), tmp_path)


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"ray_cpus": 8}, "data.ray_cpus: got 8: no node of head:1 has more than 4"),
        ({"device": "cuda", "ray_gpus": 2}, "data.ray_gpus: got 2: no node of head:1 has more th"),
        ({"ray_memory_gigabytes": 9}, "data.ray_memory_gigabytes: got 9: no node of head:1 has mo"),
        ({"ray_cpus": 4, "device": "cuda"}, "data.ray_cpus, data.ray_gpus: no node of head:1 has"),
    ],
)
def test_a_ray_task_that_fits_no_node_is_refused(asked, named):
    nodes = [node(CPU=4.0, memory=8e9), node(CPU=2.0, GPU=1.0, memory=8e9)]
    nodes.append(node(alive=False, CPU=16.0, GPU=8.0, memory=1e12))
    check_room(reserved(DataConfig(ray_cpus=2, device="cuda", engine="ray")), nodes, "head:1")
    with pytest.raises(UserError) as refused:
        check_room(reserved(DataConfig(engine="ray", **asked)), nodes, "head:1")
    assert str(refused.value).startswith(named)


def test_a_gpu_where_no_ray_node_has_one_is_refused():
    needs = reserved(DataConfig(engine="ray", device="cuda"))
    with pytest.raises(DeviceError, match=r"^data\.device: got 'cuda': no node of head:1 has a G"):
        check_room(needs, [node(CPU=4.0)], "head:1")


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
