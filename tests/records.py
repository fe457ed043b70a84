"""The metrics record of a training."""

from commands import PATIENCE

from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training import tracking
from infini_model.training.tracking import Exporters

# Retry soon after a server comes back.
tracking.MAX_DELAY_SECONDS = 1.0


class Record:
    """The metrics of a training: the file, and the exporters that follow it."""

    def __init__(self, run_dir, config, dataset, resumed_step=None):
        self.file = MetricsFile(run_dir, resumed_step)
        self.exporters = Exporters(run_dir, config, dataset)
        self.exporters.on_start(0)
        self.append = self.file.append

    def close(self, status, timeout_seconds=PATIENCE):
        """Close, and wait longer for the exporters than a training does."""
        self.file.close()
        self.exporters.on_end(status, timeout_seconds)
