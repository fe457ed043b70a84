"""FSDP2: each rank holds a part of every parameter, gradient and moment.

A layer is put together from all ranks just before it computes and is let go right after (Zhao et
al., arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`). Only rank 0 ever has the whole model,
in host memory; the others begin with shapes and get their parts tensor by tensor.

FSDP2 is imported where it is used: that takes most of a second.
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
    """Whether the model is shared out among ranks: one alone has nobody to share it with."""
    return launch.strategy == "fsdp" and world.size > 1


def shard_model(
    model: InfiniLlama, objective: Objective, world: World, products: torch.dtype | None
) -> LossModule:
    """A copy of `model`, with its loss, spread over all ranks; call it on all of them.

    Args:
        model: On rank 0 the weights, on the CPU; on the others its shapes, on `meta`.
        objective: Computes the loss.
        world: The ranks.
        products: Type of the matrix products under autocast, None if it is not used. The feed-
            forward's matrices, two thirds of a layer, travel in that type; autocast would turn
            them into it anyway. The others are used beside float32, and travel as they are.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device("meta"):
        sharded = InfiniLlama(model.config, attention_backend=model.attention_backend)
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
    parts = {
        name: nn.Parameter(own_part(weights[name].detach, parameter))
        for name, parameter in sharded.named_parameters()
    }
    if model.config.tie_word_embeddings:
        parts["lm_head.weight"] = parts["model.embed_tokens.weight"]
    sharded.load_state_dict(parts, assign=True)
    if model.config.tie_word_embeddings:  # loading has made two parameters of it
        sharded.lm_head.weight = sharded.model.embed_tokens.weight
    return module


def own_part(read: Callable[[], Tensor], like: Tensor) -> Tensor:
    """What this rank keeps of a tensor of which it holds the same part as of `like`.

    `read` gives the whole tensor, of the shape and dtype of `like`: on every rank if `like` is not
    sharded, else on rank 0 alone, which sends the others their parts.
    """
    if not _has_parts(like):
        return read()
    from torch.distributed.tensor import distribute_tensor

    like = cast("DTensor", like)
    mesh = like.device_mesh
    if mesh.get_rank() == 0:
        tensor = read().to(mesh.device_type)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=mesh.device_type)
    return distribute_tensor(tensor, mesh, like.placements)


def whole(tensor: Tensor) -> Tensor:
    """`tensor` put together from its parts, if it has any; then call it on all ranks."""
    if not _has_parts(tensor):
        return tensor
    return cast("DTensor", tensor).full_tensor()


def _has_parts(tensor: Tensor) -> bool:
    """Whether it is a `DTensor`."""
    return hasattr(tensor, "full_tensor")
