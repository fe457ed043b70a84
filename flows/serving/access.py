"""Access to the servers of an output folder: open to everyone on this machine, or by a secret.

Every user of a machine can reach loopback. `infini serve --auth` therefore generates a secret that
both servers require from then on. It is stored beside Prefect's records, in a file that only its
owner can read; processes that can read it, such as the worker and the other commands, use it.
"""

from __future__ import annotations

import base64
import secrets
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import atomic_file

LOOPBACK_NAMES = ("127.0.0.1", "localhost")
USER = "infini"
# "user:password" that MLflow's server requires; Prefect has its own setting.
MLFLOW_AUTH = "INFINI_MLFLOW_AUTH_STRING"
# Name of the experiment that MLflow's UI opens on.
EXPERIMENT = "INFINI_EXPERIMENT"


@dataclass(frozen=True)
class Access:
    """What the servers require: "user:password", or None for open access."""

    auth_string: str | None = None

    def servers(self) -> dict[str, str]:
        if self.auth_string is None:
            return {}
        return {
            "PREFECT_SERVER_API_AUTH_STRING": self.auth_string,
            MLFLOW_AUTH: self.auth_string,
        }

    def prefect_client(self) -> dict[str, str]:
        """Environment of a process that talks to Prefect's server."""
        return {} if self.auth_string is None else {"PREFECT_API_AUTH_STRING": self.auth_string}

    def mlflow_client(self, tracking_uri: str) -> dict[str, str]:
        """Environment of a process that talks to MLflow at `tracking_uri`.

        MLflow would send the password to any server, so it is set for loopback only.
        """
        if self.auth_string is None or urlsplit(tracking_uri).hostname not in LOOPBACK_NAMES:
            return {}
        user, _, password = self.auth_string.partition(":")
        return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


OPEN_ACCESS = Access()


def secret_file(home: Path) -> Path:
    """The file with the secret of the servers whose records are in `home`."""
    return home / "auth"


def stored_access(home: Path) -> Access:
    """What the servers require. Raises `UserError` if the secret belongs to another user."""
    try:
        return Access(secret_file(home).read_text(encoding="utf-8").strip())
    except (FileNotFoundError, NotADirectoryError):
        return OPEN_ACCESS
    except PermissionError as error:
        raise UserError(
            f"{secret_file(home)}: the servers of this output folder require a secret that only "
            "the owner of this file can read; choose another --output-dir"
        ) from error


def create_access(home: Path) -> Access:
    """Generate and store a secret. Raises `UserError` if it cannot be written."""
    access = Access(f"{USER}:{secrets.token_urlsafe(24)}")
    with atomic_file(secret_file(home), mode=0o600) as temporary:
        temporary.write_text(f"{access.auth_string}\n", encoding="utf-8")
    return access


def choose_access(home: Path, auth: bool | None) -> Access:
    """Apply `--auth` or `--no-auth` of `infini serve`; None keeps the previous choice.

    Prints how to sign in if a secret is required; the secret itself only when it is new.
    """
    if auth is False:
        secret_file(home).unlink(missing_ok=True)
        return OPEN_ACCESS
    access = stored_access(home)
    if access == OPEN_ACCESS and auth:
        access = create_access(home)
        _, _, password = (access.auth_string or "").partition(":")
        print(f"Sign in to MLflow as {USER} with the password {password}", flush=True)
        print(f"Sign in to the Prefect UI with {access.auth_string}", flush=True)
    if access != OPEN_ACCESS:
        print(f"Both servers require the secret in {secret_file(home)}", flush=True)
    return access


def authorized_request(url: str, auth_string: str | None) -> urllib.request.Request:
    """A GET of `url` with "user:password", if there is one."""
    request = urllib.request.Request(url)  # noqa: S310 - the user's own address
    if auth_string is not None:
        encoded = base64.b64encode(auth_string.encode()).decode()
        request.add_header("Authorization", f"Basic {encoded}")
    return request
