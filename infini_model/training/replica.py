"""This rank's copy of the model, as it takes part in a global batch.

DDP averages gradients over the ranks; what is wanted is the gradient of the sum of all token losses
over the number of all targets. So each rank scales its own sums by ranks / targets first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infini_model.config import Config
from infini_model.data.loader import IGNORED, Batch
from infini_model.llama import InfiniLlama
from infini_model.local_attention import describe_backend, resolve_backend
from infini_model.training.distributed import World


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
    """The model with its precision, its checkpointing and, among several ranks, its DDP."""

    def __init__(self, model: InfiniLlama, config: Config, world: World) -> None:
        self._world = world
        bf16 = config.training.precision == "bf16"
        if config.training.precision == "auto":
            bf16 = world.device.type == "cuda"
        self.precision = "bf16" if bf16 else "fp32"
        kernel = resolve_backend(
            config.model.attention_backend,
            world.device,
            torch.bfloat16 if bf16 else torch.float32,
            config.model.head_dim,
            min(config.model.segment_length, config.packing.context_length),
        )
        self.attention_backend = describe_backend(kernel)
        model.model.gradient_checkpointing = config.training.gradient_checkpointing
        self._loss = _TokenLoss(model)
        self._parallel: DistributedDataParallel | None = None
        if world.size > 1:
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
            with self._quiet() if index + 1 < len(batches) else contextlib.nullcontext():
                with self._autocast():
                    loss = (self._parallel or self._loss)(batch)
                (loss * scale).backward()
            total += loss.detach()
        return total, targets

    def score(self, batch: Batch) -> Tensor:
        """Sum of the token losses and number of targets of `batch`, [2] float64, no gradients."""
        with torch.no_grad(), self._autocast():
            loss: Tensor = self._loss(batch)
        return torch.stack([loss.double(), (batch.labels != IGNORED).sum().double()])

    def _quiet(self) -> AbstractContextManager[object]:
        """No all-reduce: the gradients of this micro-batch are added to those of the next."""
        if self._parallel is None:
            return contextlib.nullcontext()
        quiet: AbstractContextManager[object] = self._parallel.no_sync()
        return quiet

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._world.device.type, torch.bfloat16, enabled=self.precision == "bf16"
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
