"""What a flow run shows in Prefect besides its log: one artifact for each key, kept up to date.

None of it may harm a stage. Whatever Prefect's server refuses or takes too long for is a warning.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from uuid import UUID

from prefect.artifacts import Artifact, LinkArtifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

# How long the end of a stage waits for the last update.
PATIENCE_SECONDS = 3.0
# After a failed update the next one waits this many times longer.
BACKOFF = 10


@contextlib.contextmanager
def harmless(what: str) -> Iterator[None]:
    """Turn any error of the block, which tells Prefect of `what`, into a warning."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no display may harm a stage
        get_run_logger().warning("Prefect takes no %s (%s); the stage goes on", what, error)


class LiveArtifact:
    """The artifact of this flow run under `key`; a retry updates that of the attempt before."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._id: UUID | None = None

    def show(self, artifact: Artifact) -> None:
        """Create or update it. Raises what Prefect's client raises."""
        artifact.key = self._key
        client = get_client(sync_client=True)
        self._id = self._id or _find(client, self._key)
        if self._id is None:
            self._id = artifact.create(_sync=True).id  # type: ignore[call-arg, union-attr]
            return
        data = artifact.format(_sync=True)  # type: ignore[call-arg]
        client.update_artifact(
            self._id, ArtifactUpdate(data=data, description=artifact.description)
        )


def _find(client: SyncPrefectClient, key: str) -> UUID | None:
    """The artifact that this flow run has under a key already."""
    _, flow_run_id = get_task_and_flow_run_ids()
    if flow_run_id is None:
        return None
    wanted = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
        key=ArtifactFilterKey(any_=[key]),
    )
    found = client.read_artifacts(artifact_filter=wanted, limit=1)
    return found[0].id if found else None


def show(key: str, artifact: Artifact) -> None:
    """Show an artifact under a key, in place of what this flow run showed there before."""
    with harmless(f"artifact {key!r}"):
        LiveArtifact(key).show(artifact)


def show_folder(key: str, folder: Path) -> None:
    """Show a link to a folder of this machine; its text is the path, to be copied."""
    show(key, LinkArtifact(link=folder.resolve().as_uri(), link_text=str(folder)))


def remove(key: str) -> None:
    """Remove the artifact that an earlier attempt of this flow run left under a key."""
    with harmless(f"removal of artifact {key!r}"):
        client = get_client(sync_client=True)
        if found := _find(client, key):
            client.delete_artifact(found)


class Updates:
    """Calls `update` every `seconds` while the block runs, and once more at its end.

    It has a thread of its own: a server that is slow or down delays the next update, and neither
    the stage nor the output of its child process. `what` names it in the warning.
    """

    def __init__(self, what: str, update: Callable[[], None], seconds: float) -> None:
        self._what, self._update, self._seconds = what, update, seconds
        self._ended = threading.Event()
        # With the run context of the caller: the artifacts belong to its task run.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name=f"updates of {what}",
            daemon=True,
        )

    def __enter__(self) -> Updates:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        delay, warned = self._seconds, False
        while True:
            ended = self._ended.wait(delay)
            try:
                self._update()
                delay, warned = self._seconds, False
            except Exception as error:  # noqa: BLE001 - no display may harm a stage
                delay = BACKOFF * self._seconds
                if not warned:
                    warning = "Prefect takes no %s (%s); the stage goes on"
                    get_run_logger().warning(warning, self._what, error)
                warned = True
            if ended:
                return
