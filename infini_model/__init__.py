"""The library that computes: model, data, training, evaluation. It knows nothing of Prefect.

Settings that libraries beneath read when they are first imported are made here, unless the
environment has them already: nothing phones home; the threads of torch's operators sleep while they
wait for each other, since spinning, which is the default, makes a training several times slower as
soon as another process wants the same cores; and torch asks Linux for large pages, since attention
over 16K tokens on a CPU spends a tenth of its time on having small ones mapped.
"""

import os
from typing import Any

for _variable, _value in {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "THP_MEM_ALLOC_ENABLE": "1",
}.items():
    os.environ.setdefault(_variable, _value)


def __getattr__(name: str) -> Any:
    """What users import from here, loaded when it is asked for."""
    if name == "load_config":
        from infini_model.config import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
