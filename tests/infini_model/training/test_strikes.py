"""A training that is struck at any moment resumes to the bits of an undisturbed one.

Its ranks are forked and have no launcher, so that a strike costs about a second. If one of them is
killed, the others are killed after it, as torchrun's agent does; what becomes of all processes when
the launcher, the agent or a rank is struck is in `launch/test_launch.py`.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import PATIENCE, leftovers
from curves import repeatable, weights
from stopping import StopAfter
from trainings import start_ranks

from infini_model.config import merge
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.runs import CHECKPOINTS, MODEL, newest_checkpoint
from infini_model.training.train import train

pytestmark = pytest.mark.story

STEPS = 4
SHORT = {
    "training": {"max_steps": STEPS},
    "logging": {"logging_steps": 1, "eval_steps": 2},
    "evaluation": {"max_windows": 4},
    # The second checkpoint removes the first one.
    "checkpoint": {"save_steps": 2, "save_total_limit": 1},
}
KINDS = {
    "one rank": {},
    "two ranks": {"training": {"batch_size": 4}},
    "two sharded ranks": {
        "launch": {"strategy": "fsdp"},
        "training": {"batch_size": 4, "precision": "fp16"},
    },
}


class Strike(NamedTuple):
    """A signal to a rank after a step, or before its n-th change of the run's files."""

    number: signal.Signals
    rank: int
    step: int | None = None
    change: int | None = None


def change_of(event, arguments, run_dir):
    """The change of a run's files that an audit event announces, by what and where; or None.

    `safetensors` writes without any; that its files are renamed into place announces itself.
    Checkpoints have the same name, and temporary ones have nothing random in theirs.
    """
    if event not in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"):
        return None
    path = arguments[0]
    if not isinstance(path, str | os.PathLike) or run_dir not in Path(path).parents:
        return None
    is_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if is_read or (event == "os.mkdir" and Path(path).exists()):
        return None
    name = re.sub(r"(\.tmp-.+)-\w+", r"\1", str(Path(path).relative_to(run_dir)))
    return f"{event} {re.sub(r'step-[0-9]+', 'step-N', name)}"


def rank_of_a_training(config, dataset, run_dir, strike, changes_made):
    """Train as one rank, which may be struck, and write which changes it has made."""
    changes, rank = [], os.environ["RANK"]
    is_target = strike is not None and strike.rank == int(rank)

    def before_a_change(event, arguments):
        if (change := change_of(event, arguments, run_dir)) is not None:
            changes.append(change)
            if is_target and len(changes) == strike.change:
                os.kill(os.getpid(), strike.number)

    sys.addaudithook(before_a_change)
    stops = is_target and strike.step is not None
    train(config, dataset, run_dir, [StopAfter(strike.step, strike.number)] if stops else [])
    changes_made.with_suffix(f".{rank}").write_text(json.dumps(changes))


class Training:
    """A training of some kind, how it ends undisturbed, and strikes at it."""

    def __init__(self, kind, config, dataset, folder):
        self._count = 1 if kind == "one rank" else 2
        self._config, self._dataset, self._folder = config, dataset, folder
        self._changes_made = folder / "changes"
        whole = folder / "whole"
        self._run(whole)
        made = [self._changes_made.with_suffix(f".{rank}") for rank in range(self._count)]
        self.changes = [json.loads(path.read_text()) for path in made]
        self._expected = self._outcome(whole)

    def strikes(self):
        """Both signals after any step, each to any rank; and kills before changes of files.

        Of equal changes the last one is struck: of the second checkpoint, not of the first. Two
        ranks change the files that one does; of those the checkpoints of shards are struck.
        """
        for step in range(STEPS + 1):
            yield Strike(signal.SIGKILL, step % self._count, step=step)
            yield Strike(signal.SIGTERM, (step + 1) % self._count, step=step)
        for rank, changes in enumerate(self.changes):
            for name, number in {each: n for n, each in enumerate(changes, start=1)}.items():
                if self._count == 1 or (
                    self._config.launch.strategy == "fsdp" and "step-N" in name
                ):
                    yield Strike(signal.SIGKILL, rank=rank, change=number)

    def _run(self, run_dir, strike=None):
        """Train until all ranks have ended, or the one that is struck has been killed."""
        arguments = (self._config, self._dataset, run_dir, strike, self._changes_made)
        ranks = start_ranks(self._count, rank_of_a_training, *arguments).processes
        try:
            if strike is not None and strike.number == signal.SIGKILL:
                ranks[strike.rank].join(PATIENCE)
                assert ranks[strike.rank].exitcode == -signal.SIGKILL, strike
                return
            for rank in ranks:
                rank.join(PATIENCE)
                assert rank.exitcode == 0, strike
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()

    def _outcome(self, run_dir):
        """All that must not depend on strikes, bit for bit."""
        exported = {path.name: path.read_bytes() for path in (run_dir / MODEL).iterdir()}
        return repeatable(run_dir), weights(run_dir), exported

    def survives(self, strike):
        """Strike; train on; all must be as in the undisturbed training."""
        run_dir = self._folder / "run"
        self._run(run_dir, strike)
        if strike.number == signal.SIGTERM:
            # It has saved before it left.
            last = max(line["step"] for line in read_metrics(run_dir))
            assert newest_checkpoint(run_dir).name == f"step-{last}", strike
            assert not (run_dir / MODEL).exists() or last == STEPS, strike
        self._run(run_dir)
        assert self._outcome(run_dir) == self._expected, strike
        assert not leftovers(run_dir), strike
        # As half a checkpoint would be when the training resumes.
        assert not list((run_dir / CHECKPOINTS).glob("damaged-*")), strike
        shutil.rmtree(run_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_struck_after_any_step_or_before_any_change_of_a_file(
    kind, dataset, make_config, tmp_path
):
    training = Training(kind, make_config(**merge(SHORT, KINDS[kind])), dataset, tmp_path)
    # Two checkpoints, the removal of the first one, and the export, each in several files.
    assert len(training.changes[0]) > 25
    assert kind != "two sharded ranks" or len(training.changes[1]) == 4
    for strike in training.strikes():
        training.survives(strike)
