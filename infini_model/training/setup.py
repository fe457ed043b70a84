"""The parts of a training, built from settings, dataset, run folder and the newest checkpoint."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from infini_model.config import Config, difference, dump_config
from infini_model.data.loading.loader import Loader, Origin, make_phases
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.manifest import Manifest, read_manifest
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import check_tokenizer
from infini_model.model.hf.adapter import Adapter
from infini_model.model.llama import InfiniLlama
from infini_model.objectives import make_objective
from infini_model.objectives.objective import LossModule
from infini_model.runtime.branches import is_of_parent
from infini_model.runtime.claims import identities
from infini_model.runtime.errors import CheckpointError, ConfigError
from infini_model.runtime.machine import available_memory
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import (
    CHECKPOINTS,
    MODEL,
    clear_for_resume,
    newest_checkpoint,
    record_last_step,
    step_key,
    weights_fingerprint,
)
from infini_model.runtime.storage import atomic_file, lock
from infini_model.training.branch import begin_state
from infini_model.training.checkpoint import (
    Checkpointer,
    TrainerState,
    load_optimizer,
    read_state,
)
from infini_model.training.distributed import World, check_agreement
from infini_model.training.export import tokens_of
from infini_model.training.initial_weights import (
    ADVICE,
    InitialWeights,
    check_frozen,
    weights_of_run,
)
from infini_model.training.launch.recovery import BatchPlan, Recovery, read_recovery
from infini_model.training.memory_estimate import Machine, check_memory
from infini_model.training.model_shape import check_kernels, with_objective, with_vocabulary
from infini_model.training.optimizer import LossScaler, make_optimizer
from infini_model.training.parallel import TrainModule, build_module, is_sharded

log = logging.getLogger(__name__)


@contextlib.contextmanager
def only_writer(run_dir: Path, world: World) -> Iterator[None]:
    """Hold the run folder's lock, waiting for any other training in it to end."""
    if not world.is_main:
        yield
        return
    path = run_dir / CHECKPOINTS / ".lock"
    with lock(path, wait=False) as free:
        if free:
            yield
            return
    log.warning("waiting for another process that is training in %s", run_dir)
    with lock(path):
        yield


@dataclass(frozen=True)
class TrainingSetup:
    """What a training works with.

    `config` is resolved, see `resolve`. `start` is the state of the checkpoint from which the
    training resumes; None at step 0. `windows` opens those of a split, once. Of the run folder the
    ranks other than 0 know what rank 0 tells them; `record` exists there only.
    """

    config: Config
    dataset_dir: Path
    run_dir: Path
    manifest: Manifest
    world: World
    start: TrainerState | None
    initial_weights: InitialWeights | None
    plan: BatchPlan
    windows: Callable[[str], Windows]
    train_module: TrainModule
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    loader: Loader
    record: MetricsFile | None
    checkpointer: Checkpointer

    @property
    def model(self) -> InfiniLlama:
        """The model, sharded under FSDP."""
        return self.train_module.model

    @property
    def dataset(self) -> dict[str, str]:
        """Name, key and path of the dataset."""
        path = str(self.dataset_dir.resolve())
        return {"name": self.manifest.name, "key": self.manifest.key, "path": path}

    def windows_by(self, step: int) -> int:
        """Count the windows read when `step` steps are taken."""
        taken, read = (0, 0) if self.start is None else (self.start.step, self.start.windows_read)
        training = self.config.training
        batches = training.batches_by(step) - training.batches_by(taken)
        return read + batches * self.plan.global_batch

    def state(self, step: int, windows_read: int) -> TrainerState:
        """The state after `step` steps, with `windows_read` windows read."""
        return TrainerState(
            step=step,
            windows_read=windows_read,
            seed=self.config.run.seed,
            world_size=self.world.size,
            dataset_key=self.manifest.key,
            config=self.config.model_dump(mode="json"),
            precision=self.train_module.precision.name,
            global_batch=self.plan.global_batch,
            tokenizer=self.manifest.tokenizer.fingerprint,
            origin=None if self.start is None else self.start.origin,
            scaler=self.scaler.state_dict() or None,
        )


