"""The image and the work pools: what they name is there, and a real server takes it."""

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
from infini_model.config import LaunchConfig
from infini_model.training.sizing.estimate import GIB
from infini_model.training.sizing.fitting import Machine, Need
from infini_model.training.sizing.shape import known_shape

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deployments" / "Dockerfile"
# Docker takes the list of this name for a Dockerfile that is not in the root.
IGNORED = ROOT / "deployments" / "Dockerfile.dockerignore"
POOLS = ROOT / "deployments" / "work-pools"
TYPES = ("process", "docker", "kubernetes")
PLACEHOLDER = re.compile(r"{{\s*([^\s}]+)\s*}}")


def test_every_source_of_the_image_exists_and_reaches_the_builder() -> None:
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    copies = re.findall(r"^COPY (.+)$", text, re.MULTILINE)
    copied = [source for each in copies for source in each.split()[:-1]]
    lines = IGNORED.read_text(encoding="utf-8").split()
    assert sorted(copied) == sorted(line[1:] for line in lines if line.startswith("!"))
    assert [source for source in copied if not (ROOT / source).exists()] == []


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    # DL3008: Debian removes old versions, so that a pinned one would stop the build.
    # Beside Python itself: the environment need not be activated.
    hadolint = str(Path(sys.executable).with_name("hadolint"))
    command = [hadolint, "--ignore", "DL3008", str(DOCKERFILE)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def load(kind: str) -> dict:
    return json.loads((POOLS / f"{kind}.json").read_text(encoding="utf-8"))


def strings(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from (text for part in tree.values() for text in strings(part))
    elif isinstance(tree, list):
        yield from (text for part in tree for text in strings(part))


@pytest.mark.parametrize("kind", TYPES)
def test_a_server_takes_the_template_and_what_it_uses_is_declared(
    kind: str, connected: Environment
) -> None:
    template = load(kind)
    texts = strings(template["job_configuration"])
    used = {name for text in texts for name in PLACEHOLDER.findall(text)}
    assert used == set(template["variables"]["properties"])
    command = [sys.executable, "-m", "prefect", "--no-prompt", "work-pool", "create", kind]
    options = ["--type", kind, "--base-job-template", str(POOLS / f"{kind}.json")]
    # The server may have one of this name already.
    ended = run([*command, *options, "--overwrite"], connected)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pool = api(connected["PREFECT_API_URL"], f"work_pools/{kind}", "GET")
    assert pool["type"] == kind
    assert pool["base_job_template"] == template


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_outputs_are_mounted_where_the_flows_write(kind: str) -> None:
    template = load(kind)
    outputs = template["variables"]["properties"]["env"]["default"]["INFINI_OUTPUT_DIR"]
    mounted = [text.rpartition(":")[2] for text in strings(template)]
    assert outputs in mounted


def test_a_kubernetes_pod_has_the_memory_that_production_takes_on_eight_gpus() -> None:
    defaults = {
        name: int(variable["default"].removesuffix("Gi")) * GIB
        for name, variable in load("kubernetes")["variables"]["properties"].items()
        if name in ("memory", "shared_memory")
    }
    machine = Machine("cuda", 8, 8, True, 80 * GIB, 0)
    needed = Need.of(known_shape(configure(["production"])), machine).main
    assert needed < defaults["memory"] - defaults["shared_memory"] < 1.2 * needed


def test_the_slurm_script_sets_what_the_configuration_knows() -> None:
    keys = set(re.findall(r"launch\.(\w+)=", (POOLS / "slurm.sh").read_text(encoding="utf-8")))
    assert keys == {"gpus", "num_nodes", "node_rank", "rdzv_endpoint"}
    assert keys <= set(LaunchConfig.model_fields)
