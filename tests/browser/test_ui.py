"""Trainings in Prefect's and MLflow's pages: Chromium with a real `infini serve`.

What the buttons mean is tested in `tests/tasks` and `tests/e2e/test_serve.py`.
"""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import PATIENCE, Environment, api, eventually, tiny, write_texts
from playwright.sync_api import Browser, Page, expect
from serving import ENGINE, TRAINER, Serving, launcher
from stopping import Halt
from ui import Prefect, chromium, new_page

from flows.serving.reconcile import WORKER_MESSAGE
from infini_model.runtime.runs import newest_checkpoint
from infini_model.training.run_status import saved_step

pytestmark = pytest.mark.story


# Not session-scoped: Playwright's event loop would interfere with other tests in this process.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A page of a first-time visitor; a final screenshot is kept."""
    opened = new_page(browser, 1280, 900)
    yield opened
    opened.screenshot(path=tmp_path / "end.png")
    opened.context.close()


@pytest.fixture(scope="module")
def halt(tmp_path_factory: pytest.TempPathFactory) -> Halt:
    """Keeps a training at these steps while it is looked at."""
    return Halt(tmp_path_factory.mktemp("halt") / "site", 40, 60)


@pytest.fixture(scope="module")
def serving(
    tmp_path_factory: pytest.TempPathFactory,
    session_environment: Environment,
    with_tables: Callable[[Path], Path],
    halt: Halt,
) -> Iterator[Serving]:
    """`infini serve`, with a deployment that was edited to train a tiny model without retries."""
    folder = tmp_path_factory.mktemp("browser")
    with_tables(folder / "output")
    tree = tiny(
        write_texts(folder / "texts", 60),
        folder / "output",
        training={"batch_size": 4, "warmup_steps": 2},
        launch={"gpus": "cpu", "hang_timeout_seconds": 4 * PATIENCE},
        logging={"logging_steps": 20, "eval_steps": 50},
        checkpoint={"save_steps": 10},
        tracking={"mlflow": True},
        stages={"retries": 0},
    )
    homes = {"PREFECT_HOME": str(folder / "home")}
    with launcher(folder, session_environment | homes | halt.environment) as launch:
        serving = launch()
        del tree["training"]["max_steps"]
        edited = f"deployments/{serving.deployment('pipeline')['id']}"
        api(serving.url, edited, "PATCH", parameters={"steps": 60, "advanced": tree})
        yield serving
        serving.stop()


@pytest.fixture
def prefect(page: Page, serving: Serving) -> Prefect:
    return Prefect(page, serving.url.removesuffix("/api") + "/v2")


def test_a_training_from_the_form_is_retried_and_resumed_to_its_report_and_its_page_in_mlflow(
    prefect: Prefect, serving: Serving, halt: Halt
) -> None:
    prefect.open_form("pipeline")
    steps = prefect.field("Steps")
    steps.fill("-3")
    prefect.press_submit()
    # Refused by the browser, from the schema.
    assert "1" in steps.evaluate("input => input.validationMessage")
    steps.fill("80")
    # Refused by the server: HTML forms have no open intervals.
    prefect.field("Learning rate").fill("0")
    prefect.expect_refusal("'learning_rate'")

    prefect.open_form("pipeline")
    prefect.field("Steps").fill("80")
    prefect.field("Name").fill("trained")
    flow_run = prefect.submit()
    run_dir = serving.output / "runs" / "trained"

    prefect.expect_log("Step [40/80]")
    prefect.expect_state("Running")
    halt.wait()
    serving.kill(TRAINER)
    prefect.expect_state("Failed")
    message, checkpoint = serving.state(flow_run)["message"], newest_checkpoint(run_dir)
    assert message.endswith("; Retry resumes")
    assert "\n" not in message

    prefect.press("Retry", confirmed_by="Retry")
    serving.wait_for_log(flow_run, f"Resuming from: {checkpoint}")
    halt.wait()
    prefect.press("Pause", confirmed_by="Pause Flow Run")
    halt.resume_told()
    prefect.expect_state("Suspended")
    serving.wait_for_end_of(ENGINE)
    assert f"step {saved_step(run_dir)} is saved" in serving.state(flow_run)["message"]

    prefect.press("Resume", confirmed_by="Resume")
    prefect.expect_state("Completed")
    state = serving.state(flow_run)
    assert state["name"] == "Completed"
    # Not by the name that the form filled in.
    assert serving.read(flow_run)["name"] == "pipeline trained"
    # One that was suspended ended when it was resumed, and each attempt has its number.
    tasks = {name: state for name, state in serving.task_states(flow_run) if "train " in name}
    assert tasks == {
        "train trained": "Failed",
        "train trained attempt 2": "Cancelled",
        "train trained attempt 3": "Completed",
    }
    told = rf"validation loss \d\.\d+ · report {re.escape(str(run_dir))}/report\.md"
    assert re.fullmatch(told, state["message"])
    assert [path.name for path in run_dir.parent.glob("trained*")] == ["trained"]
    prefect.page.reload()
    # After a reload the chart spans the whole run.
    expect(prefect.page.locator("main canvas")).to_be_visible()
    prefect.open_artifact("report", prefect.page.get_by_role("heading", name="Scores").first)
    curves = prefect.page.get_by_role("img", name="Training and validation loss").first
    # The page may put another element in its place at any time.
    look = "img => { img.scrollIntoView(); return img.naturalWidth > 0 }"
    eventually(lambda: bool(curves.evaluate(look)), "the curves")

    (address,) = re.findall(r"^MLflow +(http\S+)$", serving.running.output, re.MULTILINE)
    look_at_mlflow(prefect.page, address, run_dir.name, flow_run)


