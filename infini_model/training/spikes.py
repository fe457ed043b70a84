"""Loss spikes: losses far above the preceding ones, reported with the text of the batch.

The threshold is based on the median of the last losses and their median absolute deviation (MAD),
which are robust to a few outliers. A falling curve, as at the start, has a large deviation, so
fewer losses count as spikes there.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass

from infini_model.runtime.errors import UserError
from infini_model.runtime.metrics_file import read_metrics
from infini_model.runtime.storage import write_json
from infini_model.training.callbacks import Callback, Step
from infini_model.training.nan_report import REMEDIES, describe_windows, read_back
from infini_model.training.setup import TrainingSetup

# Number of past losses considered, and the minimum number needed.
WINDOW = 64
MIN_LOSSES = 16
# Deviations above the median at which a spike begins. Heavy-tailed (Laplace) noise gets there in
# one of 60,000 steps.
DEVIATIONS = 12.0
# Minimum deviation as a share of the median, for curves with very little noise.
MIN_DEVIATION = 0.005
# Standard deviation of normal noise over its MAD.
MAD_TO_STD = 1.4826

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spike:
    """A loss above `limit`, which follows from the median and deviation of the last `steps`."""

    loss: float
    limit: float
    median: float
    deviation: float
    steps: int


class SpikeDetector:
    """Detects spikes in a sequence of losses; equal losses give equal results on every rank."""

    def __init__(self, past: Iterable[float] = ()) -> None:
        """`past` holds the losses before the first one watched, if any."""
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._spiking = False
        # A spike raises the deviation, so its own losses soon look normal: it lasts until a loss is
        # below the limit at which it began, or until it fills the whole window.
        self._limit, self._left = math.inf, 0
        for loss in past:
            self.watch(loss)

    def watch(self, loss: float) -> Spike | None:
        """Add the next loss; returns the spike that begins with it, or None."""
        spike = self._check(loss) if len(self._losses) >= MIN_LOSSES else None
        self._losses.append(loss)
        lasts = self._left > 0 and loss > self._limit
        self._left -= 1
        began = spike if not self._spiking and not lasts else None
        self._spiking = lasts or spike is not None
        if began is not None:
            self._limit, self._left = began.limit, WINDOW
        return began

    def _check(self, loss: float) -> Spike | None:
        median = statistics.median(self._losses)
        mad = statistics.median(abs(each - median) for each in self._losses)
        deviation = max(MAD_TO_STD * mad, MIN_DEVIATION * abs(median))
        limit = median + DEVIATIONS * deviation
        if loss <= limit:
            return None
        return Spike(loss, limit, median, deviation, len(self._losses))


class SpikeReports(Callback):
    """Warns when a spike begins and saves the windows of the step in `<run>/debug`.

    They are scored again with the weights after the step, on a GPU after the next one.
    """

    def __init__(self, setup: TrainingSetup, expect_long_work: Callable[[], None]) -> None:
        """`expect_long_work` is called before windows are read back."""
        self._setup, self._expect_long_work = setup, expect_long_work

        def past_losses() -> list[float]:
            return [
                line["train/loss"]
                for line in read_metrics(setup.run_dir)
                if line["step"] <= setup.start.step and "train/loss" in line
            ][-WINDOW:]

        # Rank 0 reads them for all.
        self._detector = SpikeDetector(setup.world.broadcast(past_losses))

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Check the loss."""
        if (spike := self._detector.watch(step.loss)) is None:
            return
        self._expect_long_work()
        reads = read_back(self._setup, step)
        folder = self._setup.run_dir / "debug" / f"spike-{step.number}"
        path = folder / f"rank-{self._setup.world.rank}.json"
        lines = [
            f"Loss spike at step {step.number}: {spike.loss:.4f} is above the limit "
            f"{spike.limit:.4f}, based on the last {spike.steps} steps (median "
            f"{spike.median:.4f}).",
            f"Windows of this process, largest loss first (all {len(reads)} in {path}):",
            *describe_windows(reads),
            REMEDIES,
        ]
        log.warning("%s", "\n".join(lines))
        windows = [read.as_json() for read in reads]
        tree = {"step": step.number, "spike": asdict(spike), "windows": windows}
        try:
            write_json(path, tree)
        except UserError as error:
            log.warning("cannot save the windows of the spike: %s", error)
