"""The work pool and the deployments of prefect.yaml on a Prefect server."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from flows.serving.services import prefect_dir, start
from infini_model.config import Config
from infini_model.errors import UserError

WORK_POOL = "infini"


def deploy(config: Config, env: Mapping[str, str]) -> None:
    """Create the process work pool and the deployments of prefect.yaml."""
    log = prefect_dir(config) / "deploy.log"
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    pool = [*prefect, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite"]
    for command in (pool, [*prefect, "deploy", "--all"]):
        service = start("the deployment", command, log=log, env=env)
        if service.process.wait() != 0:
            raise UserError(f"the flows could not be deployed; see {log}")
