"""MLflow's pages of a training that was started in Prefect."""

import re
import secrets
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from serving import Serving

pytestmark = pytest.mark.story


def test_the_page_shows_the_experiment_the_curves_and_the_model(
    page: Page, serving: Serving, screenshots: Path
) -> None:
    name = f"curves-{secrets.token_hex(4)}"
    flow_run = serving.create("pipeline", name=name)
    serving.wait_for_state(flow_run, "Completed")
    (address,) = re.findall(r"^MLflow +(http\S+)$", serving.running.output, re.MULTILINE)
    page.goto(address)
    # Hide the welcome dialog, which would cover the screenshots.
    page.get_by_role("button", name="Close").or_(page.get_by_label("Close")).last.click()
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.get_by_role("status").get_by_text("Finished")).to_be_visible()
    expect(page.get_by_role("link", name=flow_run)).to_be_visible()
    model = page.get_by_role("grid").get_by_role("link", name="model", exact=True)
    expect(model).to_be_visible()

    page.get_by_role("tab", name="Model metrics").click()
    # Of train/loss and validation/loss; each is a heading in the section of its split.
    page.get_by_role("searchbox", name="Search metric charts").fill("n/loss")
    for metric in ("train/loss", "validation/loss"):
        expect(page.get_by_text(f"{name} ({metric})").first).to_be_visible()
    expect(page.locator(".js-line").first).to_be_visible()
    page.screenshot(path=screenshots / "mlflow-curves.png")

    page.get_by_role("tab", name="Overview").click()
    model.click()
    expect(page.get_by_text("Ready", exact=True).first).to_be_visible()
    page.screenshot(path=screenshots / "mlflow-model.png")
