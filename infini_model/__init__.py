"""The library that computes: model, data, training, evaluation. It knows nothing of Prefect.

Nothing phones home: the telemetry of the libraries beneath is off unless the environment says
otherwise, before any of them is imported.
"""

import os

for _variable, _value in {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}.items():
    os.environ.setdefault(_variable, _value)