def look_at_mlflow(page: Page, address: str, name: str, flow_run: str) -> None:
    """MLflow's page shows the experiment, and of a run its state, curves and model."""
    page.goto(address)
    # Hide the welcome dialog, which would cover the screenshots.
    page.get_by_role("button", name="Close").or_(page.get_by_label("Close")).last.click()
    page.get_by_role("link", name=name, exact=True).first.click()
    expect(page.get_by_role("status").get_by_text("Finished")).to_be_visible()
    expect(page.get_by_role("link", name=flow_run)).to_be_visible()
    model = page.get_by_role("grid").get_by_role("link", name=name, exact=True)
    expect(model).to_be_visible()
    page.get_by_role("tab", name="Model metrics").click()
    # Of train/loss and validation/loss; each is a heading in the section of its split.
    page.get_by_role("searchbox", name="Search metric charts").fill("n/loss")
    for metric in ("train/loss", "validation/loss"):
        expect(page.get_by_text(f"{name} ({metric})").first).to_be_visible()
    expect(page.locator(".js-line").first).to_be_visible()
    page.get_by_role("tab", name="Overview").click()
    model.click()
    expect(page.get_by_text("Ready", exact=True).first).to_be_visible()


def test_runs_of_a_schedule_that_was_saved_in_the_ui_have_what_its_form_says(
    prefect: Prefect, serving: Serving, tmp_path: Path
) -> None:
    nightly = f"deployments/{serving.deployment('preprocess')['id']}"
    documents = [f"{write_texts(tmp_path / 'texts', 40)}/*.txt"]
    api(serving.url, nightly, "PATCH", parameters={"preset": "debug", "documents": documents})
    for days, name, advanced in ((3, "texts", ""), (2, "edited", '{"data": {"name": "edited"}}')):
        prefect.edit_schedule(nightly.rpartition("/")[2], "At 03:00 AM", advanced)
        # One that is due since a night in the past.
        first, last = (datetime.now(UTC) - timedelta(days=ago) for ago in (days, days - 1))
        between = {"start_time": first.isoformat(), "end_time": last.isoformat()}
        api(serving.url, f"{nightly}/schedule", min_runs=1, max_runs=1, **between)
        wanted = {"deployment_id": {"any_": [nightly.rpartition("/")[2]]}}
        due = api(
            serving.url, "flow_runs/filter", flow_runs=wanted, sort="EXPECTED_START_TIME_DESC"
        )
        serving.wait_for_state(due[0]["id"], "Completed")
        assert serving.read(due[0]["id"])["name"].startswith(f"preprocess {name}-")


def test_a_cancelled_training_says_what_is_saved_whatever_the_worker_says(
    prefect: Prefect, serving: Serving, halt: Halt
) -> None:
    flow_run = serving.create("pipeline", name="cancelled")
    prefect.open_run(flow_run)
    halt.wait()
    prefect.press("Cancel", confirmed_by="Cancel Flow Run")
    halt.resume_told()
    prefect.expect_state("Cancelled")
    serving.wait_for_end_of(ENGINE)
    # As the worker does if it notices the cancellation before the engine has ended.
    serving.set_state(flow_run, "CANCELLED", "Cancelled", message=WORKER_MESSAGE)
    message = f"Cancelled; step {saved_step(serving.output / 'runs' / 'cancelled')} is saved"
    eventually(lambda: serving.state(flow_run)["message"] == message, "the message")
