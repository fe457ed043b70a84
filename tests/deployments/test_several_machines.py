"""A training on several machines: each file is valid for its reader, and starts one gang.

There is no cluster here: a file is checked against the schema of whoever reads it, and its command
is run with the environment that JobSet, KubeRay or SkyPilot would give it.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml
from commands import PATIENCE, Environment, Running, infini, run

from flows.cli import app
from flows.cli.options import read
from flows.presets import configure
from infini_model.config import Config
from infini_model.training.memory_estimate import GIB, Machine, Need
from infini_model.training.model_shape import known_shape

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
SCHEMAS = Path(__file__).with_name("schemas")
JOBSET_TEXT = (DEPLOYMENTS / "jobset.yaml").read_text(encoding="utf-8")
JOBSET = yaml.safe_load(JOBSET_TEXT)
SKYPILOT = yaml.safe_load((DEPLOYMENTS / "skypilot.yaml").read_text(encoding="utf-8"))
(NODES,) = JOBSET["spec"]["replicatedJobs"]
JOB = NODES["template"]["spec"]
POD = JOB["template"]["spec"]
(CONTAINER,) = POD["containers"]
RAYJOB = yaml.safe_load((DEPLOYMENTS / "rayjob.yaml").read_text(encoding="utf-8"))
RAY = RAYJOB["spec"]["rayClusterSpec"]
HEAD = RAY["headGroupSpec"]
(WORKERS,) = RAY["workerGroupSpecs"]
((RAY_HEAD,), (RAY_WORKER,)) = (each["template"]["spec"]["containers"] for each in (HEAD, WORKERS))


@functools.cache
def schema(name: str) -> jsonschema.Draft202012Validator:
    tree = yaml.safe_load((SCHEMAS / f"{name}.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(tree)
    return jsonschema.Draft202012Validator(tree)


def check(name: str, document: Mapping[str, Any]) -> None:
    """Raise `ValidationError` for what the schema of this name refuses, or does not know."""
    schema(name).validate(document)
    for each in built_in(name, document):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def built_in(name: str, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a document becomes of the kinds for which Kubernetes has a schema itself."""
    if name == "jobset":
        for each in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"]}
            yield job | each["template"]
    if name == "rayjob":
        cluster = document["spec"]["rayClusterSpec"]
        for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": document["metadata"]}
            yield pod | each["template"]


@pytest.mark.parametrize("name", ["jobset", "rayjob", "skypilot"])
def test_a_file_is_what_its_reader_declares(name: str) -> None:
    check(name, yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text(encoding="utf-8")))


