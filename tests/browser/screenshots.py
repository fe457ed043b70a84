"""Draws the pictures of `docs/images` that show a run: `make pictures`.

A quickstart under a real `infini serve` is started from the form, killed half-way, and retried, in
Chromium. Its pages are photographed, and the plots of its report are copied.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

from commands import WHOLE, Environment
from playwright.sync_api import Page, expect
from serving import TRAINER, Serving, launcher
from ui import Prefect, chromium, new_page

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PLOTS = {"loss.png": "report-loss.png", "loss_by_position.png": "report-loss-by-position.png"}
STEPS, KILLED_AT = 500, 300
NAME = "A first training"
CURVES = "train/(loss|grad|learn)|memory/probe_(gain$|loss)"
# What is drawn in steps, such as a chart that moves to its place.
SETTLED_MS = 3000
# Otherwise the training would be retried by itself, in the same bar of the chart.
BY_HAND = '{"stages": {"retries": 0}}'


def newcomer(home: Path) -> Environment:
    """The environment of a user who has configured no server and no GPU."""
    own = ("PREFECT_", "INFINI_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**inherited, "CUDA_VISIBLE_DEVICES": "", "PREFECT_HOME": str(home)}


def photograph(page: Page, name: str) -> None:
    """Write what the page shows, in 256 colours."""
    from PIL import Image

    path = IMAGES / name
    page.mouse.move(0, 0)
    # No ring about what was filled in or pressed last.
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=path, animations="disabled", caret="hide")
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(
            method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    small.save(path, optimize=True)


def train(prefect: Prefect, serving: Serving) -> str:
    """Fill in the form, kill the training, retry it; returns the flow run, which is complete."""
    prefect.open_form("pipeline")
    prefect.page.get_by_label("Run Name").fill(NAME)
    prefect.field("Steps").fill(str(STEPS))
    photograph(prefect.page, "prefect-form.png")
    prefect.page.locator("form .cm-content").last.fill(BY_HAND)
    flow_run = prefect.submit()
    # The page of a run draws without end, which would take a core from the training.
    prefect.page.goto("about:blank")
    serving.wait_for_log(flow_run, f"Step [{KILLED_AT}/{STEPS}]", WHOLE)
    serving.kill(TRAINER)
    serving.wait_for_state(flow_run, "Failed")
    prefect.open_run(flow_run)
    prefect.press("Retry", confirmed_by="Retry")
    prefect.page.goto("about:blank")
    serving.wait_for_state(flow_run, "Completed")
    return flow_run


def photograph_run(prefect: Prefect, flow_run: str) -> None:
    prefect.open_run(flow_run)
    prefect.expect_state("Completed")
    expect(prefect.page.locator("main canvas")).to_be_visible()
    prefect.insist(
        lambda: prefect.open_tab("Task Runs"),
        prefect.tab("Task Runs").get_by_text(re.compile("^train .* attempt 2$")).first,
    )
    prefect.page.wait_for_timeout(SETTLED_MS)
    photograph(prefect.page, "prefect-run.png")


def photograph_curves(page: Page, address: str, run: str) -> None:
    """The curves of the training and of its memory, on MLflow's page of the run."""
    page.goto(address)
    # A dialog that welcomes first-time visitors.
    page.get_by_role("button", name="Close").or_(page.get_by_label("Close")).last.click()
    page.get_by_role("link", name=run, exact=True).first.click()
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_role("searchbox", name="Search metric charts").fill(CURVES)
    expect(page.locator(".js-plotly-plot:visible")).to_have_count(6)
    page.wait_for_timeout(SETTLED_MS)
    photograph(page, "mlflow-curves.png")


def main() -> None:
    # Ignored, as a shell does in the background, it would not stop `infini serve` either.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with launcher(home, newcomer(home / "home")) as launch, chromium() as browser:
            serving = launch()
            page = new_page(browser, 1280, 1020)
            prefect = Prefect(page, serving.url.removesuffix("/api") + "/v2")
            flow_run = train(prefect, serving)
            page.set_viewport_size({"width": 1280, "height": 990})
            photograph_run(prefect, flow_run)
            (address,) = re.findall(r"^MLflow +(http\S+)$", serving.running.output, re.MULTILINE)
            page.set_viewport_size({"width": 1280, "height": 1064})
            (run_dir,) = (serving.output / "runs").glob("quickstart-*")
            photograph_curves(page, address, run_dir.name)
            for plot, name in PLOTS.items():
                shutil.copyfile(run_dir / "plots" / plot, IMAGES / name)
            serving.stop()


if __name__ == "__main__":
    main()
