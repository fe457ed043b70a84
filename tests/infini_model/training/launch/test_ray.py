"""Which nodes of a Ray cluster a training takes, and what it reserves on each."""

import socket

import pytest

from infini_model.config import LaunchConfig
from infini_model.runtime.ray import marked, on_node, sources_fingerprint
from infini_model.training.launch.ray import Node, needs_of, probe_node


def launch(**settings):
    return LaunchConfig(launcher="ray", **settings)


@pytest.mark.parametrize(
    ("settings", "nodes", "needs"),
    [
        ({}, [{"CPU": 8.0}], {"CPU": 1.0}),
        ({"processes": 4}, [{"CPU": 8.0}], {"CPU": 4.0}),
        ({"gpus": "cpu"}, [{"CPU": 8.0, "GPU": 4.0}], {"CPU": 1.0}),
        ({}, [{"CPU": 8.0, "GPU": 4.0}], {"CPU": 1.0, "GPU": 4.0}),
        ({"gpus": "all"}, [{"CPU": 8.0}], {"CPU": 1.0, "GPU": 1.0}),
        ({"nodes": "2-4"}, [{"GPU": 8.0}, {"GPU": 4.0}, {"GPU": 2.0}], {"CPU": 1.0, "GPU": 4.0}),
        ({"nodes": "1-4"}, [{"GPU": 8.0}, {"GPU": 4.0}, {"GPU": 2.0}], {"CPU": 1.0, "GPU": 8.0}),
        ({"nodes": 2, "processes": 2}, [{"GPU": 8.0}, {"CPU": 4.0}], {"CPU": 1.0, "GPU": 2.0}),
    ],
)
def test_what_a_launcher_reserves(settings, nodes, needs):
    assert needs_of(launch(**settings), nodes) == needs


def test_a_node_is_taken_if_it_has_the_same_code_and_sees_the_run(tmp_path):
    probe = on_node(probe_node.__module__, probe_node.__name__)
    with marked(tmp_path) as mark:
        node = probe_node(sources_fingerprint(), str(mark))
        assert isinstance(node, Node)
        assert node.host == socket.gethostname()
        with socket.create_server(("", node.port)):
            pass
        kind, message = probe("other", str(mark))
        assert kind == "user"
        assert "is not the infini_model that started the job" in message
    kind, message = probe(sources_fingerprint(), str(mark))
    assert kind == "user"
    assert message.startswith(f"{tmp_path}: is not the folder of this name on the machine that")
    assert "run.output_dir" in message
