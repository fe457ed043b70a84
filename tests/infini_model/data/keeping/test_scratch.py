"""A scratch folder lives as long as its process, and not much longer."""

import subprocess
import sys
from pathlib import Path

from infini_model.data.keeping.scratch import scratch_folder

HOLD = """
import sys
from pathlib import Path
from infini_model.data.keeping.scratch import scratch_folder

with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_stays_while_it_is_in_use_and_goes_with_a_killed_process(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        held = Path(other.stdout.readline().strip())
        with scratch_folder(tmp_path) as mine, scratch_folder(tmp_path) as second:
            assert len({held, mine, second}) == 3
            assert (held / "half").exists()
        assert not mine.exists()
        other.kill()
    assert held.exists()
    with scratch_folder(tmp_path) as mine:
        assert list(tmp_path.glob(".tmp-*")) == [mine]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
