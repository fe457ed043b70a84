"""This rank's copy of the model, as it takes part in a global batch.

DDP and FSDP average gradients over the ranks; what is wanted is the gradient of the sum of all
token losses over the number of all targets. So each rank scales its own sums by ranks / targets
first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infini_model.config import Config, TrainingConfig
from infini_model.data.loading.loader import IGNORED, Batch
from infini_model.model.kernels.local_attention import describe_backend, resolve_backend
from infini_model.model.llama import InfiniLlama
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Type of the matrix products under autocast; None is float32, without it.
PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def resolve_precision(training: TrainingConfig, device: torch.device) -> str:
    """`training.precision` with auto decided by the device."""
    if training.precision == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return training.precision


class _TokenLoss(nn.Module):
    """The sum of the token losses and nothing besides, so that DDP sees what they depend on."""

    def __init__(self, model: InfiniLlama) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        loss = self.model(
            batch.input_ids, labels=batch.labels, reset=batch.reset, reduction="sum"
        ).loss
        assert isinstance(loss, Tensor)  # noqa: S101 - with labels there always is one
        return loss


class Replica:
    """The model with its precision, its checkpointing and, among several ranks, its gradients.

    A model that is not sharded gets DDP; a sharded one adds up its gradients itself.
    """

    def __init__(self, model: InfiniLlama, config: Config, world: World) -> None:
        self._world = world
        self.precision = resolve_precision(config.training, world.device)
        self._products = PRODUCTS[self.precision]
        # fp16 has no room for small gradients: those of a larger loss are taken.
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        kernel = resolve_backend(
            config.launch.attention_backend,
            world.device,
            self._products or torch.float32,
            config.model.head_dim,
            min(config.model.segment_length, config.packing.context_length),
        )
        self.attention_backend = describe_backend(kernel)
        model.model.gradient_checkpointing = config.launch.gradient_checkpointing
        self._loss = _TokenLoss(model)
        self._sharded: FSDPModule | None = None
        if is_sharded(config.launch, world):
            self._sharded = cast("FSDPModule", model)
        self._parallel: DistributedDataParallel | None = None
        if world.size > 1 and self._sharded is None:
            one_segment = config.packing.context_length == config.model.segment_length
            self._parallel = DistributedDataParallel(
                self._loss,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
                # Within one segment nothing is read from the memory, and its gates stay idle.
                find_unused_parameters=one_segment and config.model.memory != "none",
            )
            self._settle_buckets(config)

    def backward(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Give every parameter its gradient of the mean loss over the global batch.

        In fp16 it is a gradient of that loss times a scale, until `unscale`.

        Args:
            batches: This rank's micro-batches.

        Returns:
            The sum of this rank's token losses, [1] float64, and the number of targets of all
            ranks, [] int64.
        """
        counts = torch.stack([(batch.labels != IGNORED).sum() for batch in batches])
        targets = self._world.sum(counts.sum())
        scale = self._world.size / targets.clamp(min=1)
        total = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for index, batch in enumerate(batches):
            with self._reducing(last=index + 1 == len(batches)):
                with self._autocast():
                    loss = (self._parallel or self._loss)(batch)
                self._scaler.scale(loss * scale).backward()
            total += loss.detach()
        return total, targets

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take fp16's scale out of the gradients and adapt it; whether they had overflowed.

        They hold infinities then, and the next step has half the scale.
        """
        if not self._scaler.is_enabled():
            return False
        self._scaler.unscale_(optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        return self._scaler.get_scale() < before

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in fp16; None in another precision."""
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

    @property
    def scaler_state(self) -> dict[str, Any] | None:
        """What `load_scaler` takes, of numbers alone; None in another precision than fp16."""
        return self._scaler.state_dict() if self._scaler.is_enabled() else None

    def load_scaler(self, state: dict[str, Any] | None) -> None:
        """Go on with the loss scale of a checkpoint, where both have one."""
        if state is not None and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)

    def close(self) -> None:
        """Let go of DDP while the process group is there.

        DDP must not be the last to hold the group: it would end it with Python's lock held, and
        wait for gloo's threads for ever if one of them is about to take that lock.
        """
        self._parallel = None

    def score(self, batch: Batch) -> Tensor:
        """Sum of the token losses and number of targets of `batch`, [2] float64, no gradients."""
        with torch.no_grad(), self._autocast():
            loss: Tensor = self._loss(batch)
        if self._sharded is not None:
            # No backward pass follows that would let go of what forward put together.
            self._sharded.reshard()
        return torch.stack([loss.double(), (batch.labels != IGNORED).sum().double()])

    def _reducing(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients go to the other ranks with the last micro-batch alone, in one sum with it."""
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(last)
        if self._parallel is None or last:
            return contextlib.nullcontext()
        quiet: AbstractContextManager[object] = self._parallel.no_sync()
        return quiet

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._world.device.type, self._products, enabled=self._products is not None
        )

    def _settle_buckets(self, config: Config) -> None:
        """Have DDP rearrange its buckets now: it does so after its first backward pass.

        With more than two ranks the arrangement decides the order in which a gradient is summed.
        A resumed training must sum its first one as the undisturbed training summed it.
        """
        width = min(config.packing.context_length, 2 * config.model.segment_length)
        ids = torch.zeros(1, width, dtype=torch.int64, device=self._world.device)
        self.backward([Batch(ids, ids, None)])
        self._loss.zero_grad(set_to_none=True)
