"""One rank of a training: `torchrun -m infini_model.training`, or plain Python for one process.

Exit status: 0 on success; 2 after a user error, printed as one line; 3 after NaN or infinity; 143
or 130 after SIGTERM or SIGINT, with a checkpoint saved; 1 after anything else, with a traceback.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from infini_model.config import Config, load_config
from infini_model.runtime.processes import die_with_parent
from infini_model.runtime.stage_protocol import rate_limited, write_progress
from infini_model.training import AGENT
from infini_model.training.callbacks import Callback, Step
from infini_model.training.launch.devices import log_prefix, number_visible_gpus, physical_gpu
from infini_model.training.launch.failures import EXIT_CRASH, TrainingFailure
from infini_model.training.launch.heartbeat import Heartbeat


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infini_model.training",
        description="Train on a dataset folder, or resume from the run's newest checkpoint.",
    )
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file of settings")
    parser.add_argument("--dataset", type=Path, required=True, help="finished dataset folder")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="run folder, created if missing"
    )
    parser.add_argument(
        "--report-progress", action="store_true", help="print progress for the launcher on stdout"
    )
    return parser.parse_args(argv)


def _gpu() -> int | None:
    return physical_gpu(int(os.environ.get("LOCAL_RANK", "0")))


def _prefix(rank: int) -> str:
    return log_prefix(rank, _gpu(), int(os.environ.get("WORLD_SIZE", "1")))


class _PrefixEachLine(logging.Formatter):
    """Prefixes every line of a message, so that each shows which rank printed it."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with the prefix and `:LEVEL | ` in front of every line."""
        prefix = f"{self._prefix}:{record.levelname} | "
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def _log_to_stdout(config: Config, rank: int) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_PrefixEachLine(_prefix(rank)))
    logging.captureWarnings(capture=True)
    for name in ("infini_model", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(config.run.log_level.upper())
        logger.propagate = False


class _Progress(Callback):
    """Prints the progress of the training for the launcher."""

    def __init__(self) -> None:
        self._report = rate_limited(write_progress)

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Print the progress, rate-limited."""
        self._report(step.number, step.total)


def _report_failure(error: Exception, rank: int) -> int:
    """Print why this rank failed and save it for the launcher; returns the exit status."""
    failure = TrainingFailure.of(error, rank, _gpu())
    failure.save()
    crashed = failure.exit_status == EXIT_CRASH
    trace = "".join(traceback.format_exception(error)).splitlines()
    for line in trace if crashed else [failure.message]:
        print(f"{_prefix(rank)}:ERROR | {line}", file=sys.stderr)
    return failure.exit_status


def main(argv: Sequence[str] | None = None) -> int:
    """Train; a failure is printed, and saved for the launcher if there is one.

    Returns the exit status.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(int(os.environ.get(AGENT, os.getppid())))
    arguments = _parse(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = load_config(file=arguments.config)
        number_visible_gpus(config.launch.gpus)
        _log_to_stdout(config, rank)
        heartbeat = Heartbeat(arguments.run_dir, rank, config.launch.hang_timeout_seconds)
        callbacks: list[Callback] = [heartbeat]
        if arguments.report_progress and rank == 0:
            callbacks.append(_Progress())
        # Imported late, as torch takes seconds to load: configuration errors are reported at once.
        from infini_model.training.train import train

        if config.logging.sample_steps is not None or config.evaluation.during.tasks:
            from infini_model.evaluation.during import Measurements

            callbacks.append(Measurements())

        outcome = train(config, arguments.dataset, arguments.run_dir, callbacks)
    except Exception as error:  # noqa: BLE001 - the one place that reports every failure
        return _report_failure(error, rank)
    heartbeat.close()
    if outcome.stopped_by is None:
        return 0
    message = f"stopped by signal {outcome.stopped_by}; step {outcome.step} is saved"
    TrainingFailure("preempted", message, rank, _gpu()).save()
    return 128 + outcome.stopped_by


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk. Native threads that outlive the interpreter sometimes abort the process
    # at exit, and torchrun would then report a finished rank as crashed.
    os._exit(code)
