"""Access to the servers of an output folder: open to everyone on this machine, or by a secret.

Every user of a machine can reach loopback. `infini serve --auth` therefore generates a secret that
both servers require from then on. It is stored beside Prefect's records, in a file that only its
owner can read; processes that can read it, such as the worker and the other commands, use it.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import urlsplit

from infini_model.runtime.errors import UserError
from infini_model.runtime.storage import atomic_file

LOOPBACK_NAMES = ("127.0.0.1", "localhost")
USER = "infini"
# "user:password" that MLflow's server requires; Prefect has its own setting.
MLFLOW_AUTH = "INFINI_MLFLOW_AUTH_STRING"


def server_environment(secret: str | None) -> dict[str, str]:
    """Return the environment of a server that requires "user:password"; without one it is open."""
    if secret is None:
        return {}
    return {"PREFECT_SERVER_API_AUTH_STRING": secret, MLFLOW_AUTH: secret}


def prefect_client(secret: str | None) -> dict[str, str]:
    """Return the environment of a process that talks to Prefect's server."""
    return {} if secret is None else {"PREFECT_API_AUTH_STRING": secret}


def mlflow_client(secret: str | None, tracking_uri: str) -> dict[str, str]:
    """Return the environment of a process that talks to MLflow at `tracking_uri`.

    MLflow would send the password to any server, so it is set for loopback only.
    """
    if secret is None or urlsplit(tracking_uri).hostname not in LOOPBACK_NAMES:
        return {}
    user, password = secret.split(":", 1)
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def secret_file(home: Path) -> Path:
    """The file with the secret of the servers whose records are in `home`."""
    return home / "auth"


def stored_secret(home: Path) -> str | None:
    """Read the "user:password" that the servers require; None if they are open.

    Raises `UserError` if it belongs to another user.
    """
    try:
        return secret_file(home).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UserError(
            f"{secret_file(home)}: the servers of this output folder require a secret that only "
            "the owner of this file can read; choose another --output-dir"
        ) from error


def choose_secret(home: Path, auth: bool | None) -> str | None:
    """Apply `--auth` or `--no-auth` of `infini serve`; None keeps the previous choice.

    Prints how to sign in if a secret is required; the secret itself only when it is new. Raises as
    `stored_secret` does, and `UserError` if it cannot be written.
    """
    file = secret_file(home)
    if auth is False:
        file.unlink(missing_ok=True)
        return None
    secret = stored_secret(home)
    if secret is None and auth:
        password = secrets.token_urlsafe(24)
        secret = f"{USER}:{password}"
        with atomic_file(file, mode=0o600) as temporary:
            temporary.write_text(f"{secret}\n", encoding="utf-8")
        print(f"Sign in to MLflow as {USER} with the password {password}", flush=True)
        print(f"Sign in to the Prefect UI with {secret}", flush=True)
    if secret is not None:
        print(f"Both servers require the secret in {file}", flush=True)
    return secret
