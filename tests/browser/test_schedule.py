"""The nightly schedule, edited in the UI, under the next `infini serve`."""

from collections.abc import Callable

import pytest
from commands import api
from playwright.sync_api import expect
from serving import Serving
from ui import Prefect

pytestmark = pytest.mark.story


def test_an_edited_schedule_survives_a_restart_of_serve(
    prefect: Prefect, serving: Serving, launch: Callable[[], Serving]
) -> None:
    page = prefect.page
    api(serving.url, f"deployments/{serving.deployment('preprocess')}/resume_deployment")
    prefect.open_deployment("preprocess")
    page.get_by_role("switch", name="toggle At 03:00 AM").wait_for()
    # The first menu is that of the deployment.
    page.get_by_role("button", name="Open menu").nth(1).click()
    page.get_by_role("menuitem", name="Edit", exact=True).click()
    dialog = page.get_by_role("dialog", name="Edit Schedule")
    dialog.get_by_role("textbox", name="Value").fill("30 4 * * *")
    prefect.keep("schedule-edit")
    dialog.get_by_role("button", name="Save").click()
    switch = page.get_by_role("switch", name="toggle At 04:30 AM")
    switch.click()
    expect(switch).not_to_be_checked()

    serving.stop()
    launch()
    prefect.open_deployment("preprocess")
    expect(page.get_by_role("switch", name="toggle At 04:30 AM")).not_to_be_checked()
    expect(page.get_by_text("At 03:00 AM")).to_have_count(0)
    prefect.keep("schedule-kept")
