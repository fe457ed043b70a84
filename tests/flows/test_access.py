"""The secret of an output folder: when there is one, who can read it, and that commands use it."""

import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Environment, infini, run, tiny, write_settings

from flows.serving.access import EVERYONE, choose_access, create_access, secret_file, stored_access


def test_a_secret_is_told_once_kept_for_its_owner_and_remembered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose_access(tmp_path, None) == EVERYONE
    assert not capsys.readouterr().out
    access = choose_access(tmp_path, True)
    user, _, password = str(access.auth_string).partition(":")
    assert user == "infini"
    assert len(password) >= 32
    assert password in capsys.readouterr().out
    assert stat.S_IMODE(secret_file(tmp_path).stat().st_mode) == 0o600
    for auth in (None, True):
        assert choose_access(tmp_path, auth) == stored_access(tmp_path) == access
        printed = capsys.readouterr().out
        assert password not in printed
        assert str(secret_file(tmp_path)) in printed
    assert choose_access(tmp_path, False) == stored_access(tmp_path) == EVERYONE
    assert choose_access(tmp_path, True) != access


@pytest.mark.slow
def test_a_command_of_a_folder_with_a_secret_reports_to_its_server_with_it(
    with_tables: Callable[[Path], Path], tmp_path: Path, text_files: Path, alone: Environment
) -> None:
    home = with_tables(tmp_path / "output") / "prefect"
    create_access(home)
    settings = write_settings(tmp_path / "settings.yaml", tiny(text_files, tmp_path / "output"))
    done = run(infini("preprocess", "--config", settings), alone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Unauthorized" not in done.stdout + done.stderr

    def count(table: str) -> Any:
        return sqlite3.connect(home / "prefect.db").execute(f"select count(*) from {table}")

    # Logs come by HTTP, events by a websocket.
    assert [next(count(table))[0] > 0 for table in ("log", "events")] == [True, True]
