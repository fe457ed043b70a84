"""Chromium with a real `infini serve`."""

import contextlib
import json
import os
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import (
    PATIENCE,
    Environment,
    Running,
    api,
    eventually,
    infini,
    processes_about,
    tiny,
    write_texts,
)
from playwright.sync_api import Browser, Error, Page, Response, expect, sync_playwright
from ports import free_port
from serving import Serving, serve
from ui import Prefect

CHROMIUM = os.environ.get("CHROMIUM", "chromium")
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE_MS = PATIENCE * 1000

Launch = Callable[[], Serving]


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that keeps the screenshots."""
    folder = request.config.getoption("--screenshots")
    if folder is None:
        return tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return Path(folder)


# Not session-scoped: Playwright's event loop would interfere with other tests in this process.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or the binary that CHROMIUM names."""
    program = shutil.which(CHROMIUM)
    if program is None:
        pytest.skip(f"{CHROMIUM} is not installed; make e2e installs it")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=program, args=OPTIONS, timeout=PATIENCE_MS
        )
        yield chromium
        chromium.close()


def _tell(response: Response) -> None:
    """Print API errors, which pytest shows with a failure."""
    if response.status >= 400 and "/api/" in response.url:
        print(response.status, response.request.method, response.url)
        # Its text is lost when the page goes on to another address.
        with contextlib.suppress(Error):
            print(response.text())


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest, screenshots: Path) -> Iterator[Page]:
    """A page of a first-time visitor; a final screenshot is kept."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    opened = context.new_page()
    opened.on("response", _tell)
    yield opened
    opened.screenshot(path=screenshots / f"{request.node.name}-end.png")
    context.close()


@pytest.fixture(scope="module")
def variables() -> Environment:
    """What a module adds to the environment of `infini serve`."""
    return {}


@pytest.fixture(scope="module")
def launch(
    tmp_path_factory: pytest.TempPathFactory,
    session_environment: Environment,
    with_tables: Callable[[Path], Path],
    variables: Environment,
) -> Iterator[Launch]:
    """Starts or restarts `infini serve` for the same output folder."""
    folder = tmp_path_factory.mktemp("browser")
    output = with_tables(folder / "output")
    env = {**session_environment, "PREFECT_HOME": str(folder / "home"), **variables}
    ports = free_port(), free_port()
    started: list[Serving] = []
    commands: list[Running] = []

    def start(*arguments: str | Path) -> Running:
        log = folder / f"serve-{len(commands)}.log"
        commands.append(Running(infini(*arguments), log, env))
        return commands[-1]

    def begin() -> Serving:
        started.append(serve(start, output, ports))
        return started[-1]

    try:
        yield begin
        started[-1].stop()
    finally:
        for command in commands:
            command.end()
        eventually(lambda: not processes_about(folder), "the end of all processes")


@pytest.fixture(scope="module")
def serving(launch: Launch) -> Serving:
    """`infini serve`, with deployments edited to train a tiny model."""
    serving = launch()
    texts = write_texts(serving.output.parent / "texts", 60)
    _edit(serving, small(texts, serving.output))
    return serving


def small(texts: Path, output: Path) -> dict[str, Any]:
    """What the deployments lay over their preset: 60 steps and no retries."""
    return tiny(
        texts,
        output,
        training={"max_steps": 60, "batch_size": 4, "warmup_steps": 2},
        launch={"gpus": "cpu", "hang_timeout_seconds": 4 * PATIENCE},
        logging={"logging_steps": 20, "eval_steps": 50},
        checkpoint={"save_steps": 50},
        tracking={"mlflow": True},
        stages={"train": {"retries": 0}},
    )


def _edit(serving: Serving, advanced: dict[str, Any]) -> None:
    """Save *Advanced* in the two deployments that train."""
    for name in ("pipeline", "train"):
        deployment = api(serving.url, f"deployments/name/{name}/{name}", "GET")["id"]
        request = urllib.request.Request(
            f"{serving.url}/deployments/{deployment}",
            json.dumps({"parameters": {"advanced": advanced}}).encode(),
            {"Content-Type": "application/json"},
            method="PATCH",
        )
        urllib.request.urlopen(request, timeout=PATIENCE).close()


@pytest.fixture
def prefect(page: Page, serving: Serving, screenshots: Path) -> Prefect:
    """Prefect's UI on that page."""
    return Prefect(page, serving.url.removesuffix("/api") + "/v2", screenshots)
