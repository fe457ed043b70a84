"""The parts of a training, built from settings, dataset and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from infini_model.config import Config
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.manifest import Manifest, read_manifest
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import record_last_step
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.checkpoints.background import set_generator_states
from infini_model.training.checkpoints.checkpoint import Position, load_generators, load_optimizer
from infini_model.training.checkpoints.saving import Checkpointer
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel.distributed import World
from infini_model.training.replica import Replica
from infini_model.training.setup import (
    Division,
    Start,
    build_module,
    divide,
    find_start,
    record_settings,
    with_steps,
    with_vocabulary,
)


@dataclass(frozen=True)
class Parts:
    """What a training works with. `windows` are by split; `record` exists on rank 0 only."""

    config: Config
    dataset_dir: Path
    run_dir: Path
    manifest: Manifest
    world: World
    start: Start
    division: Division
    windows: Mapping[str, Windows]
    model: InfiniLlama
    optimizer: torch.optim.Optimizer
    replica: Replica
    loader: Loader
    record: MetricsFile | None
    checkpointer: Checkpointer

    @property
    def dataset(self) -> dict[str, str]:
        """Name, key and path of the dataset."""
        path = str(self.dataset_dir.resolve())
        return {"name": self.manifest.name, "key": self.manifest.key, "path": path}

    @property
    def step_tokens(self) -> int:
        """Tokens of a global batch."""
        return self.division.global_batch * self.config.packing.context_length

    def position(self, step: int, consumed: int) -> Position:
        """The position after `step` steps, with `consumed` windows read."""
        return Position(
            step=step,
            consumed=consumed,
            seed=self.config.run.seed,
            world_size=self.world.size,
            dataset_key=self.manifest.key,
            mlflow_run_id=read_mlflow_record(self.run_dir).get("run_id"),
            config=self.config.model_dump(mode="json"),
            precision=self.replica.precision.name,
            global_batch=self.division.global_batch,
            scaler=self.replica.scaler_state,
        )


def build_parts(config: Config, dataset_dir: Path, run_dir: Path, world: World) -> Parts:
    """The parts of a training that starts at step 0 or resumes from the newest checkpoint.

    Raises `UserError` if settings, dataset and run do not match, or a folder is not writable.
    """
    asked, manifest = config, read_manifest(dataset_dir)
    config = with_vocabulary(config, manifest.tokenizer.vocab_size, dataset_dir)
    windows = {
        split: open_windows(dataset_dir, split, config.packing, config.model.segment_length)
        for split in ("train", "validation", "test")
    }
    start = find_start(run_dir, config, manifest.key, world)
    division = divide(config.training, world.size, start.global_batch)
    config = with_steps(config, len(windows["train"]), division.global_batch)
    module, optimizer = _model_and_optimizer(config, start, world)
    replica = Replica(module, config, world)
    replica.load_scaler(start.scaler)
    loader = Loader(
        windows["train"],
        batch_size=division.micro_batch,
        gradient_accumulation_steps=division.accumulation,
        rank=world.rank,
        world_size=world.size,
        seed=config.run.seed,
        consumed=start.consumed,
        device=world.device,
    )
    record: MetricsFile | None = None
    if world.is_main:
        record_settings(run_dir, asked)
        record_last_step(run_dir, config.training.total_steps)
        record = MetricsFile(run_dir, start.saved_step)
    checkpointer = Checkpointer(
        run_dir,
        module.model,
        optimizer,
        world,
        record,
        keep=config.checkpoint.save_total_limit,
        saved_step=start.saved_step,
    )
    return Parts(
        config=config,
        dataset_dir=dataset_dir,
        run_dir=run_dir,
        manifest=manifest,
        world=world,
        start=start,
        division=division,
        windows=windows,
        model=module.model,
        optimizer=optimizer,
        replica=replica,
        loader=loader,
        record=record,
        checkpointer=checkpointer,
    )


def _model_and_optimizer(
    config: Config, start: Start, world: World
) -> tuple[LossModule, torch.optim.Optimizer]:
    """The model with its loss and the optimizer, with the state of the checkpoint if any."""
    module = build_module(config, make_objective(config), start.checkpoint, world)
    optimizer = make_optimizer(module.model, config.training)
    if start.checkpoint is not None:
        load_optimizer(start.checkpoint, module.model, optimizer)
        set_generator_states(load_generators(start.checkpoint), world)
    return module, optimizer
