"""The model on several ranks: copied by DDP, or sharded by FSDP2.

Both average gradients over the ranks, but the loss is the sum of all token losses divided by the
number of targets of all ranks. So the training scales each rank's sum by ranks / targets.

Under FSDP each rank holds a shard of every parameter, gradient and moment. A layer is gathered from
all ranks just before it computes and freed right after (Zhao et al., arXiv 2304.11277;
`torch.distributed.fsdp.fully_shard`). With hsdp, the ranks of each machine hold all shards among
them, and only gradients pass between machines. Rank 0 alone holds the whole model at the start; the
other ranks start from shapes and receive their shards tensor by tensor. FSDP2 is imported where it
is used: the import takes most of a second.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infini_model.config import Config, LaunchConfig
from infini_model.data.loading.windows import Batch
from infini_model.model.kernels.attention import describe_backend, resolve_backend
from infini_model.model.kernels.compile import resolve_compile
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import MEMORY_PARAMETERS
from infini_model.model.precision import resolve_precision
from infini_model.objectives.objective import Inputs, LossModule, Objective
from infini_model.objectives.scoring import Scorer
from infini_model.runtime.errors import ConfigError
from infini_model.training.distributed import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# DDP need not send the rotary tables with each pass; torch 2.11 has the older name.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_CONSTANT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
}


class TrainModule:
    """The model with its loss on this rank, in the precision of the training.

    `attention_backend` is the kernel of the local attention and `compiled` what of the layers is
    compiled, both in words. The parameters of the model are shards under FSDP.
    """

    def __init__(
        self, module: LossModule, config: Config, world: World, byte_lengths: np.ndarray
    ) -> None:
        """`byte_lengths` is as for `Scorer`."""
        self._module, self._world = module, world
        self.model, self.objective = module.model, module.objective
        self.precision = resolve_precision(config.training.precision, world.device)
        self._scorer = Scorer(module, self.precision, world.device, byte_lengths)
        kernel = resolve_backend(
            config.launch.attention_backend,
            world.device,
            self.precision.matmul_dtype or torch.float32,
            config.model.head_dim,
        )
        self.attention_backend = describe_backend(kernel)
        self._sharded = is_sharded(config.launch, world)
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1 and not self._sharded:
            self._ddp = DistributedDataParallel(
                module,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_CONSTANT_BUFFERS,
            )
            self._rebuild_buckets(config)
        self.compiled = "off"
        # After the buckets, as the pass that rebuilds them is of another shape.
        if resolve_compile(config.launch.compile, world.device):
            # `torch.compile` does not read the kernels of flash-attn.
            attention = kernel == "sdpa"
            self.model.model.compile_layers(attention=attention)
            self.compiled = "layers" if attention else f"feed-forward only, because of {kernel}"

    def __call__(self, inputs: Inputs) -> Tensor:
        """The sum of the token losses, []; under autocast in the precision of the training."""
        with self.precision.autocast(self._world.device):
            loss: Tensor = (self._ddp or self._module)(inputs)
        return loss

    def sync(self, *, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward: DDP sums gradients with the `last` micro-batch only.

        FSDP sums those of each: until then a rank would hold them whole, 4 bytes per parameter.
        """
        if self._ddp is None or last:
            return contextlib.nullcontext()
        no_sync: AbstractContextManager[object] = self._ddp.no_sync()
        return no_sync

    def score(self, batch: Batch) -> Tensor:
        """As `Scorer.score`; under FSDP call it on all ranks."""
        by_segment = self._scorer.score(batch)
        self._free_gathered()
        return by_segment

    def score_with_and_without_memory(self, batch: Batch) -> Tensor:
        """Loss sums with memory and with it knocked out, and target counts: [3, B] float64.

        Under FSDP call it on all ranks.
        """
        losses, targets = self._scorer.losses(batch)
        self._free_gathered()
        without, _ = self._scorer.losses(batch, "memory")
        self._free_gathered()
        return torch.stack([each.sum(1) for each in (losses, without, targets)])

    def close(self) -> None:
        """Release DDP while the process group still exists.

        If DDP held the last reference, it would destroy the group while holding the GIL and
        deadlock with any gloo thread that is about to acquire it.
        """
        self._ddp = None

    def _free_gathered(self) -> None:
        """Free the parameters gathered in forward, as no backward pass follows to do it."""
        if self._sharded:
            cast("FSDPModule", self._module).reshard()

    def _rebuild_buckets(self, config: Config) -> None:
        """Run a backward pass so that DDP rebuilds its buckets now.

        DDP rebuilds them after its first backward pass. With more than two ranks the buckets decide
        the order in which gradients are summed, and the first step of a resumed run must sum in the
        same order as the uninterrupted run.
        """
        width = min(config.packing.context_length, 2 * config.model.segment_length)
        tokens = torch.zeros(1, 1, width + 1, dtype=torch.int64, device=self._world.device)
        loss = self(self.objective.inputs(Batch(tokens, None, None, tokens[:, 0, 0])))
        loss.backward()  # type: ignore[no-untyped-call]
        self._module.zero_grad(set_to_none=True)


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

    Rank 0 alone reads or draws weights. With `launch.strategy: fsdp` or hsdp and several ranks each
    gets its shards; with ddp, DDP gives the others rank 0's weights. Raises `CheckpointError` as
    `InfiniLlama.from_pretrained` does.
    """
    sharded, lora = is_sharded(config.launch, world), config.training.lora
    backend = config.launch.attention_backend
    torch.manual_seed(config.run.seed)
    precision = resolve_precision(config.training.precision, world.device)
    if not world.is_main:
        with torch.device("meta"):
            model = InfiniLlama(config.model, attention_backend=backend, lora=lora)
        if not sharded:
            named = model.named_parameters()
            model.assign({n: torch.empty_like(p, device=world.device) for n, p in named})
    elif folder is None:
        model = InfiniLlama(config.model, attention_backend=backend)
    else:
        model = InfiniLlama.from_pretrained(
            folder,
            attention_backend=backend,
            lora=lora,
            adapter=adapter,
            **config.model.model_dump(),
        )
    if sharded:
        strategy, dtype = config.launch.strategy, precision.matmul_dtype
        module = shard_model(model, objective, world, strategy, dtype)
    else:
        module = LossModule(model.to(world.device), objective)
    layers = config.model.num_hidden_layers
    module.model.model.recomputed_layers = config.launch.may_recompute(layers)[0]
    return module


def is_sharded(launch: LaunchConfig, world: World) -> bool:
    """Whether the model is sharded; a single rank holds all of it."""
    return launch.strategy != "ddp" and world.size > 1


def shard_model(
    model: InfiniLlama,
    objective: Objective,
    world: World,
    strategy: str = "fsdp",
    dtype: torch.dtype | None = None,
) -> LossModule:
    """A copy of `model`, with its loss, sharded over all ranks, or with hsdp over each machine's.

    Call it on all ranks. `model` has weights on rank 0, on the CPU; it is on `meta` elsewhere. The
    matrices of a layer are gathered in `dtype`, to which autocast would cast them: half the bytes
    for the same bits. Everything else is gathered in float32, once a pass.

    Raises `ConfigError` if with hsdp not every machine has as many ranks as the others.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        sharded = InfiniLlama(
            model.config, attention_backend=model.attention_backend, lora=model.lora
        )
    module = LossModule(sharded, objective)
    mesh = _mesh(world, strategy)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    matrices = {
        parameter
        for name, parameter in sharded.model.layers.named_parameters()
        if parameter.ndim > 1 and not name.endswith(MEMORY_PARAMETERS)
    }
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=matrices)
    policy = replace(policy, param_dtype=dtype)
    for layer in sharded.model.layers:
        others = {*layer.parameters()} - matrices
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=others)
    weights = dict(model.named_parameters())
    sharded.assign(
        {
            name: nn.Parameter(shard_from_rank0(weights[name].detach, parameter, world))
            for name, parameter in sharded.named_parameters()
        }
    )
    return module


