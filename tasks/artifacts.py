"""The artifacts of a flow run in Prefect: one for each key, kept up to date.

None of them may harm a stage: an error or a timeout of Prefect's server is only a warning.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import UUID

from prefect.artifacts import Artifact, MarkdownArtifact, ProgressArtifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from infini_model.runtime.pictures import publish
from infini_model.runtime.stage_protocol import OnProgress, rate_limited

# How long the end of a stage waits for the last update.
PATIENCE_SECONDS = 3.0
# A picture in Markdown, on a line of its own: caption and path.
PICTURE = re.compile(r"^!\[(.*)\]\((.*)\)$", re.MULTILINE)


@contextlib.contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Turn any error of the block, which sends `what` to Prefect, into a warning."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no display may harm a stage
        _warn(what, error)


class LiveArtifact:
    """The artifact of this flow run under `key`; a retry updates the one of the earlier attempt."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: UUID | None = None
        self._shown: Artifact | None = None

    def show(self, artifact: Artifact) -> None:
        """Create or update it if anything has changed. Raises what Prefect's client raises."""
        artifact.key = self._key
        if artifact == self._shown:
            return
        client = get_client(sync_client=True)
        _, flow_run_id = get_task_and_flow_run_ids()
        self._id = self._id or find(client, flow_run_id, self._key)
        if self._id is None:
            self._id = artifact.create(_sync=True).id  # type: ignore[call-arg, union-attr]
        else:
            data = artifact.format(_sync=True)  # type: ignore[call-arg]
            client.update_artifact(
                self._id, ArtifactUpdate(data=data, description=artifact.description)
            )
        self._shown = artifact


def find(client: SyncPrefectClient, flow_run_id: UUID | None, key: str) -> UUID | None:
    """The artifact that a flow run already has under a key."""
    if flow_run_id is None:
        return None
    wanted = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": [key]}}
    found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted), limit=1)
    return found[0].id if found else None


def show(key: str, artifact: Artifact) -> None:
    """Show an artifact under a key, replacing what this flow run showed there before."""
    with warn_on_error(f"artifact {key!r}"):
        LiveArtifact(key).show(artifact)


def with_pictures(path: Path, pictures: Iterable[Path]) -> str:
    """The text of a Markdown file with addresses of its pictures, or with their paths.

    What else looks like a picture stays as it is: a report quotes documents.
    """
    known = {each.relative_to(path.parent).as_posix(): each for each in pictures}

    def shown(found: re.Match[str]) -> str:
        caption, picture = found[1], known.get(found[2])
        if picture is None:
            return found[0]
        address = publish(picture)
        return f"![{caption}]({address})" if address else f"{caption}: `{picture}`"

    return PICTURE.sub(shown, path.read_text(encoding="utf-8"))


def show_folder(key: str, folder: Path, description: str) -> None:
    """Show the path of a folder, for copying: no browser follows a link from a page to a file."""
    show(key, MarkdownArtifact(markdown=f"`{folder.resolve()}`", description=description))


@contextlib.contextmanager
def updates(what: str, update: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `update` every `seconds` while the block runs, and once more at its end.

    It runs in its own thread: a slow or dead server delays the next update, but not the stage, nor
    the reading of its child's output. `what` names the update in warnings.
    """
    over = threading.Event()

    def keep_updating() -> None:
        warned = ended = False
        while not ended:
            ended = over.wait(seconds)
            try:
                update()
                warned = False
            except Exception as error:  # noqa: BLE001 - no display may harm a stage
                if not warned:
                    _warn(what, error)
                warned = True

    # In the caller's run context: the artifacts belong to its task run.
    run = contextvars.copy_context().run
    name = f"updates of {what}"
    thread = threading.Thread(target=run, args=(keep_updating,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_SECONDS)


def _warn(what: str, error: Exception) -> None:
    get_run_logger().warning("Prefect did not accept the %s (%s); the stage continues", what, error)


ARTIFACT_SECONDS = 1.0
LOG_SECONDS = 5.0


@contextlib.contextmanager
def progress(
    name: str, unit: str, *, logged: bool = True, note: Callable[[], str] = lambda: ""
) -> Iterator[OnProgress]:
    """Yield a function that shows `done` of `total`, in `unit`, while the block runs.

    Prefect's artifact is updated at most once a second, and described by what `note` returns. Pass
    `logged=False` where the log shows the progress already.
    """
    percent, artifact = -1.0, LiveArtifact(f"{name}-progress")

    def log(_done: int, total: int) -> None:
        get_run_logger().info("%.0f%% of %s %s", percent, f"{total:,}", unit)

    log_sometimes = rate_limited(log, interval_seconds=LOG_SECONDS)

    def show(done: int, total: int) -> None:
        nonlocal percent
        percent = 100.0 * done / total if total else 100.0
        if logged:
            log_sometimes(done, total)

    def update() -> None:
        """Update the artifact if its note, or the percentage, rounded down, has changed."""
        if percent >= 0.0:
            description = note() or f"{name}: percent of all {unit}"
            artifact.show(ProgressArtifact(progress=float(int(percent)), description=description))

    with updates("progress", update, ARTIFACT_SECONDS):
        yield show
