"""Check of a PostgreSQL database for Prefect's server, used instead of the SQLite file."""

from __future__ import annotations

import asyncio

from infini_model.runtime.errors import UserError

DRIVER = "postgresql+asyncpg"
CONNECT_SECONDS = 10.0


async def _connect(address: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(address)
    async with asyncio.timeout(CONNECT_SECONDS), engine.connect():
        pass
    await engine.dispose()


def check_database(address: str) -> None:
    """Raise `UserError` naming `--database` if the server could not store its records there.

    The message never quotes the address, which may contain a password.
    """
    from asyncpg import InterfaceError, PostgresError  # type: ignore[import-untyped]
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    expected = UserError(f"--database: expected {DRIVER}://USER:PASSWORD@HOST:PORT/NAME")
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        raise expected from None
    if url.drivername != DRIVER:
        raise expected
    try:
        asyncio.run(_connect(address))
    except TimeoutError as error:
        raise UserError(f"--database: {url.host} does not answer") from error
    except (
        OSError,
        TypeError,
        ValueError,
        SQLAlchemyError,
        InterfaceError,
        PostgresError,
    ) as error:
        raise UserError(f"--database: {str(error).splitlines()[0]}") from error
