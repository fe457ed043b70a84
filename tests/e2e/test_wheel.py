"""The two distributions, built, installed and used outside the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Environment, succeed, write_texts
from serving import launcher
from uv import find_uv_bin

pytestmark = pytest.mark.story
ROOT = Path(__file__).resolve().parents[2]
UV = find_uv_bin()
# Nothing of it comes with the library, nor with what the library needs.
OF_THE_WHOLE = ("deployments", "flows", "mlflow", "prefect", "ray", "sqlalchemy", "tasks")
# In its own words, the folder that the example of the page trained opens in transformers.
OPENED = """
import importlib.util
import infini_model, infini_model.hf, torch
from infini_model import Model
from transformers import AutoModelForCausalLM

assert [name for name in {whole} if importlib.util.find_spec(name)] == []
assert not infini_model.__file__.startswith({root!r})
model = Model.load("outputs/runs/by-hand")
assert len(model.generate("river", max_new_tokens=8, temperature=0, seed=0)) > 0
ids = torch.arange(97, 97 + 24)[None]
theirs = AutoModelForCausalLM.from_pretrained("outputs/runs/by-hand/model")
with torch.inference_mode():
    torch.testing.assert_close(theirs(ids).logits, model.llama(ids).logits, atol=1e-5, rtol=1e-5)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without what it has built, so that the tests leave nothing in it."""
    folder = tmp_path_factory.mktemp("source") / "infini-llama"
    others = shutil.ignore_patterns(".*", "outputs", "build", "*.egg-info", "__pycache__")
    return shutil.copytree(ROOT, folder, symlinks=True, ignore=others)


@pytest.fixture(scope="module")
def uv(session_environment: Environment) -> Environment:
    """The environment of uv: the locked versions, from where pip has them too."""
    links = os.environ.get("PIP_FIND_LINKS")
    found = {} if links is None else {"UV_FIND_LINKS": links}
    lock = str(ROOT / "requirements.lock")
    return {**session_environment, **found, "UV_CONSTRAINT": lock, "UV_PYTHON": sys.executable}


@pytest.fixture(scope="module")
def wheels(
    source: Path, uv: Environment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Both wheels, by the name of the distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    succeed([UV, "build", "--all-packages", "--wheel", "--out-dir", folder], uv, cwd=source)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    """`infini` of an environment that has the wheels, and sees the packages of this one."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, symlinks=True)
    paths = {"base": str(place), "platbase": str(place)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # A line that is a path adds the folder, and not what its own .pth files add: this checkout.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [UV, "pip", "install", "--no-deps", "--python", place / "bin" / "python"]
    subprocess.run([*install, *wheels.values()], check=True)
    assert (packages / "flows").is_dir()
    assert (packages / "infini_model").is_dir()
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


def test_the_library_alone_trains_generates_and_opens_in_transformers(
    wheels: dict[str, Path], uv: Environment, tmp_path: Path
) -> None:
    write_texts(tmp_path / "texts", 120)
    python = tmp_path / "venv" / "bin" / "python"
    succeed([UV, "venv", tmp_path / "venv"], uv)
    library = f"infini-model[hf] @ {wheels['infini_model'].as_uri()}"
    succeed([UV, "pip", "install", "--python", python, library], uv)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (training,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "train(" in block
    )
    opened = OPENED.format(whole=OF_THE_WHOLE, root=str(ROOT))
    (tmp_path / "by_hand.py").write_text(training + opened)
    done = succeed([python, "by_hand.py"], uv, cwd=tmp_path)
    assert "missing metrics" not in done.stdout + done.stderr  # of MLflow, which is not there


def test_uvx_runs_a_checkout(
    source: Path, uv: Environment, alone: Environment, tmp_path: Path
) -> None:
    command = [UV, "tool", "run", "--from", source, "infini", "run", "--preset", "debug"]
    succeed(command, {**uv, **alone}, cwd=tmp_path)
    assert (tmp_path / "outputs" / "runs" / "debug-1" / "report.md").exists()
