"""The parts of a training, built from settings, dataset and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from infini_model.config import Config, LoraConfig
from infini_model.data.loading.loader import Loader, make_phases
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.manifest import Manifest, read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import check_tokenizer
from infini_model.model.hf import Adapter
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import record_last_step
from infini_model.training.callbacks.mlflow_record import read_mlflow_record
from infini_model.training.checkpoints.background import set_generator_states
from infini_model.training.checkpoints.checkpoint import Position, load_generators, load_optimizer
from infini_model.training.checkpoints.saving import Checkpointer
from infini_model.training.initial_weights import InitialWeights, check_frozen, with_initial_weights
from infini_model.training.launch.division import Division, divide
from infini_model.training.launch.recovery import Recovery, read_recovery, recovery_of
from infini_model.training.optimizer import make_optimizer
from infini_model.training.parallel.agreement import check_agreement
from infini_model.training.parallel.distributed import World
from infini_model.training.replica import Replica
from infini_model.training.setup import (
    Start,
    build_module,
    check_settings,
    find_start,
    machine_of,
    record_settings,
    with_precision,
    with_steps,
)
from infini_model.training.sizing.fitting import check_kernels, check_memory
from infini_model.training.sizing.shape import with_objective, with_vocabulary


@dataclass(frozen=True)
class Parts:
    """What a training works with.

    `config` has the shape of the `initial_weights`, if the run began from some, and the
    micro-batches that `recovery` calls for. `windows` are by split. Of the run folder the ranks
    other than 0 know what rank 0 tells them; `record` exists there only.
    """

    config: Config
    dataset_dir: Path
    run_dir: Path
    manifest: Manifest
    world: World
    start: Start
    recovery: Recovery
    initial_weights: InitialWeights | None
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
    check_agreement(config, manifest.key, world)
    start = find_start(run_dir, manifest.key, world)
    check_settings(run_dir, config, start, world)
    config = with_precision(config, start)
    recovery = recovery_of(world.json_from_main(lambda: asdict(read_recovery(run_dir))))
    config = recovery.applied_to(config)
    config, weights = with_initial_weights(config, run_dir, world)
    key = "model.vocab_size" if weights is None else "vocab_size of model.initial_weights"
    config = with_vocabulary(config, manifest.tokenizer.vocab_size, dataset_dir, key)
    if weights is not None and start.checkpoint is None and not asked.model.ignore_tokenizer:
        tokenizer = load_dataset_tokenizer(dataset_dir)
        check_tokenizer(weights.public_name, weights.tokenizer, tokenizer, str(dataset_dir))
    config = with_objective(config)
    windows = {
        split: open_windows(dataset_dir, split, config.packing, config.model.segment_length)
        for split in ("train", "validation", "test")
    }
    division = divide(config.training, world.size, start.global_batch)
    config = with_steps(config, len(windows["train"]), division.global_batch)
    check_kernels(config.model, world.device.type, compiled=config.launch.compile)
    if world.is_main:
        is_pretrained = weights is not None
        check_memory(division.applied_to(config), machine_of(world), is_pretrained=is_pretrained)
    module, optimizer = _model_and_optimizer(config, start, weights, world)
    replica = Replica(module, config, world)
    replica.load_scaler(start.scaler)
    phases = make_phases(
        windows["train"],
        config.packing,
        config.model.segment_length,
        total_steps=config.training.total_steps,
        global_batch=division.global_batch,
    )
    loader = Loader(
        windows["train"],
        phases=phases,
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
        dataset_dir=dataset_dir,
        tokenizer=manifest.tokenizer,
        adapter=_adapter(config.training.lora, weights),
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
        recovery=recovery,
        initial_weights=weights,
        division=division,
        windows=windows,
        model=module.model,
        optimizer=optimizer,
        replica=replica,
        loader=loader,
        record=record,
        checkpointer=checkpointer,
    )


def _adapter(lora: LoraConfig | None, weights: InitialWeights | None) -> Adapter | None:
    """What checkpoints say of the adapters that are trained; None without LoRA."""
    if lora is None or weights is None:
        return None
    return Adapter(lora, weights.public_name, weights.commit)


def _model_and_optimizer(
    config: Config, start: Start, weights: InitialWeights | None, world: World
) -> tuple[LossModule, torch.optim.Optimizer]:
    """The model with its loss and the optimizer, with the state of the checkpoint if any."""
    folder, adapter = start.model, None
    if config.training.lora is not None:
        folder, adapter = None, start.model
    if folder is None and weights is not None and world.is_main:
        folder = weights.folder
        if config.training.lora is not None:
            check_frozen(weights, config)
    module = build_module(config, make_objective(config), folder, world, adapter)
    optimizer = make_optimizer(module.model, config.training)
    if start.checkpoint is not None:
        load_optimizer(start.checkpoint, module.model, optimizer, world)
        set_generator_states(load_generators(start.checkpoint, world), world)
    return module, optimizer
