"""The image: what is copied exists and is not ignored, and what it needs to run is installed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deployments" / "Dockerfile"
# Docker takes the list of this name for a Dockerfile that is not in the root.
IGNORED = ROOT / "deployments" / "Dockerfile.dockerignore"


def instructions(name: str) -> list[str]:
    """The arguments of each instruction `name`, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    return re.findall(rf"^{name} (.+)$", text, re.MULTILINE)


def copied() -> list[str]:
    return [source for each in instructions("COPY") for source in each.split()[:-1]]


def test_every_source_exists_and_reaches_the_builder() -> None:
    lines = IGNORED.read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    assert sorted(copied()) == sorted(line[1:] for line in lines if line.startswith("!"))
    for source in copied():
        assert (ROOT / source).exists(), source


def test_the_packages_of_the_project_and_its_requirements_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {name.removesuffix("*") for name in packages}
    needed |= set(project["tool"]["setuptools"]["dynamic"]["dependencies"]["file"])
    assert needed | {project["project"]["readme"], "prefect.yaml"} <= set(copied())


def test_triton_finds_a_compiler_and_the_driver_its_libraries() -> None:
    assert any("gcc libc6-dev" in each for each in instructions("RUN"))
    assert instructions("ENV") == ["NVIDIA_DRIVER_CAPABILITIES=compute,utility"]


def test_ray_has_the_dashboard_to_which_kuberay_gives_the_job_and_the_version_of_the_lock() -> None:
    (install,) = [each for each in instructions("RUN") if "ray[default]" in each]
    assert "--requirement requirements.lock" in install
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(r"^ray==", lock, re.MULTILINE)


def test_the_linter_finds_nothing() -> None:
    # DL3008: Debian removes old versions, so that a pinned one would stop the build.
    # Beside Python itself: the environment need not be activated.
    hadolint = str(Path(sys.executable).with_name("hadolint"))
    command = [hadolint, "--ignore", "DL3008", str(DOCKERFILE)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
