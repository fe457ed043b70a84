"""How long ranks wait for each other."""

import pytest

from infini_model.training.callbacks.heartbeat import Heartbeat
from infini_model.training.parallel.distributed import collective_timeout


@pytest.mark.parametrize("hang_timeout", [None, 30.0, 7200.0])
def test_the_launcher_ends_a_hang_before_the_ranks_give_up_waiting(tmp_path, hang_timeout):
    heartbeat = Heartbeat(tmp_path, 0, hang_timeout)
    allowed = []
    for beat in (heartbeat.before_pause, heartbeat.after_gradients, heartbeat.after_gradients):
        beat()
        line = (tmp_path / "logs" / "heartbeats" / "rank-0").read_text()
        allowed.append(float(line.split()[1]))
    heartbeat.close()
    assert collective_timeout(hang_timeout).total_seconds() > max(allowed)
