"""The weights stage: fetch and check the pretrained weights that a run begins from.

Once their shape is known, the memory of the training is compared with what this machine has.
"""

from __future__ import annotations

from infini_model.config import Config
from infini_model.runtime.branches import parent_of
from infini_model.runtime.claims import run_to_resume
from infini_model.runtime.stored_runs import saved_steps
from infini_model.training.initial_weights import InitialWeights, read_initial_weights
from tasks.checks import check_training_memory
from tasks.flow_run import current_owner
from tasks.stage import run_stage, run_with_retries


def fetch_weights(config: Config) -> InitialWeights | None:
    """The weights that `model.initial_weights` names; None without them.

    Those of a run that resumes from a checkpoint are as it recorded them, and of a branch as its
    parent did: neither needs the hub or the folder, except with LoRA, whose checkpoints lack the
    frozen weights. With several machines only the first one reads them.

    Raises as `check_training_memory` does.
    """
    if config.model.initial_weights is None or config.launch.node_rank > 0:
        return None
    run_dir = run_to_resume(config, current_owner())
    if run_dir is None and config.training.branch_of is not None:
        run_dir = parent_of(config)[0]
    if run_dir is not None and saved_steps(run_dir, config.run.store):
        recorded = read_initial_weights(run_dir)
        is_enough = config.training.lora is None
        if recorded is not None and (is_enough or recorded.folder.is_dir()):
            return recorded
    weights = fetch_anew(config)
    check_training_memory(config, weights)
    return weights


def fetch_anew(config: Config) -> InitialWeights:
    """The same, whatever a run has recorded."""
    return run_with_retries(
        _fetch, config.stages, "weights", str(config.model.initial_weights), config
    )


def _fetch(config: Config) -> InitialWeights:
    return InitialWeights.model_validate(run_stage("weights", config))
