"""What a newcomer types: `make run` as it is, twice, the commands of the README, another preset."""

import ipaddress
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Environment, infini, succeed

pytestmark = pytest.mark.story
ROOT = Path(__file__).resolve().parents[2]
# Python reads it at its start, in every process of a command: it notes where they connect to.
_SITE = """
import sys
def note(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        where = arguments[1] if event == "socket.connect" else arguments[0]
        host = where[0] if isinstance(where, tuple) else where
        with open({log!r}, "a") as file:
            file.write(f"{{host}}\\n")
sys.addaudithook(note)
"""


@dataclass(frozen=True)
class Newcomer:
    """An output folder, the environment of commands on it, and where they note their hosts."""

    output: Path
    env: Environment
    hosts: Path

    def make_run(self) -> str:
        done = succeed(["make", "run"], self.env, cwd=ROOT)
        return done.stdout + done.stderr

    def look_at_report(self, name: str, printed: str) -> None:
        """Check that the report of a run was named, and has its pictures."""
        run_dir = self.output / "runs" / name
        assert f"Report: {run_dir}/report.md" in printed
        report = (run_dir / "report.md").read_text(encoding="utf-8")
        assert "trained for 500 steps" in report
        pictures = report.count("](plots/")
        assert pictures > 0
        assert (run_dir / "report.html").read_text(encoding="utf-8").count("<img ") == pictures


@pytest.fixture(scope="module")
def newcomer(
    tmp_path_factory: pytest.TempPathFactory, session_environment: Environment
) -> Newcomer:
    """Someone whose only setting is another output folder."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "site").mkdir()
    site = _SITE.format(log=str(folder / "hosts"))
    (folder / "site" / "sitecustomize.py").write_text(site)
    variables = {"INFINI_OUTPUT_DIR": str(folder / "outputs"), "PYTHONPATH": str(folder / "site")}
    return Newcomer(folder / "outputs", session_environment | variables, folder / "hosts")


def is_of_this_machine(host: str) -> bool:
    if host in ("localhost", "None", "") or host.startswith("/"):  # a Unix socket
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == os.uname().nodename  # gloo's own


def test_make_run_makes_a_dataset_and_a_report(newcomer: Newcomer) -> None:
    printed = newcomer.make_run()
    assert "1 partition new, 0 reused" in printed
    newcomer.look_at_report("quickstart-1", printed)


def test_run_again_it_reuses_the_dataset(newcomer: Newcomer) -> None:
    printed = newcomer.make_run()
    assert "partition new" not in printed
    newcomer.look_at_report("quickstart-2", printed)
    assert len([*(newcomer.output / "datasets").glob("stdlib-*")]) == 1


def test_nothing_is_reported_home(newcomer: Newcomer) -> None:
    hosts = set(newcomer.hosts.read_text().splitlines())
    assert "127.0.0.1" in hosts
    assert {host for host in hosts if not is_of_this_machine(host)} == set()


def readme_commands(tmp_path: Path) -> list[str]:
    """The block of the README that lists the commands, each for the runs of `make run`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [each for each in text.split("```") if "\ninfini doctor" in each]
    lines = [line.partition("#")[0].strip() for line in block.splitlines()[1:]]
    block = "\n".join(line for line in lines if line)
    replaced = {"first second": "quickstart-1 quickstart-2", "FOLDER": str(tmp_path / "exported")}
    for word, here in {**replaced, "--max-steps 1000": "--max-steps 2"}.items():
        assert word in block
        block = block.replace(word, here)
    return block.splitlines()[1:]  # the first is `make run`


def test_the_commands_of_the_readme_run(newcomer: Newcomer, tmp_path: Path) -> None:
    commands = readme_commands(tmp_path)
    assert len(commands) == 13
    for command in commands:
        succeed(infini(*shlex.split(command)[1:]), newcomer.env, cwd=tmp_path)
    assert (tmp_path / "exported" / "config.json").is_file()


def test_the_preset_of_masked_diffusion_ends_with_its_report(newcomer: Newcomer) -> None:
    short = ("training.max_steps=4", "logging.eval_steps=2", "evaluation.max_windows=8")
    succeed(infini("run", "--preset", "diffusion-quickstart", *short), newcomer.env)
    report = newcomer.output / "runs" / "diffusion-quickstart-1" / "report.md"
    assert "perplexity" in report.read_text(encoding="utf-8")


def test_doctor_creates_nothing(alone: Environment, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    succeed(infini("doctor"), alone, cwd=tmp_path / "here")
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]
