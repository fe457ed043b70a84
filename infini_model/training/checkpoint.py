"""Checkpoints: copied to host memory, written in the background, verified before they are loaded.

`<run>/checkpoints/step-N/` holds `model/` (config.json and safetensors, which `InfiniLlama.
from_pretrained` and, without memory, `transformers` open; with LoRA an adapter that `peft` opens),
`optimizer.safetensors` (the moments by parameter name; several files if large), `state.json`
(`TrainerState`) and `manifest.json` (the SHA-256 of all these files). Frozen tensors are not
stored. Nothing is pickled. Tensors are stored whole, however they were sharded: each rank writes
the rows that it holds.

The training pauses only while each rank copies its rows to host memory; a thread writes the copy to
disk. There is one copy and at most one checkpoint in progress: the next one waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from pydantic import Field
from torch import Tensor, nn

from infini_model.config import ModelConfig
from infini_model.data.loading.loader import Origin
from infini_model.model.hf.adapter import Adapter, write_adapter
from infini_model.model.hf.config import NO_TOKENS, TokenIds
from infini_model.model.hf.weights import SHARD_BYTES, opened, write_files
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import file_name
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.machine import package_versions
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.records import Record, read_record
from infini_model.runtime.runs import MODEL, STATE, prune_checkpoints, step_key
from infini_model.runtime.storage import MANIFEST, atomic_folder, dump_json, sha256
from infini_model.training.distributed import World
from infini_model.training.parallel import own_rows, shard_from_rank0
from infini_model.training.tensor_files import Places, Rows, lay_out, together, write_together

OPTIMIZER = "optimizer{suffix}.safetensors"
SEPARATOR = "/"
ALONE = World(0, 1, torch.device("cpu"))

log = logging.getLogger(__name__)


class TrainerState(Record):
    """The state of a training besides its tensors, in `state.json`.

    Attributes:
        windows_read: Windows of the training split read, over all ranks.
        precision: Precision of matrix products.
        global_batch: Windows per step; None of a branch that begins.
        tokenizer: Fingerprint of the dataset's tokenizer.
        scaler: State of fp16's loss scale; None in other precisions.
        origin: The position in the data at which a branch began.
        versions: Those of Python and of the packages that wrote the checkpoint.
    """

    step: int
    windows_read: int
    seed: int
    world_size: int
    dataset_key: str
    config: dict[str, Any]
    precision: str
    global_batch: int | None
    tokenizer: str = ""
    scaler: dict[str, Any] | None = None
    origin: Origin | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write `state.json` of a checkpoint, with the `versions` of now."""
        versions = package_versions("infini-llama", "torch", "safetensors")
        dump_json(folder / STATE, self.model_dump(mode="json") | {"versions": versions})


