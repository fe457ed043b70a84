"""This rank's copy of the model: gradients of a global batch, and scores.

DDP and FSDP average gradients over the ranks, but the loss is the sum of all token losses divided
by the total number of targets. So each rank first scales its own sums by ranks / targets.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from infini_model.config import Config
from infini_model.data.loading.windows import Batch
from infini_model.model.inspection.memory_use import MemoryUse
from infini_model.model.kernels.attention import (
    can_be_compiled,
    describe_backend,
    resolve_backend,
)
from infini_model.model.kernels.compile import resolve_compile
from infini_model.model.precision import resolve_precision
from infini_model.objectives.objective import LossModule
from infini_model.objectives.scoring import Scorer
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# DDP need not send the rotary tables with each pass; torch 2.11 has the older name.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_CONSTANT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
}


class Replica:
    """The model with its precision and, with several ranks, its gradient synchronization.

    An unsharded model is wrapped in DDP; under FSDP the module reduces its own gradients.
    """

    def __init__(self, module: LossModule, config: Config, world: World) -> None:
        self._module, self._world = module, world
        self.objective = module.objective
        self.precision = resolve_precision(config.training.precision, world.device)
        self._scorer = Scorer(module, self.precision, world.device)
        # Small gradients underflow in fp16, so the loss is scaled up.
        scaled = self.precision.name == "fp16"
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
        kernel = resolve_backend(
            config.launch.attention_backend,
            world.device,
            self.precision.products or torch.float32,
            config.model.head_dim,
            min(config.model.segment_length, config.packing.context_length),
            causal=not config.model.bidirectional,
        )
        self.attention_backend = describe_backend(kernel)
        self._sharded: FSDPModule | None = None
        if is_sharded(config.launch, world):
            self._sharded = cast("FSDPModule", module)
        self._parallel: DistributedDataParallel | None = None
        if world.size > 1 and self._sharded is None:
            self._parallel = DistributedDataParallel(
                module,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **_CONSTANT_BUFFERS,
            )
            self._rebuild_buckets(config)
        self.compiled = "off"
        # The pass that rebuilds the buckets is of another shape.
        if resolve_compile(config.launch.compile, world.device):
            attention = can_be_compiled(kernel)
            module.model.model.compile_layers(attention=attention)
            self.compiled = "layers" if attention else f"feed-forward only, because of {kernel}"

    def backward(
        self, batches: Sequence[Batch], before_collective: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss over the global batch.

        In fp16 they are multiplied by the loss scale until `unscale`.

        Args:
            batches: This rank's micro-batches.
            before_collective: Called before each operation that may wait for the other ranks,
                except those of FSDP within a forward pass.

        Returns:
            The sum of this rank's token losses, [1] float64, and the divisor over all ranks, []:
            the number of targets, int64, or of answers, float64.
        """
        micro_batches = [self.objective.inputs(batch) for batch in batches]
        counts = torch.stack([inputs.counted.sum() for inputs in micro_batches])
        before_collective()
        targets = self._world.sum(counts.sum())
        scale = (self._world.size / targets.clamp(min=1)).float()
        total = torch.zeros(1, dtype=torch.float64, device=self._world.device)
        for index, inputs in enumerate(micro_batches):
            with self._reducing(last=index + 1 == len(micro_batches)):
                with self.precision.autocast(self._world.device):
                    loss = (self._parallel or self._module)(inputs)
                before_collective()
                self._scaler.scale(loss * scale).backward()
            total += loss.detach()
        return total, targets

    def unscale(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients by fp16's loss scale and update it; returns whether they overflowed.

        After an overflow the gradients hold infinities and the scale is halved. If the scale is
        below 1, the gradients themselves are not finite, and this is not reported as an overflow.
        """
        if not self._scaler.is_enabled():
            return False
        self._scaler.unscale_(optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        return 1.0 <= self._scaler.get_scale() < before

    @property
    def loss_scale(self) -> float | None:
        """The loss scale in fp16; None in other precisions."""
        return self._scaler.get_scale() if self._scaler.is_enabled() else None

    @property
    def scaler_state(self) -> dict[str, Any] | None:
        """State for `load_scaler`, numbers only; None in precisions other than fp16."""
        return self._scaler.state_dict() if self._scaler.is_enabled() else None

    def load_scaler(self, state: dict[str, Any] | None) -> None:
        """Restore the loss scale from a checkpoint, if both runs use fp16."""
        if state is not None and self._scaler.is_enabled():
            self._scaler.load_state_dict(state)

    def close(self) -> None:
        """Release DDP while the process group still exists.

        If DDP held the last reference, it would destroy the group while holding the GIL and
        deadlock with any gloo thread that is about to acquire it.
        """
        self._parallel = None

    def score(self, batch: Batch) -> Tensor:
        """As `Scorer.score`; under FSDP call it on all ranks."""
        by_segment = self._scorer.score(batch)
        self._free_gathered()
        return by_segment

    def score_with_and_without_memory(self, batch: Batch) -> tuple[Tensor, MemoryUse]:
        """Loss sums with memory and without, and target counts, by window; and the memory's use.

        Without: emptied before every segment. Under FSDP call it on all ranks. Returns [3, B]
        float64 on the device. Raises `ConfigError` for a model without memory.
        """
        losses, targets, use = self._scorer.losses_and_use(batch)
        self._free_gathered()
        without, _ = self._scorer.losses(batch, empty_memory=True)
        self._free_gathered()
        return torch.stack([each.sum(1) for each in (losses, without, targets)]), use

    def _free_gathered(self) -> None:
        """Free the parameters gathered in forward, as no backward pass follows to do it."""
        if self._sharded is not None:
            self._sharded.reshard()

    def _reducing(self, *, last: bool) -> AbstractContextManager[object]:
        """Under DDP, reduce gradients over the ranks only with the last micro-batch.

        FSDP reduces those of each: until then a rank holds them whole, 4 bytes per parameter.
        """
        if self._parallel is None or last:
            return contextlib.nullcontext()
        no_sync: AbstractContextManager[object] = self._parallel.no_sync()
        return no_sync

    def _rebuild_buckets(self, config: Config) -> None:
        """Run a backward pass so that DDP rebuilds its buckets now.

        DDP rebuilds them after its first backward pass. With more than two ranks the buckets decide
        the order in which gradients are summed, and the first step of a resumed run must sum in the
        same order as the uninterrupted run.
        """
        width = min(config.packing.context_length, 2 * config.model.segment_length)
        tokens = torch.zeros(1, 1, width + 1, dtype=torch.int64, device=self._world.device)
        self.backward([Batch(tokens, None, None, tokens[:, 0, 0])])
        self._module.zero_grad(set_to_none=True)