def build_setup(config: Config, dataset_dir: Path, run_dir: Path, world: World) -> TrainingSetup:
    """The parts of a training that starts at step 0 or resumes from the newest checkpoint.

    Raises `UserError` if settings, dataset and run do not match, or a folder is not writable.
    """
    asked, manifest = config, read_manifest(dataset_dir)
    check_agreement(config, manifest.key, world)
    start = find_start(run_dir, config, manifest.key, world)
    if start is None and config.training.branch_of is not None:
        raise CheckpointError(
            f"{run_dir / CHECKPOINTS}: no intact checkpoint; training.branch_of needs the one that "
            "infini branch begins with"
        )
    check_settings(run_dir, config, start, world)
    recovery = world.broadcast(lambda: read_recovery(run_dir), Recovery)
    weights = weights_of_run(config, run_dir, world)
    config, windows, plan, start = resolve(
        config, manifest, dataset_dir, start, recovery, weights, world.size
    )
    if weights is not None and start is None and not asked.model.ignore_tokenizer:
        tokenizer = load_dataset_tokenizer(dataset_dir)
        check_tokenizer(weights.public_name, weights.tokenizer, tokenizer, str(dataset_dir))
    check_kernels(config.model, world.device.type, compiled=config.launch.compile)

    if recovery.recomputes_all and config.launch.gradient_checkpointing == "auto":
        config = config.updated(launch={"gradient_checkpointing": True})

    def find_recomputed() -> int:
        is_pretrained = weights is not None
        return check_memory(config, machine_of(world), is_pretrained=is_pretrained).recomputed

    config = config.updated(launch={"gradient_checkpointing": world.broadcast(find_recomputed)})
    checkpoint = None if start is None else run_dir / step_key(start.step)
    module, optimizer = _model_and_optimizer(config, checkpoint, weights, world)
    byte_lengths = load_dataset_tokenizer(dataset_dir).byte_lengths()
    train_module = TrainModule(module, config, world, byte_lengths)
    scaler = LossScaler(world.device, enabled=train_module.precision.name == "fp16")
    if start is not None and start.scaler is not None:
        scaler.load_state_dict(start.scaler)
    loader = Loader(
        windows("train"),
        phases=make_phases(
            windows("train"),
            config.packing,
            config.model.segment_length,
            config.training,
            global_batch=plan.global_batch,
            origin=None if start is None else start.origin,
        ),
        batch_size=plan.micro_batch,
        gradient_accumulation_steps=plan.accumulation,
        rank=world.rank,
        world_size=world.size,
        seed=config.run.seed,
        windows_read=0 if start is None else start.windows_read,
        device=world.device,
    )
    saved_step = None if start is None else start.step
    record: MetricsFile | None = None
    if world.is_main:
        if not (settings := run_dir / "config.yaml").exists():  # as under the user's own torchrun
            with atomic_file(settings) as temporary:
                temporary.write_text(dump_config(asked), encoding="utf-8")
        if asked.training.max_steps is None:
            record_last_step(run_dir, config.training.total_steps)
        record = MetricsFile(run_dir, saved_step)
    lora = config.training.lora
    checkpointer = Checkpointer(
        run_dir,
        module.model,
        optimizer,
        world,
        record,
        tokens=tokens_of(manifest.tokenizer),
        adapter=Adapter(lora, weights.public_name, weights.commit) if lora and weights else None,
        keep=config.checkpoint.save_total_limit,
        saved_step=saved_step,
        is_sharded=is_sharded(config.launch, world),
    )
    return TrainingSetup(
        config=config,
        dataset_dir=dataset_dir,
        run_dir=run_dir,
        manifest=manifest,
        world=world,
        start=start,
        initial_weights=weights,
        plan=plan,
        windows=windows,
        train_module=train_module,
        optimizer=optimizer,
        scaler=scaler,
        loader=loader,
        record=record,
        checkpointer=checkpointer,
    )


