"""Setup before the first step: check settings, dataset and checkpoint against each other."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from infini_model.config import Config, dump_config
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.objectives.objective import LossModule, Objective
from infini_model.runtime.claims import difference, identities
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.machine import available_memory
from infini_model.runtime.runs import MODEL, weights_fingerprint
from infini_model.runtime.storage import atomic_file
from infini_model.training.checkpoints.checkpoint import (
    Position,
    clear_for_resume,
    newest_checkpoint,
    read_position,
)
from infini_model.training.checkpoints.folders import checkpoint_path
from infini_model.training.initial_weights import ADVICE
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import is_sharded, shard_model
from infini_model.training.sizing.fitting import Machine


def machine_of(world: World) -> Machine:
    """The machine of this rank, all GPUs of which count as large as this rank's."""
    is_cuda = world.device.type == "cuda"
    return Machine(
        device="cuda" if is_cuda else "cpu",
        processes=world.size,
        local=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        is_first=world.is_main,
        gpu_bytes=torch.cuda.mem_get_info(world.device)[1] if is_cuda else 0,
        main_bytes=available_memory(),
    )


def with_steps(config: Config, windows: int, global_batch: int) -> Config:
    """`config` with `training.max_steps` set, computed from `epochs` over `windows` if given."""
    if config.training.epochs is None:
        return config
    steps = math.ceil(config.training.epochs * windows / global_batch)
    return config.updated(training={"max_steps": steps, "epochs": None})


def with_precision(config: Config, start: Start) -> Config:
    """`config` with the precision in which the run began, where `auto` may be another one now."""
    if start.position is None:
        return config
    return config.updated(training={"precision": start.position.precision})


def record_settings(run_dir: Path, config: Config) -> None:
    """Write the run's `config.yaml` if missing, as when training is started by torchrun."""
    path = run_dir / "config.yaml"
    if not path.exists():
        with atomic_file(path) as temporary:
            temporary.write_text(dump_config(config), encoding="utf-8")


@dataclass(frozen=True)
class Start:
    """Where a training starts: at step 0, or from a checkpoint, which rank 0 alone reads."""

    checkpoint: Path | None = None
    position: Position | None = None

    @property
    def model(self) -> Path | None:
        """Folder of the checkpoint's model."""
        return self.checkpoint / MODEL if self.checkpoint else None

    @property
    def step(self) -> int:
        """Steps already taken."""
        return self.position.step if self.position else 0

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint; None without one."""
        return self.position.step if self.position else None

    @property
    def consumed(self) -> int:
        """Windows already read."""
        return self.position.consumed if self.position else 0

    @property
    def global_batch(self) -> int | None:
        """Windows per step, if already fixed."""
        return self.position.global_batch if self.position else None

    @property
    def scaler(self) -> dict[str, Any] | None:
        """State of fp16's loss scale."""
        return self.position.scaler if self.position else None


def find_start(run_dir: Path, dataset_key: str, world: World) -> Start:
    """The newest checkpoint of a run, the same on every rank; only rank 0 needs the run folder.

    Raises `CheckpointError` if it was trained on another dataset.
    """

    def choose() -> dict[str, Any] | None:
        chosen = newest_checkpoint(run_dir)
        clear_for_resume(run_dir, chosen)
        return None if chosen is None else asdict(read_position(chosen))

    found = world.json_from_main(choose)
    if found is None:
        return Start()
    position = Position(**found)
    checkpoint = checkpoint_path(run_dir, position.step)
    if position.dataset_key != dataset_key:
        raise CheckpointError(
            f"{checkpoint}: was trained on dataset {position.dataset_key}, not {dataset_key}; "
            f"{ADVICE}"
        )
    return Start(checkpoint, position)


def check_settings(run_dir: Path, asked: Config, start: Start, world: World) -> None:
    """Raise `ConfigError` on every rank if the run began with other settings than `asked`.

    Rank 0 compares what decides the weights with the run's `config.yaml`. Batch size and
    accumulation may change where they make the same global batch of the processes there are now.
    """

    def compare() -> str | None:
        if not (run_dir / "config.yaml").exists():
            return None
        now, then = identities(run_dir, asked, weights_fingerprint(run_dir))
        batch = asked.training.batch_size * asked.training.gradient_accumulation_steps
        if batch * world.size == start.global_batch:
            for key in ("batch_size", "gradient_accumulation_steps"):
                now["training"][key] = then["training"][key]
        return None if now == then else difference(now, then)

    found = world.json_from_main(compare)
    if found is not None:
        raise ConfigError(f"{run_dir} cannot be resumed with other settings: {found}; {ADVICE}")


def build_module(
    config: Config,
    objective: Objective,
    folder: Path | None,
    world: World,
    adapter: Path | None = None,
) -> LossModule:
    """The model in `folder`, or initialized from the seed, with its loss, on the device.

    With `training.lora`, `folder` holds the weights to freeze; `adapter` holds the trained ones,
    None if they are to be drawn from the seed.

    Rank 0 alone reads or draws weights. With `launch.strategy: fsdp` and several ranks each rank
    gets its shards, and only rank 0 ever holds the whole model; without, `Replica` gives the others
    rank 0's weights. Raises `CheckpointError` as `InfiniLlama.from_pretrained` does.
    """
    sharded, lora = is_sharded(config.launch, world), config.training.lora
    device = torch.device("cpu") if sharded else world.device
    backend = config.launch.attention_backend
    torch.manual_seed(config.run.seed)
    if not world.is_main:
        with torch.device("meta"):
            model = InfiniLlama(config.model, attention_backend=backend, lora=lora)
        if not sharded:
            # DDP copies rank 0's weights to here.
            empty = {n: torch.empty_like(p, device=device) for n, p in model.named_parameters()}
            model.assign(empty)
            model.to(device)
    elif folder is None:
        model = InfiniLlama(config.model, attention_backend=backend).to(device)
    else:
        settings = config.model.model_dump()
        model = InfiniLlama.from_pretrained(
            folder,
            device=device,
            attention_backend=backend,
            lora=lora,
            adapter=adapter,
            **settings,
        )
    if sharded:
        products = resolve_precision(config.training.precision, world.device).products
        module = shard_model(model, objective, world, products)
    else:
        module = LossModule(model, objective)
    module.model.model.gradient_checkpointing = config.launch.gradient_checkpointing
    return module
