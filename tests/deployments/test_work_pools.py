"""The work-pool templates: what they use is declared, and a real server takes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Environment, api, run

from flows.presets import configure
from flows.serving.deploy import HEARTBEAT_TIMEOUT
from infini_model.config import Config, LaunchConfig
from infini_model.training.sizing.estimate import GIB
from infini_model.training.sizing.fitting import Machine, Need
from infini_model.training.sizing.shape import known_shape

FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "work-pools"
TYPES = ("process", "docker", "kubernetes")
PLACEHOLDER = re.compile(r"{{\s*([^\s}]+)\s*}}")


def load(kind: str) -> dict:
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


def strings(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from (text for part in tree.values() for text in strings(part))
    elif isinstance(tree, list):
        yield from (text for part in tree for text in strings(part))


@pytest.mark.parametrize("kind", TYPES)
def test_what_a_template_uses_is_what_it_declares(kind: str) -> None:
    template = load(kind)
    used = {
        name
        for text in strings(template["job_configuration"])
        for name in PLACEHOLDER.findall(text)
    }
    assert used == set(template["variables"]["properties"])


@pytest.mark.parametrize("kind", TYPES)
def test_every_variable_is_described_and_its_default_is_of_its_type(kind: str) -> None:
    of_type = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
    for name, variable in load(kind)["variables"]["properties"].items():
        assert variable["title"], name
        assert variable["description"], name
        if "default" in variable:
            assert type(variable["default"]) is of_type[variable["type"]], name
            assert variable["default"] in variable.get("enum", [variable["default"]]), name


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_outputs_are_mounted_where_the_flows_write(kind: str) -> None:
    template = load(kind)
    outputs = template["variables"]["properties"]["env"]["default"]["INFINI_OUTPUT_DIR"]
    mounted = [text.rpartition(":")[2] for text in strings(template)]
    assert outputs in mounted


@pytest.mark.parametrize("kind", TYPES)
def test_runs_elsewhere_send_heartbeats_well_before_they_are_missed(kind: str) -> None:
    env = load(kind)["variables"]["properties"]["env"]["default"]
    seconds = int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    # 30 s is the least that Prefect takes.
    assert 30 <= seconds <= HEARTBEAT_TIMEOUT.total_seconds() / 3


def test_kubernetes_asks_for_gpus_and_shared_memory() -> None:
    pod = load("kubernetes")["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "{{ gpus }}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert set(mounts.values()) == set(volumes)


def test_a_kubernetes_pod_has_the_memory_that_production_takes_on_eight_gpus() -> None:
    defaults = {
        name: int(variable["default"].removesuffix("Gi")) * GIB
        for name, variable in load("kubernetes")["variables"]["properties"].items()
        if name in ("memory", "shared_memory")
    }
    machine = Machine("cuda", 8, 8, True, 80 * GIB, 0)
    needed = Need.of(known_shape(configure(["production"])), machine).main
    assert needed < defaults["memory"] - defaults["shared_memory"] < 1.2 * needed


def test_the_slurm_script_is_one_and_sets_what_the_configuration_knows() -> None:
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    keys = set(re.findall(r"launch\.(\w+)=", script.read_text(encoding="utf-8")))
    assert keys == {"gpus", "num_nodes", "node_rank", "rdzv_endpoint"}
    assert keys <= set(LaunchConfig.model_fields)
    assert "launch" in Config.model_fields


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_a_server_takes_the_template(kind: str, connected: Environment) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "work-pool", "create", kind]
    options = ["--type", kind, "--base-job-template", str(FOLDER / f"{kind}.json")]
    # The server may have one of this name already.
    ended = run([*command, *options, "--overwrite"], connected)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pool = api(connected["PREFECT_API_URL"], f"work_pools/{kind}", "GET")
    assert pool["type"] == kind
    assert pool["base_job_template"] == load(kind)
