"""The image and the work pools: what they name is there, and a real server takes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import api

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


def strings(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        yield from (text for part in tree.values() for text in strings(part))
    elif isinstance(tree, list):
        yield from (text for part in tree for text in strings(part))


@pytest.mark.parametrize("kind", TYPES)
def test_a_server_takes_the_template_and_what_it_uses_is_declared(kind: str, server: str) -> None:
    template = json.loads((POOLS / f"{kind}.json").read_text(encoding="utf-8"))
    texts = strings(template["job_configuration"])
    used = {name for text in texts for name in PLACEHOLDER.findall(text)}
    assert used == set(template["variables"]["properties"])
    made = api(server, "work_pools/", name=f"a {kind}", type=kind, base_job_template=template)
    assert made["base_job_template"] == template