def _mesh(world: World, strategy: str) -> DeviceMesh:
    """All ranks in a line; with hsdp and several machines, those of a machine in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    device, local = world.device.type, world.local_size
    if strategy == "fsdp" or local == world.size:
        return init_device_mesh(device, (world.size,))
    counts = world.all_gather(torch.tensor([local], device=world.device)).flatten().tolist()
    if {*counts} != {local}:
        raise ConfigError(
            "launch.strategy: hsdp needs the same number of processes on every machine, not "
            f"{min(counts)} and {max(counts)}; set fsdp"
        )
    shape = world.size // local, local
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def shard_from_rank0(read: Callable[[], Tensor], like: Tensor, world: World) -> Tensor:
    """What this rank holds of a tensor: a shard if `like` is sharded, else all of it.

    `read` returns the whole tensor, of the shape and dtype of `like`. It is called on rank 0 alone,
    which sends the other ranks their parts.
    """
    if not _is_dtensor(like):
        return world.broadcast_tensor(read, like)
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    if world.is_main:
        tensor = read().to(mesh.device_type)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    return distribute_tensor(tensor, mesh, like.placements)


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a tensor that all ranks have: all, unless `like` is sharded."""
    if not _is_dtensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return shard.to_local()


def own_rows(tensor: Tensor, world: World) -> tuple[Tensor, int]:
    """Return the rows that this rank saves of a tensor, and which the first of them is.

    They are those of its shard, or all on rank 0; none if another rank has the same.
    """
    if not _is_dtensor(tensor):
        return (tensor if world.is_main else tensor.new_empty(0)), 0
    own, mesh, rows = tensor.to_local(), tensor.device_mesh, tensor.shape[0]
    *replica, shard = mesh.get_coordinate() or ()
    # As torch.chunk divides them.
    first = min(rows, shard * -(-rows // mesh.size(mesh.ndim - 1)))
    return (own[:0] if any(replica) else own), first


def full_tensor(tensor: Tensor) -> Tensor:
    """`tensor`, gathered from its shards if it is sharded; then call it on all ranks."""
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "full_tensor")
