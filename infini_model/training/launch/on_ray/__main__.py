"""`python -m infini_model.training.launch.on_ray`: the driver of a training on a Ray cluster.

It forms a gang of nodes and follows it. When nodes are lost, the next gang, of the nodes that there
are, resumes from the newest checkpoint; any other failure ends the driver, for the caller to retry.
The launcher starts it, and reads why it ended in the run folder. Ray ends what runs on the nodes
when the driver dies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infini_model.config import load_config
from infini_model.runtime.errors import UserError
from infini_model.runtime.processes import deferred_signals
from infini_model.runtime.ray import connect
from infini_model.training.launch.failures import (
    EXIT_CRASH,
    EXIT_USER_ERROR,
    Report,
    TrainingFailure,
)
from infini_model.training.launch.on_ray.gangs import Gangs


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infini_model.training.launch.on_ray")
    for name in ("--config", "--dataset", "--run-dir"):
        parser.add_argument(name, type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; a failure is saved in the run folder. Returns the exit status."""
    arguments = _parse(argv)
    config = load_config(file=arguments.config)
    try:
        # Ray installs a handler of its own when it joins.
        with (
            connect(config.launch.ray_address, "launch") as address,
            deferred_signals() as received,
        ):
            folders = arguments.dataset, arguments.run_dir
            Gangs(config, *folders, address, lambda: bool(received)).train()
    except (UserError, ConnectionError, TrainingFailure) as error:
        Report.of(error).save(arguments.run_dir)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_CRASH
    return 0


if __name__ == "__main__":
    sys.exit(main())
