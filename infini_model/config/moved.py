"""Keys that have moved, and how settings recorded by earlier versions are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infini_model.config.training import TrainingConfig

# From the old key to the new one.
MOVED: dict[str, str] = {
    "evaluation.max_new_tokens": "evaluation.sample.max_new_tokens",
    "evaluation.prompt_tokens": "evaluation.sample.prompt_tokens",
    "evaluation.temperature": "evaluation.sample.temperature",
    "evaluation.top_k": "evaluation.sample.top_k",
    "evaluation.top_p": "evaluation.sample.top_p",
    "model.attention_backend": "launch.attention_backend",
    "training.debug": "logging.debug",
    "training.deterministic": "launch.deterministic",
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

# Keys that have no successor with the same meaning, and what takes their place.
_COUNTED_IN_BATCHES = "use evaluation.max_windows instead, which counts windows, not batches"
REMOVED: dict[str, str] = {
    "evaluation.max_batches": _COUNTED_IN_BATCHES,
    "logging.eval_batches": _COUNTED_IN_BATCHES,
    "training.eval_batches": _COUNTED_IN_BATCHES,
}
# Evaluation tasks that have another name now.
TASKS = {"loss_by_segment": "loss_by_position"}


def with_keys_moved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of `tree`, which an earlier version may have written, with moved keys renamed."""
    sections: dict[str, Any] = _copied(tree)
    for key in REMOVED:
        batches = _take(sections, key)
        if key.endswith("eval_batches") and batches and batches[0] is not None:
            windows = batches[0] * _windows_at_once(sections)
            sections.setdefault("evaluation", {}).setdefault("max_windows", windows)
    for old, new in MOVED.items():
        found = _take(sections, old)
        if found:
            *path, name = new.split(".")
            section = sections
            for part in path:
                section = section.setdefault(part, {})
            section[name] = found[0]
    tasks = sections.get("evaluation", {}).get("tasks")
    if tasks:
        sections["evaluation"]["tasks"] = [TASKS.get(task, task) for task in tasks]
    return sections


def _windows_at_once(sections: Mapping[str, Any]) -> int:
    """How many windows all processes of a run validated in one batch."""
    training, launch = sections.get("training", {}), sections.get("launch", {})
    processes = launch.get("processes") or training.get("processes") or 1
    return int(training.get("batch_size", TrainingConfig.model_fields["batch_size"].default)) * int(
        processes
    )


def _copied(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {key: _copied(value) for key, value in tree.items()}


def _take(sections: dict[str, Any], key: str) -> list[Any]:
    """Remove the value of `key`, and return it in a list, which is empty if there is none."""
    name, _, leaf = key.partition(".")
    section = sections.get(name)
    if not isinstance(section, dict) or leaf not in section:
        return []
    return [section.pop(leaf)]