def install(folder: Path, script: str) -> Path:
    """A script `infini` in a virtual environment of `folder`; returns the folder of programs."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (programs / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    (programs / "infini").write_text(f"#!/bin/sh\n{script}\n")
    (programs / "infini").chmod(0o755)
    return programs


def started(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Config:
    """The settings of the `infini train` that `command` starts in `folder`.

    A script that prints its arguments stands for `infini`, in a virtual environment and, for an
    image that has none, on the path.
    """
    programs = install(folder, "printf '%s\\0' \"$@\"")
    path = os.environ["PATH"] if command[0] == "bash" else f"{programs}:{os.environ['PATH']}"
    env = {**environment, "PATH": path}
    printed = subprocess.check_output(command, env=env, cwd=folder, text=True)
    name, *words = printed.rstrip("\0").split("\0")
    assert name == "train"
    group: Any = typer.main.get_command(app)
    return read(group.commands[name].make_context(name, words).params, name).config


def expect_node(config: Config, nodes: int, rank: int, first: str) -> None:
    """One of `nodes` machines, with all its GPUs, of a run whose first machine is `first`."""
    launch = config.launch
    assert (launch.num_nodes, launch.node_rank) == (nodes, rank)
    assert launch.rdzv_endpoint == f"{first}:29500"
    assert (launch.gpus, config.run.name) == ("all", "first")


def mounts(container: Mapping[str, Any]) -> set[str]:
    return {mount["mountPath"] for mount in container["volumeMounts"]}


def pod_environment(index: int) -> dict[str, str]:
    """What the container of pod `index` finds: its own `env`, and what an indexed Job adds."""
    name, first = JOBSET["metadata"]["name"], JOBSET["spec"]["coordinator"]
    host = f"{name}-{first['replicatedJob']}-{first['jobIndex']}-{first['podIndex']}.{name}"
    fields = {"metadata.annotations['jobset.sigs.k8s.io/coordinator']": host}
    own = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in CONTAINER["env"]
    }
    return {"JOB_COMPLETION_INDEX": str(index), **own}


def expanded(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """`words` with each `$(NAME)` replaced, as Kubernetes does in command and arguments."""
    return [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in words]


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_pods_of_a_jobset_form_a_gang(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, edits = re.subn(r"2(?=  # nodes$)", str(nodes), JOBSET_TEXT, flags=re.MULTILINE)
    assert edits == 3
    edited = yaml.safe_load(text)
    check("jobset", edited)
    (replicated,) = edited["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completionMode"]) == (1, "Indexed")
    assert job["parallelism"] == job["completions"] == nodes
    (container,) = job["template"]["spec"]["containers"]
    for index in range(nodes):
        environment = pod_environment(index)
        monkeypatch.setenv("INFINI_OUTPUT_DIR", environment["INFINI_OUTPUT_DIR"])
        command = expanded([*container["command"], *container["args"]], environment)
        config = started(command, environment, tmp_path)
        expect_node(config, nodes, index, "infini-node-0-0.infini")
        assert str(config.run.output_dir) in mounts(container)


def skypilot_environment(rank: int, nodes: int) -> dict[str, str]:
    """What SkyPilot adds to the environment of a node."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{1 + node}" for node in range(nodes)),
    }


