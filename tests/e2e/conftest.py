"""An undisturbed reference run, which disturbed runs must match."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Environment, Running, infini, succeed, tiny, write_settings, write_texts
from shared import once
from trials import SETTINGS, Make, Start

from infini_model.config import merge


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Settings for 120 steps in an output folder; `sections` override them."""
    documents = write_texts(tmp_path_factory.mktemp("documents"), 60)

    def make(output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
        return tiny(documents, output, **merge(SETTINGS, sections))

    return make


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, pipeline: Make, session_environment: Environment
) -> Path:
    """The folder of a run that `infini run` made from scratch, with a temporary server."""

    def make(root: Path) -> None:
        settings = write_settings(root / "settings.yaml", pipeline(root / "output"))
        succeed(infini("run", "--config", settings), session_environment)

    return once(tmp_path_factory, "undisturbed", make) / "output" / "runs" / "run-1"


@pytest.fixture
def start(background: Callable[..., Running], alone: Environment) -> Start:
    def begin(*arguments: str | Path, env: Environment = alone) -> Running:
        return background(infini(*arguments), env)

    return begin
