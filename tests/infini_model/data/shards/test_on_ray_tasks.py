"""A task that no node of a Ray cluster can run ends in one line that names the setting."""

import socket
import sys

import pytest
from corpora import build, files_config, make_texts, write_files

from infini_model.config import DataConfig
from infini_model.data.shards.dataset import requested_dataset
from infini_model.data.shards.on_ray import worker
from infini_model.data.shards.on_ray.room import check_room, reserved
from infini_model.data.shards.on_ray.worker import Job, make_partition
from infini_model.data.sources.download import download
from infini_model.runtime.errors import ConfigError, UserError
from infini_model.runtime.on_ray.nodes import attempt, sources_fingerprint


def test_ray_that_is_not_installed(tmp_path, monkeypatch):
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
        (
            {"ray_memory_gigabytes": 9},
            "data.ray_memory_gigabytes: got 9: no node of head:1 has more than 8",
        ),
        (
            {"ray_cpus": 4, "device": "cuda"},
            "data.ray_cpus, data.ray_gpus: no node of head:1 has them all",
        ),
    ],
)
def test_a_task_that_fits_no_node(asked, named):
    nodes = [node(CPU=4.0, memory=8e9), node(CPU=2.0, GPU=1.0, memory=8e9)]
    nodes.append(node(alive=False, CPU=16.0, GPU=8.0, memory=1e12))
    check_room(reserved(DataConfig(ray_cpus=2, device="cuda", engine="ray")), nodes, "head:1")
    with pytest.raises(UserError) as refused:
        check_room(reserved(DataConfig(engine="ray", **asked)), nodes, "head:1")
    assert str(refused.value).startswith(named)


def test_a_gpu_where_no_node_has_one():
    config = DataConfig(engine="ray", device="cuda")
    with pytest.raises(UserError, match=r"^data\.device: got 'cuda': no node of head:1 has a GPU$"):
        check_room(reserved(config), [node(CPU=4.0)], "head:1")


def test_a_node_that_does_not_see_the_folder(tmp_path, monkeypatch):
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
    assert not list((tmp_path / "datasets").glob(".partitions/*"))
    (tmp_path / "datasets").mkdir(exist_ok=True)
    (tmp_path / "datasets" / "mark").touch()
    assert attempt(make_partition, job.model_dump_json(), spec.model_dump_json()) is None
    assert (tmp_path / "datasets" / ".partitions" / spec.key / "partition.json").exists()
