"""Prefect's UI at /v2, driven as a user would."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

REDRAWN_MS = 1000


@dataclass(frozen=True)
class Prefect:
    """A browser page, and the address of the UI."""

    page: Page
    url: str
    screenshots: Path

    def keep(self, name: str) -> None:
        """Keep a screenshot."""
        self.page.screenshot(path=self.screenshots / f"{name}.png")

    def open_deployment(self, name: str) -> None:
        """*Deployments*, then the one of this name."""
        self.page.goto(f"{self.url}/deployments")
        self.page.get_by_role("link", name=name, exact=True).first.click()
        expect(self.page.get_by_role("button", name="Run", exact=True)).to_be_visible()

    def open_form(self, deployment: str) -> None:
        """*Run*, *Custom run* of a deployment."""
        self.open_deployment(deployment)
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        expect(self.field("Preset")).to_be_visible()
        # The editor of *Advanced* is loaded last.
        expect(self.page.locator("form .cm-content").last).to_be_visible()

    def field(self, title: str) -> Locator:
        """The input under a title of the form."""
        return self.page.get_by_label(re.compile(rf"^(Select )?{title}( \(Optional\))?$"))

    def press_submit(self) -> None:
        """With the keyboard: the *Advanced* editor grows late and may move the button."""
        self.page.get_by_role("button", name="Submit").press("Enter")

    def submit(self) -> str:
        """*Submit*, *View run*; returns the id of the flow run."""
        self.press_submit()
        return self.view_run()

    def view_run(self) -> str:
        """*View run*, which is shown only briefly; returns the id of the flow run."""
        self.page.get_by_role("link", name="View run").or_(
            self.page.get_by_role("button", name="View run")
        ).first.click()
        self.page.wait_for_url("**/runs/flow-run/*")
        return re.findall(r"flow-run/([0-9a-f-]{36})", self.page.url)[0]

    def refused(self) -> Locator:
        """The error on the page after a *Submit* that the server rejects."""
        self.press_submit()
        return self.page.locator("[data-sonner-toast]")

    def expect_state(self, name: str) -> None:
        """Wait until the badge below the run's name shows this state."""
        expect(self.page.locator("main").get_by_text(name, exact=True).first).to_be_visible()

    def open_tab(self, name: str) -> Locator:
        """Open a tab below the chart, with the keyboard, as the chart covers the tabs at first."""
        tab = self.page.get_by_role("tab", name=name, exact=True)
        tab.press("Enter")
        # The page returns to the logs whenever it is redrawn, as when the run starts.
        self.page.wait_for_timeout(REDRAWN_MS)
        if tab.get_attribute("aria-selected") != "true":
            tab.press("Enter")
        return self.page.locator("[role=tabpanel][data-state=active]")

    def newest_logs(self) -> Locator:
        """The log, newest line first; only visible lines are in the DOM."""
        logs = self.open_tab("Logs")
        order = logs.get_by_role("combobox", name="log sort order")
        if "Newest" not in order.inner_text():
            order.click()
            self.page.get_by_role("option", name="Newest to oldest").click()
        return logs

    def open_artifact(self, key: str) -> None:
        """The newest artifact of a key, from the run's *Artifacts*."""
        self.open_tab("Artifacts").get_by_role("link", name=re.compile(rf"\b{key}\b")).first.click()
        self.page.get_by_role("link", name=re.compile("^[0-9a-f]{8}$")).first.click()

    def press(self, action: str, confirmed_by: str) -> None:
        """An action in the menu of a run, and the button of its confirmation dialog."""
        self.page.get_by_role("button", name="Open menu").first.click()
        self.page.get_by_role("menuitem", name=action, exact=True).click()
        dialog = self.page.get_by_role("dialog").or_(self.page.get_by_role("alertdialog"))
        dialog.get_by_role("button", name=confirmed_by, exact=True).click()
        expect(dialog).to_be_hidden()
