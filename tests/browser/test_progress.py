"""A training from the form to its report, watched while it runs."""

import re

import pytest
from playwright.sync_api import expect
from serving import Serving
from ui import Prefect

pytestmark = pytest.mark.story


def test_one_changed_field_gives_a_training_with_live_progress_and_a_report(
    prefect: Prefect, serving: Serving
) -> None:
    prefect.open_form("pipeline")
    prefect.field("Steps").fill("80")
    flow_run = prefect.submit()

    logs = prefect.newest_logs()
    expect(logs.get_by_text(re.compile(r"Step \[\d+/80\]")).first).to_be_visible()
    prefect.keep("run-live")
    prefect.expect_state("Completed")
    prefect.keep("run-completed")
    assert serving.state(flow_run)["name"] == "Completed"
    prefect.page.reload()
    # After a reload the chart spans the whole run.
    expect(prefect.page.locator("main canvas")).to_be_visible()
    prefect.open_tab("Artifacts").get_by_text("report").first.wait_for()
    prefect.keep("run-artifacts")
    prefect.open_artifact("report")
    expect(prefect.page.get_by_role("heading", name="Scores").first).to_be_visible()
    prefect.keep("report")
    (report,) = serving.output.glob("runs/*-1/report.md")
    assert "trained for 80 steps" in report.read_text()
