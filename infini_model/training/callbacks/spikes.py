"""Loss spikes: losses far above those before them, reported with the text that was read.

The limit follows from the median of the last losses and their median deviation from it, which a few
outliers do not move. A falling curve, as at the start, has a large deviation, so that less counts
as a spike there.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.storage import write_json
from infini_model.training.callbacks.callback import Callback, Step
from infini_model.training.callbacks.diagnostics import REMEDIES
from infini_model.training.parallel.distributed import World
from infini_model.training.provenance import Attribution, WindowRead, describe_windows

# Losses that are looked back at, and how many there must be.
WINDOW = 64
FEWEST = 16
# How many deviations above the median a spike begins. Noise with heavy tails (Laplace) comes so far
# in one of 60,000 steps.
DEVIATIONS = 12.0
# The deviation is taken to be this share of the median at least: a curve may be very quiet.
LEAST_DEVIATION = 0.005
# The median deviation of normal noise is its standard deviation over this.
NORMAL = 1.4826

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spike:
    """A loss above `limit`, where the `steps` before it have a median and a deviation."""

    loss: float
    limit: float
    median: float
    deviation: float
    steps: int


class SpikeDetector:
    """Watches the losses of a training; equal losses give equal answers on every rank."""

    def __init__(self, past: Iterable[float] = ()) -> None:
        """`past` are losses that were watched before, as many as there are."""
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._spiking = False
        # A spike raises the deviation, so that its own losses soon look ordinary: it is over when
        # they are below the limit that it began with, or when all that is looked back at is it.
        self._limit, self._left = math.inf, 0
        for loss in past:
            self.watch(loss)

    def watch(self, loss: float) -> Spike | None:
        """Take in the next loss; the spike that begins with it, or None where none does."""
        spike = self._judge(loss) if len(self._losses) >= FEWEST else None
        self._losses.append(loss)
        lasts = self._left > 0 and loss > self._limit
        self._left -= 1
        began = spike if not self._spiking and not lasts else None
        self._spiking = lasts or spike is not None
        if began is not None:
            self._limit, self._left = began.limit, WINDOW
        return began

    def _judge(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        apart = statistics.median(abs(each - median) for each in self._losses)
        deviation = max(NORMAL * apart, LEAST_DEVIATION * abs(median))
        limit = median + DEVIATIONS * deviation
        if loss <= limit:
            return None
        return Spike(loss, limit, median, deviation, len(self._losses))


def past_losses(run_dir: Path, step: int, world: World) -> list[float]:
    """The last losses of the run up to `step`, as rank 0 reads them, on every rank."""
    values = torch.zeros(WINDOW, dtype=torch.float64, device=world.device)
    if world.is_main:
        lines = [line for line in read_metrics(run_dir) if line["step"] <= step]
        losses = [line["train/loss"] for line in lines if "train/loss" in line][-WINDOW:]
        values[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
    return [loss for loss in world.sum(values).tolist() if loss > 0.0]


class SpikeReports(Callback):
    """Warns when a spike begins, with the windows that were read, all of them in `<run>/debug`."""

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        past: Iterable[float],
        attribution: Attribution,
        before_pause: Callable[[], None],
    ) -> None:
        """`past` are the losses before; `before_pause` is called before windows are read back."""
        self._run_dir, self._rank = run_dir, rank
        self._detector = SpikeDetector(past)
        self._attribution, self._before_pause = attribution, before_pause

    def after_backward(self, step: Step) -> None:
        """Look at the loss; the weights are still those that it is of."""
        if spike := self._detector.watch(step.loss):
            self._before_pause()
            self._report(step.number, spike, self._attribution.read_back(step.batches))

    def _report(self, step: int, spike: Spike, reads: Sequence[WindowRead]) -> None:
        path = self._run_dir / "debug" / f"spike-{step}" / f"rank-{self._rank}.json"
        lines = [
            f"Loss spike at step {step}: {spike.loss:.4f} is above {spike.limit:.4f}, the limit "
            f"that follows from the {spike.steps} steps before (median {spike.median:.4f}).",
            f"Windows of this process, the largest loss first (all {len(reads)} in {path}):",
            *describe_windows(reads),
            REMEDIES,
        ]
        log.warning("%s", "\n".join(lines))
        tree = {"step": step, "spike": asdict(spike), "windows": [read.as_json() for read in reads]}
        try:
            write_json(path, tree)
        except UserError as error:
            log.warning("the windows of the spike could not be saved: %s", error)
