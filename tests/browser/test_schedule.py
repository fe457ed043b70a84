"""The nightly schedule, edited in the UI, under the next `infini serve`."""

from commands import Running
from collections.abc import Callable
from playwright.sync_api import expect
from serving import Serving, serve
from ui import Prefect


def test_an_edited_schedule_survives_a_restart_of_serve(
    prefect: Prefect, serving: Serving, restart: Callable[[], None]
) -> None:
    page = prefect.page
    prefect.open_deployment("preprocess")
    expect(page.get_by_text("At 03:00 AM").first).to_be_visible()
    page.locator("main [role=switch] ~ button[aria-haspopup=menu]").click()
