"""Starting a training from the form of its deployment."""

import pytest
from commands import eventually
from playwright.sync_api import expect
from serving import Serving
from ui import Prefect

pytestmark = pytest.mark.story


def test_the_form_shows_the_common_settings(prefect: Prefect) -> None:
    prefect.open_form("pipeline")
    inputs = "input, textarea, [role=combobox], [role=textbox]"
    visible = prefect.page.locator("form").locator(inputs).filter(visible=True)
    # Twelve settings, Advanced, the run's own name and the switch of the schema.
    eventually(lambda: 10 <= visible.count() <= 15, lambda: f"not {visible.count()} inputs")
    prefect.keep("form")


def test_an_invalid_value_is_rejected_at_its_field(prefect: Prefect) -> None:
    prefect.open_form("train")
    steps = prefect.field("Steps")
    steps.fill("-3")
    prefect.press_submit()
    # Rejected by the browser, from the schema.
    assert "1" in steps.evaluate("input => input.validationMessage")
    prefect.keep("refused-by-the-browser")
    steps.fill("20")
    # Rejected by the server: HTML forms have no open intervals.
    prefect.field("Learning rate").fill("0")
    prefect.expect_refusal("'learning_rate'")
    prefect.expect_refusal("0 is less than or equal to the minimum")
    prefect.keep("refused-by-the-server")


def test_incompatible_values_fail_the_run_in_one_line(prefect: Prefect, serving: Serving) -> None:
    prefect.open_form("train")
    prefect.field("Context length").fill("100")
    flow_run = prefect.submit()
    prefect.expect_state("Failed")
    prefect.keep("failed-at-once")
    message = serving.state(flow_run)["message"]
    assert "context_length" in message
    assert "\n" not in message
    # Shown on the page of the run, not only in its state.
    prefect.expect_log("context_length")


def test_a_preset_without_the_weights_that_it_needs_says_what_to_give(
    prefect: Prefect, serving: Serving
) -> None:
    prefect.open_form("pipeline")
    prefect.field("Preset").click()
    prefect.page.get_by_role("option", name="uptrain", exact=True).click()
    expect(prefect.field("Initial weights")).to_be_visible()
    prefect.keep("preset-that-needs-weights")
    flow_run = prefect.submit()
    prefect.expect_state("Failed")
    needs = "model.initial_weights: missing; the preset uptrain needs a pretrained Llama"
    assert needs in serving.state(flow_run)["message"]


def test_a_quick_run_shows_its_parameters(prefect: Prefect) -> None:
    prefect.open_deployment("evaluate")
    prefect.quick_run()
    shown = prefect.tab("Parameters").locator(".cm-content")
    prefect.expect_in_tab("Parameters", shown.filter(has_text='"preset": "quickstart"'))