@pytest.mark.parametrize("nodes", [1, SKYPILOT["num_nodes"]])
def test_nodes_of_skypilot_form_a_gang(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_OUTPUT_DIR", SKYPILOT["envs"]["INFINI_OUTPUT_DIR"])
    for rank in range(nodes):
        environment = skypilot_environment(rank, nodes)
        config = started(["bash", "-c", SKYPILOT["run"]], environment, tmp_path)
        expect_node(config, nodes, rank, "10.0.0.1")
        assert str(config.run.output_dir) in SKYPILOT["volumes"]


def plain(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_a_rayjob_trains_on_any_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = plain(RAY_HEAD)
    monkeypatch.setenv("INFINI_OUTPUT_DIR", environment["INFINI_OUTPUT_DIR"])
    script = here(RAYJOB["spec"]["entrypoint"], tmp_path)
    config = started(["sh", "-c", script], environment, tmp_path)
    launch: Any = config.launch
    assert (launch.launcher, launch.gpus, config.run.name) == ("ray", "all", "first")
    fewest, most = map(int, launch.nodes.split("-"))
    assert 0 < fewest < most == WORKERS["replicas"]
    for container in (RAY_HEAD, RAY_WORKER):
        assert plain(container) == environment
        assert str(config.run.output_dir) in mounts(container)


def here(script: str, folder: Path) -> str:
    """`script` with its file in `folder` instead of in /tmp."""
    return script.replace("/tmp/", f"{folder}/")


def test_the_cluster_of_a_rayjob_has_the_version_of_the_lock_a_token_and_no_other_port() -> None:
    locked = (DEPLOYMENTS.parent / "requirements.lock").read_text(encoding="utf-8")
    assert f"ray=={RAY['rayVersion']}" in locked.splitlines()
    assert RAY["authOptions"] == {"mode": "token"}
    assert plain(RAY_HEAD)["RAY_USAGE_STATS_ENABLED"] == "0"
    # Other than these the head's service would have all ports, that of Ray's client too.
    ports = {port["name"]: port["containerPort"] for port in RAY_HEAD["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265}


def test_a_head_that_is_deleted_first_lets_the_training_save_a_checkpoint(
    background: Callable[..., Running], tmp_path: Path
) -> None:
    is_saved = tmp_path / "a checkpoint is saved"
    script = f"trap 'echo saving; until [ -e \"{is_saved}\" ]; do sleep 0.1; done; exit 1' TERM"
    programs = install(tmp_path, f"{script}\necho started; while :; do sleep 0.1; done")
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    # With -x it shows when it waits.
    shell, *options = RAY_HEAD["lifecycle"]["preStop"]["exec"]["command"]
    hook = [shell, "-x", *options[:-1], here(options[-1], tmp_path)]
    subprocess.run(hook, check=True, timeout=PATIENCE)  # the training has not begun
    script = here(RAYJOB["spec"]["entrypoint"], tmp_path)
    entrypoint = background(["sh", "-c", script], environment)
    entrypoint.wait_for("started")
    waiting = background(hook, environment)
    entrypoint.wait_for("saving")
    waiting.wait_for("+ sleep")
    assert waiting.process.poll() is None
    is_saved.touch()
    assert entrypoint.wait() == 1
    waiting.wait()


NO_GPU = "error: launch.gpus=all: no GPU on this machine"
NO_DATASET = "/outputs/datasets/latest: there is no finished dataset yet"


@pytest.mark.story
@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (
            expanded([*CONTAINER["command"], *CONTAINER["args"]], pod_environment(1)),
            pod_environment(1),
        ),
        (["bash", "-c", SKYPILOT["run"]], skypilot_environment(0, 2)),
        (["sh", "-c", RAYJOB["spec"]["entrypoint"]], plain(RAY_HEAD)),
    ],
    ids=["jobset", "skypilot", "ray"],
)
def test_the_command_of_a_node_goes_as_far_as_its_gpus(
    command: list[str], environment: dict[str, str], alone: Environment, tmp_path: Path
) -> None:
    programs = install(tmp_path, f'exec {shlex.join(infini())} "$@"')
    # A node reaches its server and its Ray cluster; here the first call of either fails.
    own = {**alone, **environment, "PREFECT_API_URL": "", "PATH": f"{programs}:{alone['PATH']}"}
    own["INFINI_OUTPUT_DIR"] = str(tmp_path / "outputs")
    ended = run([here(word, tmp_path) for word in command], own, cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    *_, last = ended.stderr.splitlines()
    # The head of a Ray cluster needs no GPU: it stops where there is nothing to train on.
    expected = NO_DATASET if "launch.launcher=ray" in command[-1] else NO_GPU
    assert expected in last, ended.stderr


def gibibytes(size: str) -> int:
    return int(size.removesuffix("Gi").removesuffix("+")) * GIB


def test_a_node_has_the_memory_that_production_takes_when_the_other_is_lost() -> None:
    gpus = CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert SKYPILOT["resources"]["accelerators"].endswith(f":{gpus}")
    (shared,) = [each["emptyDir"]["sizeLimit"] for each in POD["volumes"] if "emptyDir" in each]
    machine = Machine("cuda", gpus, gpus, True, 80 * GIB, 0)
    needed = Need.of(known_shape(configure(["production"])), machine).main
    # Ray may put any worker first.
    assert RAY_WORKER["resources"] == CONTAINER["resources"]
    for memory in (
        CONTAINER["resources"]["limits"]["memory"],
        CONTAINER["resources"]["requests"]["memory"],
        SKYPILOT["resources"]["memory"],
    ):
        assert needed < gibibytes(memory) - gibibytes(shared) < 1.2 * needed


@pytest.mark.parametrize(
    "environment",
    [pod_environment(0), plain(RAY_HEAD), plain(RAY_WORKER), SKYPILOT["envs"]],
    ids=["jobset", "ray head", "ray worker", "skypilot"],
)
def test_runs_name_their_server_and_send_heartbeats_in_time(
    environment: Mapping[str, str | None],
) -> None:
    assert "PREFECT_API_URL" in environment
    seconds = int(str(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]))
    automations = yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text(encoding="utf-8"))
    assert 30 <= seconds <= automations[0]["trigger"]["within"] / 3
