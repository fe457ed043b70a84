"""The metrics record of a training."""

from commands import PATIENCE

from infini_model.runtime.metrics_file import MetricsFile
from infini_model.training.callbacks.sinks import Sinks


class Record:
    """The metrics of a training: the file, and the sinks that follow it."""

    def __init__(self, run_dir, config, dataset, resumed_step=None):
        self.file = MetricsFile(run_dir, resumed_step)
        # Retry soon after a server comes back.
        self.sinks = Sinks(run_dir, config, dataset, max_delay_seconds=1.0)
        self.sinks.start()
        self.append = self.file.append

    def close(self, status, timeout_seconds=PATIENCE):
        """Close, and wait longer for the sinks than a training does."""
        self.file.close()
        self.sinks.close(status, timeout_seconds)
