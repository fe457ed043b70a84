"""The position in the data at which a branch begins."""

from __future__ import annotations

from infini_model.config import Config, PackingConfig, TrainingConfig
from infini_model.data.loading.loader import Origin, make_phases, read_by_source
from infini_model.data.loading.windows import Windows
from infini_model.data.manifest import Manifest
from infini_model.runtime.errors import ConfigError
from infini_model.training.checkpoint import TrainerState

# Settings of `packing` that change neither the windows nor their order within a source.
WEIGHING = {"weights", "max_epochs"}


def begin_state(
    parent: TrainerState, config: Config, manifest: Manifest, windows: Windows
) -> TrainerState:
    """Make the state in which a branch begins of that of its parent.

    With the same dataset, seed and windows every source is read on from where it was, also under
    other weights; otherwise the data is read from its beginning. `config.training.precision` is
    that of the branch, and its global batch is not decided yet.

    Raises `ConfigError` if the dataset has another tokenizer than the parent's.
    """
    if parent.tokenizer not in ("", manifest.tokenizer.fingerprint):
        raise ConfigError(
            f"training.branch_of: {config.training.branch_of} was trained with another tokenizer "
            f"than that of {manifest.folder_name}"
        )
    before = PackingConfig.model_validate(parent.config["packing"])
    own, theirs = (each.model_dump(exclude=WEIGHING) for each in (config.packing, before))
    scheduled = {key: parent.config["training"].get(key) for key in ("max_steps", "batch_schedule")}
    training = TrainingConfig.model_validate(scheduled)
    origin = Origin(parent.step)
    is_continued = (parent.dataset_key, parent.seed) == (manifest.key, config.run.seed)
    if is_continued and own == theirs:
        phases = make_phases(
            windows,
            before,
            config.model.segment_length,
            training,
            global_batch=parent.global_batch or 1,
            origin=parent.origin,
        )
        taken = read_by_source(phases, parent.windows_read)
        last = [phase for phase in phases if phase.first <= parent.windows_read][-1]
        key = last.first_key + (parent.windows_read - last.first) * last.parts
        origin = Origin(parent.step, parent.windows_read, key, taken)
    begun = {
        "windows_read": origin.windows_read,
        "seed": config.run.seed,
        "dataset_key": manifest.key,
        "precision": config.training.precision,
        "global_batch": None,
        "origin": origin,
    }
    return parent.model_copy(update=begun)
