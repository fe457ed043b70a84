"""Services that exit are restarted after a delay, until they exit too often."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.serving.services import Service, start
from flows.serving.supervise import MOST_EXITS, WITHIN_SECONDS, Supervised
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import end_tree


class Services:
    """Starts processes that sleep, which `die` kills; has the time for its clock."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.started: list[Service] = []
        self.now = 1000.0

    def __call__(self) -> Service:
        command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        self.started.append(start("the service", command, log=self._log, env={}))
        return self.started[-1]

    def die(self) -> None:
        """Kill the newest process."""
        self.started[-1].process.kill()
        self.started[-1].process.wait()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path / "log")
    yield services
    for service in services.started:
        end_tree(service.process, 0.0)


def test_a_service_is_restarted_after_its_delay_once_its_dependencies_are_up(
    services: Services, said: list[str]
) -> None:
    is_up = True
    supervised = Supervised(services, lambda: is_up, clock=lambda: services.now)
    supervised.check(said.append)
    assert len(services.started) == 1
    services.die()
    supervised.check(said.append)
    assert said == ["the service has exited (-9); restarting it in 1 s"]
    services.now += 0.9
    supervised.check(said.append)
    assert len(services.started) == 1
    is_up = False
    services.now += 0.2
    supervised.check(said.append)
    assert len(services.started) == 1
    is_up = True
    supervised.check(said.append)
    assert len(services.started) == 2
    assert supervised.service.process.poll() is None
    assert len(said) == 1


def test_a_service_that_exits_too_often_is_an_error_that_names_its_log(
    services: Services, said: list[str], tmp_path: Path
) -> None:
    supervised = Supervised(services, clock=lambda: services.now)

    def exit_after(seconds: float) -> None:
        services.now += seconds
        services.die()
        supervised.check(said.append)
        services.now += float(said[-1].split()[-2])
        supervised.check(said.append)

    exit_after(0.0)
    # The first exit is forgotten by then, and the delays begin anew.
    exit_after(WITHIN_SECONDS)
    for _ in range(MOST_EXITS - 2):
        exit_after(0.0)
    error = f"^the service has exited 5 times within 5 minutes; see {tmp_path}/log$"
    with pytest.raises(UserError, match=error):
        exit_after(0.0)
    assert [line.rpartition(" in ")[2] for line in said] == ["1 s", "1 s", "2 s", "4 s", "8 s"]
    assert len(services.started) == MOST_EXITS + 1