def read_state(checkpoint: Path) -> TrainerState:
    """Return the `TrainerState` of a verified checkpoint."""
    return read_record(checkpoint / STATE, TrainerState)


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a training at one step; it must not change while in use.

    Attributes:
        parameters: Those that are trained, by name, without the output layer if it is tied.
        moments: The optimizer's state as `parameter name/exp_avg` and so on.
    """

    config: ModelConfig
    parameters: dict[str, Rows]
    moments: dict[str, Rows]


class HostCopy:
    """Takes snapshots into reusable host buffers, page-locked for CUDA tensors.

    A snapshot is valid until the next one is taken.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._buffers: dict[str, Tensor] = {}

    def preallocation(
        self, model: InfiniLlama, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        """Return what allocates the buffers, so that the first snapshot does not stall on it.

        That may run beside the training; this may not, as a pass replaces what FSDP has gathered.
        """
        own = {
            name: own_rows(tensor, self._world)[0] for name, tensor in _tensors(model, optimizer)
        }

        def allocate() -> None:
            for name, tensor in own.items():
                self._buffer_for(name, tensor).zero_()

        return allocate

    def take(self, model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy the state of a checkpoint. Call it on all ranks: each copies what it saves."""
        copies = {name: self._copy(name, tensor) for name, tensor in _tensors(model, optimizer)}
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return Snapshot(
            model.config,
            parameters={name: copy for name, copy in copies.items() if SEPARATOR not in name},
            moments={name: copy for name, copy in copies.items() if SEPARATOR in name},
        )

    def _copy(self, name: str, tensor: Tensor) -> Rows:
        """Copy to the buffer of `name`; complete once CUDA has been synchronized."""
        own, first = own_rows(tensor.detach(), self._world)
        copy = self._buffer_for(name, own).copy_(own, non_blocking=True)
        return Rows(copy, first, tensor.shape)

    def _buffer_for(self, name: str, own: Tensor) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
        return self._buffers[name]


def _tensors(model: InfiniLlama, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint by name: what is trained, then the moments of each."""
    trained = {file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    yield from trained.items()
    for name, parameter in trained.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}{SEPARATOR}{key}", value


def save_checkpoint(
    run_dir: Path,
    snapshot: Snapshot,
    state: TrainerState,
    keep: int,
    tokens: TokenIds = NO_TOKENS,
    adapter: Adapter | None = None,
    writers: World = ALONE,
) -> Path:
    """Write `checkpoints/step-N`, then delete those that `prune_checkpoints` does not keep.

    `tokens` goes into the model's config.json; with LoRA, `adapter` into adapter_config.json.
    Call it on all `writers`, each of which writes the rows of its snapshot. Only rank 0 needs the
    run folder; the checkpoint is complete when it returns there.

    Raises `UserError` that names the checkpoint if the disk is full or the folder is not writable;
    an existing checkpoint there is kept.
    """
    target = run_dir / step_key(state.step)
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[str, Places]:
            if not writers.is_main:
                return "", {}
            folder = stack.enter_context(atomic_folder(target))
            state.write(folder)
            return str(folder), _lay_out(folder, snapshot, tokens, adapter)

        name, places = together(writers, target, begin)[0]
        rows = snapshot.parameters | snapshot.moments
        sums = write_together(writers, target, Path(name), places, rows)
        if writers.is_main:
            found = [path for path in Path(name).rglob("*") if path.is_file()]
            files = {path.relative_to(name).as_posix() for path in found}
            sums |= {file: sha256(Path(name, file)) for file in files - {*sums}}
            dump_json(Path(name, MANIFEST), {"sha256": sums})
    if writers.is_main:
        prune_checkpoints(run_dir, keep)
    return target


def _lay_out(folder: Path, snapshot: Snapshot, tokens: TokenIds, adapter: Adapter | None) -> Places:
    """Make the files of the tensors, and those that describe the model."""
    rows, places = snapshot.parameters | snapshot.moments, dict[str, list[tuple[str, int]]]()

    def save(path: Path, names: Mapping[str, str]) -> None:
        starts = lay_out(path, {theirs: rows[name].like_whole() for theirs, name in names.items()})
        file = path.relative_to(folder).as_posix()
        places[file] = [(names[theirs], start) for theirs, start in starts.items()]

    (folder / MODEL).mkdir()
    if adapter is None:
        whole = {name: each.like_whole() for name, each in snapshot.parameters.items()}
        write_files(folder / MODEL, snapshot.config, whole, tokens, save)
    else:
        write_adapter(folder / MODEL, adapter, snapshot.config, snapshot.parameters, tokens, save)
    moments = {name: each.like_whole() for name, each in snapshot.moments.items()}
    split = split_torch_state_dict_into_shards(
        moments, filename_pattern=OPTIMIZER, max_shard_size=SHARD_BYTES
    )
    files = split.filename_to_tensors or {OPTIMIZER.format(suffix=""): []}  # before any step
    for file, names in files.items():
        save(folder / file, {name: name for name in names})
    return places


class BackgroundWriter:
    """A thread that runs one job at a time; a job's exception is raised by the next call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` in the thread, after the previous one. Re-raises the previous job's error."""
        self.wait()
        self._job = self._thread.submit(job)

    def check(self) -> None:
        """Re-raise the error of a finished job, without waiting for a running one."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the job, if any. Re-raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the job and stop the thread; an error not yet raised is logged."""
        self._thread.shutdown(wait=True)
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - must not mask the error being raised
            log.warning("%s", error)


class Checkpointer:
    """Saves a training. Call all methods on all ranks.

    Rank 0, which has `record`, writes; if the model is sharded, each rank writes what it holds.
    """

    def __init__(
        self,
        run_dir: Path,
        model: InfiniLlama,
        optimizer: torch.optim.Optimizer,
        world: World,
        record: MetricsFile | None,
        *,
        tokens: TokenIds,
        adapter: Adapter | None,
        keep: int,
        saved_step: int | None,
        is_sharded: bool,
    ) -> None:
        """Keeps the `keep` newest checkpoints; the one of `saved_step` already exists.

        `adapter` is what LoRA trains, if so.
        """
        self._run_dir, self._model, self._optimizer = run_dir, model, optimizer
        self._world, self._record, self._keep = world, record, keep
        self._saved_step = saved_step
        self._copy, self.writer = HostCopy(world), BackgroundWriter()
        writers = world.beside() if is_sharded else ALONE
        self._save = partial(save_checkpoint, tokens=tokens, adapter=adapter, writers=writers)
        self._writes = is_sharded or world.is_main

    def preallocate(self) -> None:
        """Allocate the host buffers in the background, once the optimizer has its moments."""
        self.writer.start(self._copy.preallocation(self._model, self._optimizer))

    def save(self, state: TrainerState) -> float | None:
        """Copy the state and write it in the background. Re-raises the last write's error.

        Returns the seconds that the training was stalled, or None if the step is already saved.
        """
        if self._saved_step == state.step:
            return None
        began = time.perf_counter()
        self.writer.wait()
        snapshot = self._copy.take(self._model, self._optimizer)
        if self._writes:
            self.writer.start(partial(self._write, snapshot, state))
        self._saved_step = state.step
        return time.perf_counter() - began

    def _write(self, snapshot: Snapshot, state: TrainerState) -> None:
        if self._record is not None:
            self._record.sync()
        path = self._save(self._run_dir, snapshot, state, self._keep)
        if self._record is not None:
            log.info("Checkpoint saved: %s", path)

    def save_to(self, folder: Path, state: TrainerState) -> None:
        """Write a checkpoint to `folder`, outside the run's own; all ranks wait for it.

        A full disk is only logged, so that it does not mask the error being handled.
        """
        self.writer.wait()
        snapshot = self._copy.take(self._model, self._optimizer)
        if self._writes:
            try:
                path = self._save(folder, snapshot, state, 1)
                log.error("Checkpoint saved: %s", path)
            except UserError as error:
                log.error("cannot save the checkpoint: %s", error)  # noqa: TRY400
        self._world.barrier()


def load_optimizer(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Restore the state of `optimizer`, made for `model`, from `checkpoint`.

    Call it on all ranks: rank 0 reads, tensor by tensor, and each rank gets what it holds.

    Raises `CheckpointError` if the file is missing, broken, or of another model.
    """
    states: dict[str, dict[str, Tensor]] = {}
    parameters = {file_name(name): each for name, each in model.named_parameters()}
    for full_name, file in world.broadcast(partial(_files, checkpoint)).items():
        path = checkpoint / file
        name, _, key = full_name.rpartition(SEPARATOR)
        if name not in parameters:
            raise CheckpointError(f"{path}: the model has no parameter {name}")
        like = torch.empty(()) if key == "step" else parameters[name]
        read = partial(_read_tensor, path, full_name)
        states.setdefault(name, {})[key] = shard_from_rank0(read, like, world)
    names = {parameter: name for name, parameter in parameters.items()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    # The optimizer's own loader moves each tensor to its parameter's device.
    state = {i: states[names[p]] for i, p in enumerate(ordered) if names[p] in states}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _files(checkpoint: Path) -> dict[str, str]:
    """Return the name of the file of each moment."""
    found = dict[str, str]()
    files = sorted(checkpoint.glob(OPTIMIZER.format(suffix="*")))
    for path in files or [checkpoint / OPTIMIZER.format(suffix="")]:
        with opened(path) as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found


def _read_tensor(path: Path, name: str) -> Tensor:
    with opened(path) as file:
        return cast("Tensor", file.get_tensor(name))