def resolve(
    config: Config,
    manifest: Manifest,
    dataset_dir: Path,
    start: TrainerState | None,
    recovery: Recovery,
    weights: InitialWeights | None,
    processes: int,
) -> tuple[Config, Callable[[str], Windows], BatchPlan, TrainerState | None]:
    """The settings with all that a training decides by itself, its windows, batches and start.

    In this order: the precision in which the run began, where `auto` may be another one now; the
    shape of the initial `weights`; the vocabulary of the dataset; what the objective makes of the
    model; the micro-batches, smaller where `recovery` calls for it; and the steps that
    `training.epochs` means. A branch that begins may have another precision and other batches than
    its parent, and keeps its position where the data is the same.

    Raises `UserError` if settings, weights and dataset do not match.
    """
    branches = start is not None and is_of_parent(start.config, config)
    if start is not None and not (branches and config.training.precision != "auto"):
        config = config.updated(training={"precision": start.precision})
    key = "model.vocab_size"
    if weights is not None:
        config, key = weights.shaped(config), "vocab_size of model.initial_weights"
    config = with_vocabulary(config, manifest.tokenizer.vocab_size, dataset_dir, key)
    config = with_objective(config)
    packing, segment_length = config.packing, config.model.segment_length

    @functools.cache  # opened when needed, which takes a pass over all documents of a split
    def windows(split: str) -> Windows:
        return open_windows(dataset_dir, split, packing, segment_length)

    if start is not None and branches:
        start = begin_state(start, config, manifest, windows("train"))
    fixed = None if start is None else start.global_batch
    plan = BatchPlan.of(config.training, processes, fixed, recovery.micro_batch_divisor)
    if config.training.epochs is not None:
        origin, batch = (start and start.origin) or Origin(), plan.global_batch
        left = config.training.epochs * len(windows("train")) - origin.windows_read
        steps = config.training.steps_of(math.ceil(left / batch), origin.step)
        if start is not None and branches and steps <= start.step:
            raise ConfigError(
                f"training.epochs: {config.training.epochs:g} end by step {max(0, steps)}, and the "
                f"branch begins at step {start.step}; set more"
            )
        config = config.updated(training={"max_steps": steps, "epochs": None})
    return plan.applied_to(config), windows, plan, start


def find_start(
    run_dir: Path, config: Config, dataset_key: str, world: World
) -> TrainerState | None:
    """The state of a run's newest checkpoint, the same on every rank; None without one.

    Only rank 0 needs the run folder. Raises `CheckpointError` if the run was trained on another
    dataset, which only the parent of a branch may have been.
    """

    def choose() -> TrainerState | None:
        chosen = newest_checkpoint(run_dir)
        clear_for_resume(run_dir, chosen)
        return None if chosen is None else read_state(chosen)

    state = world.broadcast(choose, TrainerState)
    if state is None or is_of_parent(state.config, config):
        return state
    if state.dataset_key != dataset_key:
        raise CheckpointError(
            f"{run_dir / step_key(state.step)}: was trained on dataset {state.dataset_key}, not "
            f"{dataset_key}; {ADVICE}"
        )
    return state


def check_settings(run_dir: Path, asked: Config, start: TrainerState | None, world: World) -> None:
    """Raise `ConfigError` on every rank if the run began with other settings than `asked`.

    Rank 0 compares what decides the weights with the run's `config.yaml`. Batch size and
    accumulation may change where they make the same global batch of the processes there are now.
    """

    def compare() -> str | None:
        if not (run_dir / "config.yaml").exists():
            return None
        now, then = identities(run_dir, asked, weights_fingerprint(run_dir))
        batch = asked.training.batch_size * asked.training.gradient_accumulation_steps
        if start is not None and batch * world.size == start.global_batch:
            for key in ("batch_size", "gradient_accumulation_steps"):
                now["training"][key] = then["training"][key]
        return None if now == then else difference(now, then)

    found = world.broadcast(compare)
    if found is not None:
        raise ConfigError(f"{run_dir} cannot be resumed with other settings: {found}; {ADVICE}")


def machine_of(world: World) -> Machine:
    """The machine of this rank, all GPUs of which count as large as this rank's."""
    is_cuda = world.device.type == "cuda"
    return Machine(
        device="cuda" if is_cuda else "cpu",
        processes=world.size,
        local=world.local_size,
        is_first=world.is_main,
        gpu_bytes=torch.cuda.mem_get_info(world.device)[1] if is_cuda else 0,
        main_bytes=available_memory(),
    )


def _model_and_optimizer(
    config: Config, checkpoint: Path | None, weights: InitialWeights | None, world: World
) -> tuple[LossModule, torch.optim.Optimizer]:
    """The model with its loss and the optimizer, with the state of the checkpoint if any."""
    saved = None if checkpoint is None else checkpoint / MODEL
    folder, adapter = saved, None
    if config.training.lora is not None:
        folder, adapter = None, saved
    if folder is None and weights is not None and world.is_main:
        folder = weights.folder
        if config.training.lora is not None:
            check_frozen(weights, config)
    module = build_module(config, make_objective(config), folder, world, adapter)
    optimizer = make_optimizer(module.model, config.training, world)
    if checkpoint is not None:
        load_optimizer(checkpoint, module.model, optimizer, world)
    return module, optimizer
