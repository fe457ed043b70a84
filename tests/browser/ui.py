"""Prefect's UI at /v2, driven as a user would."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from commands import PATIENCE, WHOLE, eventually
from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright

# How long to wait for what a click leads to before clicking again.
REDRAWN_MS = 10_000
PATIENCE_MS = PATIENCE * 1000


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--disable-gpu", "--no-sandbox"],
            timeout=PATIENCE_MS,
        )
        yield browser
        browser.close()


def new_page(browser: Browser, width: int, height: int) -> Page:
    """A page of a first-time visitor, in a context of its own."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, locale="en-US", timezone_id="UTC"
    )
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    return context.new_page()


@dataclass(frozen=True)
class Prefect:
    """A browser page, and the address of the UI."""

    page: Page
    url: str

    def open_form(self, deployment: str) -> None:
        """*Deployments*, the one of this name, *Run*, *Custom run*."""
        self.page.goto(f"{self.url}/deployments")
        self.page.get_by_role("link", name=deployment, exact=True).first.click()
        self.page.get_by_role("button", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Custom run").click()
        expect(self.field("Preset")).to_be_visible()
        # The editor of *Advanced* is loaded last.
        expect(self.page.locator("form .cm-content").last).to_be_visible()

    def edit_schedule(self, deployment: str, shown: str, advanced: str = "") -> None:
        """Save a schedule of a deployment, with this in *Advanced*, from its own menu."""
        self.page.goto(f"{self.url}/deployments/deployment/{deployment}")
        expect(self.page.get_by_text(shown)).to_be_visible()
        dialog = self.page.get_by_role("dialog")

        def choose() -> None:
            # The first menu is that of the deployment.
            self.page.get_by_role("button", name="Open menu").nth(1).click(timeout=REDRAWN_MS)
            self.page.get_by_role("menuitem", name="Edit").click(timeout=REDRAWN_MS)

        editor = self.insist(choose, dialog.locator(".cm-content").last)
        if advanced:
            editor.fill(advanced)
        dialog.get_by_role("button", name="Save").click()
        expect(dialog).to_be_hidden()

    def field(self, title: str) -> Locator:
        return self.page.get_by_label(re.compile(rf"^(Select )?{title}( \(Optional\))?$"))

    def press_submit(self) -> None:
        """With the keyboard: the *Advanced* editor grows late and may move the button."""
        self.page.get_by_role("button", name="Submit").press("Enter")

    def submit(self) -> str:
        """*Submit*, and the page of the flow run; returns its id."""
        with self.page.expect_response("**/create_flow_run") as response:
            self.press_submit()
        flow_run = str(response.value.json()["id"])
        self.open_run(flow_run)
        return flow_run

    def open_run(self, flow_run: str) -> None:
        self.page.goto(f"{self.url}/runs/flow-run/{flow_run}")

    def expect_refusal(self, text: str) -> None:
        """*Submit*, until the error that the server answers is seen: it is shown only briefly."""
        self.insist(self.press_submit, self.page.get_by_text(text).first)

    def expect_state(self, name: str) -> None:
        """Wait until the badge below the run's name shows this state."""
        badge = self.page.locator("main").get_by_text(name, exact=True).first
        expect(badge).to_be_visible(timeout=WHOLE * 1000)

    def insist(self, action: Callable[[], object], outcome: Locator) -> Locator:
        """Repeat an action until what it leads to is visible; returns that.

        The page forgets a tab, an order or a menu whenever it is redrawn, as when the run starts.
        """

        def is_visible() -> bool:
            if outcome.is_visible():
                return True
            try:
                action()
                outcome.wait_for(timeout=REDRAWN_MS)
            except Error:
                # A menu that is still open hides everything else.
                self.page.keyboard.press("Escape")
                return False
            return True

        eventually(is_visible, f"{outcome}")
        return outcome

    def open_tab(self, name: str) -> Locator:
        """A tab below the chart, opened by keyboard, as the chart covers the tabs at first."""
        tab = self.page.get_by_role("tab", name=name, exact=True)
        if tab.get_attribute("aria-selected", timeout=REDRAWN_MS) != "true":
            tab.press("Enter", timeout=REDRAWN_MS)
        return self.tab(name)

    def tab(self, name: str) -> Locator:
        """What an open tab shows."""
        return self.page.get_by_role("tabpanel", name=name, exact=True)

    def expect_log(self, text: str) -> None:
        """Wait until the log shows a line, newest first; only visible lines are in the DOM."""

        def sort() -> None:
            order = self.open_tab("Logs").get_by_role("combobox", name="log sort order")
            if "Newest" not in order.inner_text(timeout=REDRAWN_MS):
                order.click(timeout=REDRAWN_MS)
                newest = self.page.get_by_role("option", name="Newest to oldest")
                newest.click(timeout=REDRAWN_MS)

        self.insist(sort, self.tab("Logs").get_by_text(text).first)

    def open_artifact(self, key: str, shown: Locator) -> None:
        """The newest artifact of a key, from the run's *Artifacts*, until this of it is shown."""
        link = self.tab("Artifacts").get_by_role("link", name=re.compile(rf"\b{key}\b")).first

        def follow() -> None:
            if not link.is_visible():
                self.open_tab("Artifacts")
            link.click(timeout=REDRAWN_MS)

        self.insist(follow, shown)

    def press(self, action: str, confirmed_by: str) -> None:
        """An action in the menu of a run, and the button of its confirmation dialog."""
        dialog = self.page.get_by_role("dialog").or_(self.page.get_by_role("alertdialog"))
        item = self.page.get_by_role("menuitem", name=action, exact=True)

        def choose() -> None:
            if not item.is_visible():
                self.page.get_by_role("button", name="Open menu").first.click(timeout=REDRAWN_MS)
            item.click(timeout=REDRAWN_MS)

        self.insist(choose, dialog)
        dialog.get_by_role("button", name=confirmed_by, exact=True).click()
        expect(dialog).to_be_hidden()
