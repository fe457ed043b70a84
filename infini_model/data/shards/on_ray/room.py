"""What a task reserves on its node, and whether any node has room for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infini_model.config import DataConfig
from infini_model.runtime.errors import DeviceError, UserError

# The settings that reserve something for a task, by Ray's name of it.
KEYS = {"CPU": "data.ray_cpus", "GPU": "data.ray_gpus", "memory": "data.ray_memory_gigabytes"}


def reserved(config: DataConfig) -> dict[str, float]:
    """What a task reserves on its node, by Ray's names."""
    needs = {"CPU": config.ray_cpus}
    if config.device == "cuda":
        needs["GPU"] = config.ray_gpus
    if config.ray_memory_gigabytes is not None:
        needs["memory"] = config.ray_memory_gigabytes * 1e9
    return needs


def check_room(needs: Mapping[str, float], nodes: list[dict[str, Any]], address: str) -> None:
    """Raise a `UserError` that names the setting if no node ever has room for a task."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    for name, need in needs.items():
        most = max((node.get(name, 0.0) for node in alive), default=0.0)
        if name == "GPU" and not most:
            raise DeviceError(f"data.device: got 'cuda': no node of {address} has a GPU")
        if most < need:
            unit = 1e9 if name == "memory" else 1.0
            raise UserError(
                f"{KEYS[name]}: got {need / unit:g}: no node of {address} has more than "
                f"{most / unit:g}"
            )
    if not any(all(node.get(name, 0.0) >= need for name, need in needs.items()) for node in alive):
        wanted = ", ".join(KEYS[name] for name in needs)
        raise UserError(f"{wanted}: no node of {address} has them all")
