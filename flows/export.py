"""`infini export`: the newest checkpoint of a run as a folder that other programs open."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from flows.manage import find_run_folder
from infini_model.config.places import is_url
from infini_model.config.tree import RunConfig
from infini_model.data.shards.plan import finished_dataset
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.model.hf_checkpoint import is_adapter_folder
from infini_model.runtime.claims import resume_config
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.runs import CHECKPOINTS, dataset_here
from infini_model.runtime.stored.working_copy import refresh_checkpoint
from infini_model.training.checkpoints.checkpoint import newest_checkpoint, read_position
from infini_model.training.checkpoints.export import (
    check_target,
    export_merged,
    export_model,
    opens_in_transformers,
)


def export_run(places: RunConfig, name: str | None, target: str, *, merge: bool) -> list[str]:
    """Write the newest checkpoint of a run to the folder `target`; returns what to say about it.

    `merge` merges the adapters of a LoRA run into its initial weights.

    Raises `UserError` in one line if there is no such run, no checkpoint or no dataset, or if the
    folder holds other files.
    """
    if is_url(target):
        raise UserError(f"--to: got {target!r}: takes a folder of this machine")
    folder = Path(target).expanduser().resolve()
    check_target(folder)
    run_dir = find_run_folder(places, name)
    refresh_checkpoint(run_dir, places.store)
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir / CHECKPOINTS}: no checkpoint found; train first")
    step = read_position(checkpoint).step
    write = export_merged if merge else export_model
    write(checkpoint, folder, load_dataset_tokenizer(_dataset_of(run_dir, places)))
    return [f"Exported step {step} of {run_dir.name} to {folder}", *_uses(folder)]


def _dataset_of(run_dir: Path, places: RunConfig) -> Path:
    """The folder of a run's dataset, with its manifest and tokenizer and perhaps no shards."""
    dataset = dataset_here(run_dir)
    if isinstance(dataset, Path) and dataset.exists():
        return dataset
    stored = {} if places.store is None else {"run": {"store": places.store}}
    return finished_dataset(resume_config(run_dir, [stored])).folder


def _uses(folder: Path) -> Iterator[str]:
    """How to use an exported folder, one line for each program."""
    yield f'infini generate --checkpoint {shlex.quote(str(folder))} --prompt "Once upon a time"'
    if not opens_in_transformers(folder):
        return
    names = ["AutoModelForCausalLM"]
    if (folder / TOKENIZER_FILE).is_file():
        names.append("AutoTokenizer")
    library = "transformers"
    if is_adapter_folder(folder):
        library, names[0] = "peft", "AutoPeftModelForCausalLM"
    calls = ", ".join(f"{name}.from_pretrained({str(folder)!r})" for name in names)
    yield f"{library}: {calls}"
