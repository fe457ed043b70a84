"""Services that exit are restarted after a delay, until they exit too often."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import eventually

from flows.serving.services import Service, start
from flows.serving.supervise import MOST_EXITS, Supervised
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import end_tree


class Services:
    """Starts processes that run `code`; counts them."""

    def __init__(self, folder: Path, code: str) -> None:
        self._log, self._code = folder / "log", code
        self.started: list[Service] = []

    def __call__(self) -> Service:
        command = [sys.executable, "-S", "-c", self._code]
        self.started.append(start("the service", command, log=self._log, env={}))
        return self.started[-1]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path, "import time; time.sleep(600)")
    yield services
    for service in services.started:
        end_tree(service.process, 0.0)


def test_a_service_is_restarted_after_its_delay_once_its_dependencies_are_up(
    sleeper: Services, said: list[str]
) -> None:
    is_up = False
    supervised = Supervised(sleeper, lambda: is_up, first_delay_seconds=0.2)
    supervised.check(said.append)
    assert len(sleeper.started) == 1
    supervised.service.process.kill()
    supervised.service.process.wait()
    died = time.monotonic()
    supervised.check(said.append)
    assert said == ["the service has exited (-9); restarting it in 0.2 s"]
    while time.monotonic() < died + 0.5:
        supervised.check(said.append)
    assert len(sleeper.started) == 1
    is_up = True
    supervised.check(said.append)
    assert len(sleeper.started) == 2
    assert supervised.service.process.poll() is None
    assert len(said) == 1


def test_a_service_that_exits_too_often_is_an_error_that_names_its_log(
    tmp_path: Path, said: list[str]
) -> None:
    services = Services(tmp_path, "raise SystemExit(3)")
    supervised = Supervised(services, first_delay_seconds=0.001)

    def has_failed() -> bool:
        try:
            supervised.check(said.append)
        except UserError as error:
            said.append(str(error))
            return True
        return False

    eventually(has_failed, "the error", seconds=30)
    assert len(services.started) == MOST_EXITS
    assert said[-1] == f"the service has exited 5 times within 5 minutes; see {tmp_path}/log"
