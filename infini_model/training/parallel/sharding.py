"""FSDP2: each rank holds a shard of every parameter, gradient and moment.

A layer is gathered from all ranks just before it computes and freed right after (Zhao et al.,
arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`). Only rank 0 ever holds the whole model, in
host memory; the other ranks start from shapes and receive their shards tensor by tensor.

FSDP2 is imported where it is used: the import takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from infini_model.config import LaunchConfig
from infini_model.model.llama import InfiniLlama
from infini_model.objectives.objective import LossModule, Objective
from infini_model.training.parallel.distributed import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(launch: LaunchConfig, world: World) -> bool:
    """Whether the model is sharded; a single rank holds all of it."""
    return launch.strategy == "fsdp" and world.size > 1


def shard_model(
    model: InfiniLlama, objective: Objective, world: World, products: torch.dtype | None
) -> LossModule:
    """A copy of `model`, with its loss, sharded over all ranks; call it on all of them.

    Args:
        model: On rank 0 with weights, on the CPU; on the other ranks on `meta`.
        objective: Computes the loss.
        world: The ranks.
        products: Dtype of the matrix products under autocast, None without autocast. The feed-
            forward matrices, two thirds of a layer, are gathered in that dtype, to which autocast
            would cast them anyway. All others are also used in float32 and gathered as they are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        sharded = InfiniLlama(
            model.config, attention_backend=model.attention_backend, lora=model.lora
        )
    module = LossModule(sharded, objective)
    mesh = init_device_mesh(world.device.type, (world.size,))
    narrow, exact = (
        MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for dtype in (products, None)
    )
    for layer in sharded.model.layers:
        fully_shard(layer.get_submodule("mlp"), mesh=mesh, mp_policy=narrow)
        fully_shard(layer, mesh=mesh, mp_policy=exact)
    fully_shard(module, mesh=mesh, mp_policy=exact)
    weights = dict(model.named_parameters())
    sharded.assign(
        {
            name: nn.Parameter(own_part(weights[name].detach, parameter, world))
            for name, parameter in sharded.named_parameters()
        }
    )
    return module


def own_part(read: Callable[[], Tensor], like: Tensor, world: World) -> Tensor:
    """What this rank holds of a tensor: a shard if `like` is sharded, else all of it.

    `read` returns the whole tensor, of the shape and dtype of `like`. It is called on rank 0 alone,
    which sends the other ranks their parts.
    """
    if not _is_dtensor(like):
        return world.tensor_from_main(read, like)
    from torch.distributed.tensor import distribute_tensor

    like = cast("DTensor", like)
    mesh = like.device_mesh
    if mesh.get_rank() == 0:
        tensor = read().to(mesh.device_type)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    return distribute_tensor(tensor, mesh, like.placements)


def gathered(tensor: Tensor) -> Tensor:
    """`tensor`, gathered from its shards if it is sharded; then call it on all ranks."""
    if not _is_dtensor(tensor):
        return tensor
    return cast("DTensor", tensor).full_tensor()


def own_shard(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    return cast("DTensor", tensor).to_local() if _is_dtensor(tensor) else tensor


def _is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "full_tensor")
