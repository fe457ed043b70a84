"""The package, built and installed as `pip install .` does, and used outside the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Environment, succeed
from serving import launcher

pytestmark = pytest.mark.story
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """`infini` of an environment that has the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    others = shutil.ignore_patterns(".*", "outputs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=others)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    place = folder / "venv"
    venv.create(place, symlinks=True)
    paths = {"base": str(place), "platbase": str(place)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # A line that is a path adds the folder, and not what its own .pth files add: this checkout.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [place / "bin" / "python", "-m", "pip", "install", "--no-deps"]
    subprocess.run([*install, wheel], check=True)
    assert (packages / "flows").is_dir()
    return lambda *arguments: [str(place / "bin" / "infini"), *map(str, arguments)]


def test_a_run(installed: Callable[..., list[str]], alone: Environment, tmp_path: Path) -> None:
    done = succeed(installed("run", "--preset", "debug"), alone, cwd=tmp_path)
    assert str(ROOT) not in done.stdout + done.stderr
    assert (tmp_path / "outputs" / "runs" / "debug-1" / "report.md").exists()


def test_the_servers_and_the_deployments(
    installed: Callable[..., list[str]], alone: Environment, tmp_path: Path
) -> None:
    with launcher(tmp_path, alone, installed) as launch:
        serving = launch()
        succeed(installed("deploy", "--output-dir", serving.output), alone, cwd=tmp_path)
        assert serving.deployment("pipeline")["pull_steps"] != []
        serving.stop()
