"""Checkpoints on disk: written atomically, and verified before they are loaded.

`<run>/checkpoints/step-N/` holds `model/` (config.json and safetensors, which `InfiniLlama.
from_pretrained` and, without memory, `transformers` open; with LoRA an adapter that `peft` opens),
`optimizer.safetensors` (AdamW's moments by parameter name), `generators.safetensors` (random
states, a row per rank), `state.json` (`Position`) and `manifest.json` (the SHA-256 of all these
files). Tensors are stored whole, however they were sharded; frozen ones are not stored. Nothing is
pickled.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor, nn

from infini_model.config import Config, ModelConfig
from infini_model.data.manifest import TokenizerRecord
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.hf import (
    NO_TOKENS,
    Adapter,
    TokenIds,
    save_tensors,
    write_adapter,
    write_files,
)
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import MODEL
from infini_model.runtime.storage import (
    MANIFEST,
    atomic_folder,
    dump_json,
    remove_leftovers,
    retire,
    sha256,
)
from infini_model.training.checkpoints.folders import (
    STATE,
    checkpoint_path,
    checkpoints_dir,
    listed,
    superseded,
    verify_checkpoint,
)
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import own_part

OPTIMIZER = "optimizer.safetensors"
GENERATORS = "generators.safetensors"
SEPARATOR = "/"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Position:
    """The state of a training besides its tensors.

    Attributes:
        step: Optimizer steps taken.
        consumed: Windows of the training split read, over all ranks.
        seed: Seed of the initial weights, the order of windows and what the objective draws.
        world_size: Number of ranks.
        dataset_key: Content key of the dataset.
        mlflow_run_id: The run's MLflow id, or None if it had none yet.
        config: The whole configuration.
        precision: Precision of matrix products.
        global_batch: Windows per step.
        scaler: State of fp16's loss scale; None in other precisions.
    """

    step: int
    consumed: int
    seed: int
    world_size: int
    dataset_key: str
    mlflow_run_id: str | None
    config: dict[str, Any]
    precision: str
    global_batch: int
    scaler: dict[str, Any] | None = None

    def last_step(self, config: Config) -> int:
        """Total optimizer steps: those set in `config`, or those computed from the epochs."""
        return config.training.max_steps or int(self.config["training"]["max_steps"])


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a training at one step, on the CPU; they must not change while in use.

    Attributes:
        config: The model's configuration.
        parameters: Those that are trained, by name, without the output layer if it is tied.
        moments: AdamW's state as `parameter name/exp_avg` and so on.
        generators: Random states as `cpu` and `cuda`, [ranks, bytes] uint8.
    """

    config: ModelConfig
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    generators: dict[str, Tensor]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("infini-llama", "torch", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            # The library also runs from a source checkout.
            found[package] = "not installed"
    return found


def tokens_of(tokenizer: Tokenizer | TokenizerRecord) -> TokenIds:
    """What the folder of a model says about the tokenizer of its dataset."""
    name = tokenizer.spec if tokenizer.spec == "bytes" else None
    return TokenIds(tokenizer.bos_token_id, tokenizer.eos_token_id, name)


def save_checkpoint(
    run_dir: Path,
    snapshot: Snapshot,
    position: Position,
    keep: int,
    tokens: TokenIds = NO_TOKENS,
    adapter: Adapter | None = None,
) -> Path:
    """Write `checkpoints/step-N`, then delete those that `prune_checkpoints` does not keep.

    `tokens` goes into the model's config.json; with LoRA, `adapter` into adapter_config.json.

    Raises `UserError` that names the checkpoint if the disk is full or the folder is not writable;
    an existing checkpoint there is kept.
    """
    target = checkpoint_path(run_dir, position.step)
    with atomic_folder(target) as folder:
        (folder / MODEL).mkdir()
        if adapter is None:
            write_files(folder / MODEL, snapshot.config, snapshot.parameters, tokens)
        else:
            write_adapter(folder / MODEL, adapter, snapshot.config, snapshot.parameters, tokens)
        save_tensors(snapshot.moments, folder / OPTIMIZER)
        save_tensors(snapshot.generators, folder / GENERATORS)
        dump_json(folder / STATE, asdict(position) | {"versions": _versions()})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
        dump_json(folder / MANIFEST, {"sha256": sums})
    prune_checkpoints(run_dir, keep)
    return target


def prune_checkpoints(run_dir: Path, keep: int) -> None:
    """Delete all checkpoints but the `keep` newest and the one with the lowest validation loss."""
    for old in superseded(run_dir, keep):
        _remove(old)


def load_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Restore the state of `optimizer`, made for `model`, from `checkpoint`.

    Call it on all ranks: rank 0 reads, tensor by tensor, and each rank gets what it holds.

    Raises `CheckpointError` if the file is missing, broken, or of another model.
    """
    path = checkpoint / OPTIMIZER
    states: dict[str, dict[str, Tensor]] = {}
    parameters = dict(model.named_parameters())
    for full_name, number in world.json_from_main(partial(_numbers, path)).items():
        name, _, key = full_name.rpartition(SEPARATOR)
        if name not in parameters:
            raise CheckpointError(f"{path}: the model has no parameter {name}")
        if number is None:
            read = partial(_read_tensor, path, full_name)
            value = own_part(read, parameters[name], world)
        else:
            value = torch.tensor(number)
        states.setdefault(name, {})[key] = value
    names = {parameter: name for name, parameter in parameters.items()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    # The optimizer's own loader moves each tensor to its parameter's device.
    state = {i: states[names[p]] for i, p in enumerate(ordered) if names[p] in states}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _numbers(path: Path) -> dict[str, float | None]:
    """The names of the tensors in a file, with the value of each that is a single number."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: None if file.get_slice(name).get_shape() else file.get_tensor(name).item()
                for name in file.keys()  # noqa: SIM118 - safe_open is no mapping
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_tensor(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return cast("Tensor", file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def load_generators(checkpoint: Path, world: World) -> dict[str, Tensor]:
    """The random states of all ranks, read by rank 0; empty for older checkpoints.

    Raises `CheckpointError` if the file is broken.
    """
    path = checkpoint / GENERATORS

    def read() -> bytes:
        return path.read_bytes() if path.exists() else b""

    try:
        content = world.bytes_from_main(read)
        return load(content) if content else {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_position(checkpoint: Path) -> Position:
    """The `Position` of a verified checkpoint."""
    tree = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    known = {name: tree[name] for name in Position.__dataclass_fields__ if name in tree}
    return Position(**known)


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run that passes verification, or None.

    Warns about a damaged one and falls back to the one before it. Changes nothing on disk.
    """
    for _, path in listed(run_dir):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s; falling back to the previous checkpoint", error)
        else:
            return path
    return None


def clear_for_resume(run_dir: Path, checkpoint: Path | None) -> None:
    """Rename checkpoints newer than `checkpoint`, which are damaged; delete temporary files.

    Call it only while no other process writes to the run. A damaged `step-N` becomes
    `damaged-step-N`, which pruning ignores and which can still be inspected.
    """
    folder = checkpoints_dir(run_dir)
    for place in (folder, run_dir, run_dir / "logs", *(run_dir / "debug").glob("*")):
        remove_leftovers(place)
    for _, path in listed(run_dir):
        if path == checkpoint:
            break
        damaged = folder / f"damaged-{path.name}"
        if damaged.exists():
            _remove(damaged)
        os.rename(path, damaged)


def _remove(folder: Path) -> None:
    """Delete a checkpoint; rename it first, so that a kill cannot leave a partial one."""
    shutil.rmtree(retire(folder), ignore_errors=True)
