"""The ranks of a training agree on its settings and its dataset, before they do anything together.

Ranks of several machines read their settings there. With different ones they would wait for each
other for ever, or train different models and mix their gradients.
"""

from __future__ import annotations

import json

from infini_model.config import Config
from infini_model.runtime.claims import first_difference
from infini_model.runtime.errors import ConfigError
from infini_model.training.parallel.distributed import World

# Besides what decides the weights: what the ranks do together, and when.
TOGETHER: dict[str, set[str]] = {
    "launch": {"strategy", "gradient_checkpointing", "deterministic"},
    "logging": {"logging_steps", "eval_steps", "debug"},
    "checkpoint": {"save_steps"},
    "evaluation": {"max_windows"},
}


def check_agreement(config: Config, dataset_key: str, world: World) -> None:
    """Raise `ConfigError` on every rank if any has other settings or another dataset than rank 0.

    It names the first setting that differs, with both values.
    """
    own = {**config.identity, "dataset": dataset_key}
    for section, names in TOGETHER.items():
        values = getattr(config, section).model_dump(mode="json", include=names)
        own[section] = own.get(section, {}) | values
    told = world.texts(json.dumps(own))
    for rank, text in enumerate(told):
        found = first_difference(json.loads(told[0]), json.loads(text)) if text != told[0] else None
        if found is not None:
            where = "here" if text == told[world.rank] else f"on that of rank {rank}"
            raise ConfigError(
                f"{found.key} is {found.one!r} on the first machine, {found.other!r} {where}"
            )
