"""What is settled before the first step: that settings, dataset and checkpoint belong together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from infini_model.config import Config, TrainingConfig, dump_config
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.storage import atomic_file
from infini_model.training.checkpoints.checkpoint import (
    MODEL,
    Position,
    checkpoint_path,
    clear_for_resume,
    newest_checkpoint,
)
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import is_sharded, shard_model
from infini_model.training.replica import PRODUCTS, resolve_precision


@dataclass(frozen=True)
class Division:
    """How the windows of a global batch are shared out.

    Attributes:
        processes: Ranks, each of which reads an equal share.
        accumulation: Micro-batches that a rank reads in turn.
        micro_batch: Windows in one of them.
    """

    processes: int
    accumulation: int
    micro_batch: int

    @property
    def global_batch(self) -> int:
        """Windows of all ranks in one step."""
        return self.processes * self.accumulation * self.micro_batch


def divide(training: TrainingConfig, processes: int, global_batch: int | None) -> Division:
    """The division of a run's global batch among so many processes.

    A run's first start fixes `global_batch`; None is that start. Later the settings say only how
    many windows a process may read at once: `batch_size` at most.

    Raises `ConfigError` where the processes cannot have equal shares.
    """
    if global_batch is None:
        global_batch = processes * training.gradient_accumulation_steps * training.batch_size
    share, rest = divmod(global_batch, processes)
    if rest or share == 0:
        raise ConfigError(
            f"launch.processes: {processes} processes cannot share the {global_batch} windows of "
            f"this run's steps equally; take a number that divides {global_batch}"
        )
    largest = min(share, training.batch_size)
    micro_batch = next(size for size in range(largest, 0, -1) if share % size == 0)
    return Division(processes, share // micro_batch, micro_batch)


def with_vocabulary(config: Config, dataset_vocabulary: int, dataset_dir: Path) -> Config:
    """`config` with a number for `model.vocab_size`: the dataset's where it is None.

    Raises `ConfigError` where the dataset may hold ids that the model has no row for.
    """
    size = config.model.vocab_size
    if size is not None and size < dataset_vocabulary:
        raise ConfigError(
            f"model.vocab_size: {size} is less than the vocabulary of the dataset {dataset_dir}, "
            f"{dataset_vocabulary}"
        )
    model = config.model.model_copy(update={"vocab_size": size or dataset_vocabulary})
    return config.model_copy(update={"model": model})


def with_steps(config: Config, windows: int, global_batch: int) -> Config:
    """`config` with a number for `training.max_steps`: what `epochs` over `windows` take."""
    if config.training.epochs is None:
        return config
    steps = math.ceil(config.training.epochs * windows / global_batch)
    training = config.training.model_copy(update={"max_steps": steps, "epochs": None})
    return config.model_copy(update={"training": training})


def record_settings(run_dir: Path, config: Config) -> None:
    """Write the run's `config.yaml` where nobody has: where training was started by torchrun."""
    path = run_dir / "config.yaml"
    if not path.exists():
        with atomic_file(path) as temporary:
            temporary.write_text(dump_config(config), encoding="utf-8")


def choose_checkpoint(run_dir: Path, world: World) -> Path | None:
    """The checkpoint to go on from, the same on every rank, or None; rank 0 reads and tidies.

    Raises `CheckpointError` where this machine does not see the checkpoint that rank 0 chose.
    """
    chosen = None
    if world.is_main:
        chosen = newest_checkpoint(run_dir)
        clear_for_resume(run_dir, chosen)
    step = world.from_main(-1 if chosen is None else int(chosen.name.removeprefix("step-")))
    if step < 0:
        return None
    path = checkpoint_path(run_dir, step)
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not there; all machines must share the run folder")
    return path


def place_model(config: Config, checkpoint: Path | None, world: World) -> InfiniLlama:
    """The model of `checkpoint`, or one drawn from the seed, on the device of this rank.

    With `launch.strategy: fsdp` each of several ranks gets its part of it, and rank 0 alone ever
    has the whole. Raises `CheckpointError` as `InfiniLlama.from_pretrained` does.
    """
    sharded = is_sharded(config.launch, world)
    device = torch.device("cpu") if sharded else world.device
    backend = config.launch.attention_backend
    torch.manual_seed(config.run.seed)
    if sharded and not world.is_main:
        with torch.device("meta"):
            model = InfiniLlama(config.model, attention_backend=backend)
    elif checkpoint is None:
        model = InfiniLlama(config.model, attention_backend=backend).to(device)
    else:
        settings = config.model.model_dump()
        model = InfiniLlama.from_pretrained(
            checkpoint / MODEL, device=device, attention_backend=backend, **settings
        )
    if not sharded:
        return model
    return shard_model(model, world, PRODUCTS[resolve_precision(config.training, world.device)])


def check_same_run(checkpoint: Path, then: Position, now: Config, dataset_key: str) -> None:
    """Raise `CheckpointError` if `checkpoint` is of another model or another dataset."""
    advice = "choose another run.name or folder"
    for name, value in now.model.model_dump(mode="json").items():
        before = then.config["model"].get(name)
        if before != value:
            raise CheckpointError(f"{checkpoint}: model.{name} is {before}, not {value}; {advice}")
    if then.dataset_key != dataset_key:
        raise CheckpointError(
            f"{checkpoint}: was trained on dataset {then.dataset_key}, not {dataset_key}; {advice}"
        )
