"""An undisturbed reference run, which disturbed runs must match."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Environment, Running, infini, run, tiny, write_settings, write_texts
from shared import once
from trials import SETTINGS, Make, Start, Undisturbed

from infini_model.config import merge


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 60 text files."""
    return write_texts(tmp_path_factory.mktemp("documents"), 60)


@pytest.fixture(scope="session")
def pipeline(documents: Path) -> Make:
    """Settings for 120 steps in an output folder; `sections` override them."""

    def make(output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        return tiny(documents, output, **merge(SETTINGS, sections))

    return make


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
    pipeline: Make,
    session_environment: Environment,
) -> Undisturbed:
    """`infini run` from scratch, with a temporary server."""

    def make(root: Path) -> None:
        settings = write_settings(root / "settings.yaml", pipeline(root / "output"))
        done = run(infini("run", "--config", settings), session_environment)
        assert done.returncode == 0, done.stdout + done.stderr
        (root / "printed").write_text(done.stdout + done.stderr)

    root = once(tmp_path_factory, "undisturbed", make)
    run_dir = root / "output" / "runs" / "run-1"
    return Undisturbed(
        root / "output", run_dir, root / "settings.yaml", (root / "printed").read_text()
    )


@pytest.fixture
def start(tmp_path: Path, alone: Environment) -> Iterator[Start]:
    """Start `infini` in the background; any leftover process is killed after the test."""
    started: list[Running] = []

    def begin(*arguments: str | Path, env: Environment = alone) -> Running:
        log = tmp_path / f"log-{len(started)}"
        started.append(Running(infini(*arguments), log, env))
        return started[-1]

    yield begin
    for running in started:
        running.end()
