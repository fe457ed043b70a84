"""Keys that have moved, and how settings recorded by earlier versions are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# From the old key to the new one.
MOVED: dict[str, str] = {
    "model.attention_backend": "launch.attention_backend",
    "training.debug": "logging.debug",
    "training.deterministic": "launch.deterministic",
    "training.eval_batches": "logging.eval_batches",
    "training.eval_steps": "logging.eval_steps",
    "training.gpus": "launch.gpus",
    "training.gradient_checkpointing": "launch.gradient_checkpointing",
    "training.hang_timeout_seconds": "launch.hang_timeout_seconds",
    "training.logging_steps": "logging.logging_steps",
    "training.node_rank": "launch.node_rank",
    "training.num_nodes": "launch.num_nodes",
    "training.processes": "launch.processes",
    "training.rdzv_endpoint": "launch.rdzv_endpoint",
    "training.save_steps": "checkpoint.save_steps",
    "training.save_total_limit": "checkpoint.save_total_limit",
    "training.skip_non_finite": "launch.skip_non_finite",
    "training.strategy": "launch.strategy",
    "training.tensorboard_dir": "logging.tensorboard_dir",
}


def with_keys_moved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `tree`, which an earlier version may have written, with moved keys renamed."""
    sections = {name: dict(x) if isinstance(x, Mapping) else x for name, x in tree.items()}
    for old, new in MOVED.items():
        (before, key), (after, name) = old.split("."), new.split(".")
        section = sections.get(before)
        if isinstance(section, dict) and key in section:
            sections.setdefault(after, {})[name] = section.pop(key)
    return sections
