"""Request checks in front of the servers: Prefect's, MLflow's and that of `infini api`.

Loopback alone is no protection: a browser on this machine sends requests there for any web page,
and Prefect runs what it is asked to run. A server therefore answers only under loopback names,
since a page can point its own name at 127.0.0.1 (DNS rebinding), and rejects requests from pages of
another origin: browsers send the origin with every websocket and every request other than a plain
GET. Programs such as curl send no origin and are accepted.

`uvicorn --factory` runs `prefect_app` and `mlflow_app`, with their settings in the environment.
"""

from __future__ import annotations

import base64
import hmac
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from flows.serving.access import LOOPBACK_NAMES, MLFLOW_AUTH
from flows.serving.database import migrate_one_at_a_time, take_write_locks_at_once
from infini_model.config import load_config
from infini_model.runtime import pictures
from infini_model.training.mlflow_record import open_tracking

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Pages may connect only to their own server (Prefect's would report to a telemetry service), and no
# foreign page may embed them in a frame (clickjacking).
PAGES = "connect-src 'self' blob: data:; frame-ancestors 'self'"


def _same_origin_only(app: ASGIApp) -> ASGIApp:
    """Reject requests from foreign pages (403), and restrict what the server's own pages may do.

    A page is the server's own if its origin is a loopback name with the port of the request. That
    is the port that the browser sees, which differs from the server's behind `ssh -L`.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        _, colon, port = headers.get("host", "").partition(":")
        own = {f"http://{name}{colon}{port}" for name in LOOPBACK_NAMES}
        if not own.issuperset(headers.getlist("origin")):
            refusal = PlainTextResponse("Origin: not a page of this server", status_code=403)
            await refusal(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("Content-Security-Policy", PAGES)
            await send(message)

        await app(scope, receive, send_with_policy)

    return guarded


def with_authorization(app: ASGIApp, expected: str, refusal: Response) -> ASGIApp:
    """Answer by `refusal`, unless the header has the `expected` value; not on /health."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] != "/health":
            given = Headers(scope=scope).get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), expected.encode()):
                await refusal(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def guarded(app: ASGIApp, hosts: Sequence[str] = LOOPBACK_NAMES) -> ASGIApp:
    """Answer only requests to one of `hosts`, and none from foreign pages."""
    return TrustedHostMiddleware(_same_origin_only(app), hosts, www_redirect=False)


def prefect_app() -> ASGIApp:
    """Prefect's API and UI, and the pictures of its artifacts.

    Prefect's own settings decide whether it requires a password.
    """
    from prefect.server.api.server import create_app

    take_write_locks_at_once()
    migrate_one_at_a_time(Path(os.environ["PREFECT_HOME"]) / "migrations.lock")
    app = create_app()
    shown = StaticFiles(directory=os.environ[pictures.FOLDER], check_dir=False)
    # Before the UI, which answers on every path.
    app.router.routes.insert(0, Mount(pictures.ADDRESS, shown))
    return guarded(app)


def mlflow_app() -> ASGIApp:
    """MLflow's API and UI; requires user and password if `MLFLOW_AUTH` is set.

    `mlflow server` would start uvicorn as a child that outlives it when it is killed and keeps the
    port. Its options are passed under the names that it gives them in the environment.
    """
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    records = os.environ["MLFLOW_BACKEND_STORE_URI"]
    proxied = "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: records,
        constants.REGISTRY_STORE_URI_ENV_VAR: records,
        constants.ARTIFACT_ROOT_ENV_VAR: proxied,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ["MLFLOW_ARTIFACTS_DESTINATION"],
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
        "_MLFLOW_SERVER_BOOT_ID": uuid.uuid4().hex,
        # It would start half a dozen workers for jobs that are not used here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    # Creates the tables atomically, and the experiment before the first training, since the address
    # of its page is printed.
    open_tracking(load_config(overrides=[{"tracking": {"tracking_uri": records}}]))
    initialize_backend_stores(records, records, proxied)
    from mlflow.server.fastapi_app import app

    if auth_string := os.environ.get(MLFLOW_AUTH):
        ask = {"WWW-Authenticate": 'Basic realm="infini serve"'}
        refusal = PlainTextResponse("Unauthorized", status_code=401, headers=ask)
        expected = f"Basic {base64.b64encode(auth_string.encode()).decode()}"
        return guarded(with_authorization(app, expected, refusal))
    return guarded(app)
