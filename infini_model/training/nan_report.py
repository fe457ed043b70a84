"""The report of a step that was not finite: its faulty tensors and the documents that it read.

A rank prints which parameters and gradients have a NaN or infinity, and saves these tensors.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from infini_model.model.hf.weights import save_tensors
from infini_model.runtime.errors import DataError, UserError
from infini_model.runtime.storage import atomic_file
from infini_model.training.callbacks import Callback, Step
from infini_model.training.parallel import local_shard
from infini_model.training.setup import TrainingSetup

WIDE, NARROW = "=" * 80, "=" * 40
VALUES_SHOWN = 5
TENSORS_SHOWN = 10
REMEDIES = (
    "Try a lower training.learning_rate, more training.warmup_steps, a smaller "
    "training.max_grad_norm, training.precision=fp32, or the preset stable"
)

log = logging.getLogger(__name__)


def faulty_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The `parameters` and `gradients` with a NaN or infinity, each by name, in model order.

    Under FSDP they are this rank's shards.
    """
    found: dict[str, dict[str, Tensor]] = {"parameters": {}, "gradients": {}}
    for name, parameter in model.named_parameters():
        for kind, whole in (("parameters", parameter.detach()), ("gradients", parameter.grad)):
            if whole is not None and not (own := local_shard(whole)).isfinite().all():
                found[kind][name] = own
    return found


def rows_read(setup: TrainingSetup, step: Step) -> list[str]:
    """The documents that this rank read in a step, as lines: the rows of each shard."""
    loader, rows = setup.loader, defaultdict[str, list[str]](list)
    batches = range(step.first_window, step.windows_read, setup.plan.global_batch)
    try:
        documents = {
            each
            for first in batches
            for each in loader.windows_at(first).documents(loader.numbers(first).reshape(-1))
        }
    except DataError as error:  # of a dataset that is gone by now
        return [str(error)]
    for shard, row in sorted(documents):
        rows[setup.manifest.splits["train"].shards[shard].file].append(str(row))
    return [f"  • train/{file}: rows {', '.join(each)}" for file, each in rows.items()]


def describe(
    step: Step, gpu: int, faulty: Mapping[str, Mapping[str, Tensor]], rows: list[str]
) -> str:
    """The report of a rank, with what `faulty_tensors` and `rows_read` return.

    `gpu` is the physical number of its GPU, or the rank.
    """
    is_loss = not math.isfinite(step.loss)
    what, value = ("LOSS", step.loss) if is_loss else ("GRADIENT", step.grad_norm)
    lines = [WIDE, f"{'NaN' if math.isnan(value) else 'INFINITE'} {what} DETECTED [GPU {gpu}]"]
    lines += [WIDE, f"Step: {step.number}", f"Loss: {step.loss:.4f}"]
    lines += [f"Gradient Norm: {step.grad_norm:.4f}", ""]
    lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW]
    for kind, word in (("parameters", "Param"), ("gradients", "Grad")):
        with_nan = [name for name, each in faulty[kind].items() if each.isnan().any()]
        others = [name for name in faulty[kind] if name not in with_nan]
        for problem, names in (("NaN", with_nan), ("infinity", others)):
            if names:
                lines.append(f"⚠️  {kind.capitalize()} with {problem} ({len(names)} layers):")
                for name in names[:TENSORS_SHOWN]:
                    lines += _describe_tensor(name, faulty[kind][name], word)
                lines += ["", f"Total layers with {problem} {kind}: {len(names)}"]
                lines += [f"Affected layers: {names}", ""]
    if not any(faulty.values()):
        lines += ["None: all values on this process are finite.", ""]
    lines += [NARROW, "DOCUMENTS THAT THIS PROCESS READ:", NARROW, *rows]
    return "\n".join([*lines, NARROW, REMEDIES])


def _describe_tensor(name: str, tensor: Tensor, word: str) -> list[str]:
    flat = tensor.flatten()
    place = (~flat.isfinite()).byte().argmax()
    first = [int(index) for index in torch.unravel_index(place, tensor.shape)]
    values = ", ".join(f"{value:g}" for value in flat[place : place + VALUES_SHOWN].tolist())
    return [
        f"  • {name} (shape: {list(tensor.shape)})",
        f"    {word} values from {first} on: [{values}, ...]",
        f"    NaN count: {int(tensor.isnan().sum())}/{tensor.numel()}",
        f"    Infinity count: {int(tensor.isinf().sum())}/{tensor.numel()}",
    ]


class NonFiniteReports(Callback):
    """Prints a report of a non-finite step; saves its faulty tensors, and the state before it."""

    def __init__(self, setup: TrainingSetup, expect_long_work: Callable[[], None]) -> None:
        self._setup, self._expect_long_work = setup, expect_long_work

    def on_non_finite(self, step: Step) -> None:
        """Save the tensors of this rank, and print the report if this rank is the one to.

        That is each whose own loss is not finite; if only gradients are not, it is rank 0.
        """
        self._expect_long_work()
        setup, world = self._setup, self._setup.world
        folder = setup.run_dir / "debug" / f"step-{step.number}"
        gpu = world.rank if world.gpu is None else world.gpu
        faulty = faulty_tensors(setup.model)
        own = not math.isfinite(step.rank_loss)
        if own if not math.isfinite(step.loss) else world.is_main:
            log.error("%s", describe(step, gpu, faulty, rows_read(setup, step)))
        file = folder / f"rank-{world.rank}.safetensors"
        tensors = {
            f"{kind}/{name}": tensor.cpu().contiguous()
            for kind, members in faulty.items()
            for name, tensor in members.items()
        }
        try:
            with atomic_file(file) as temporary:
                save_tensors(tensors, temporary)
            log.error("Debug tensors saved: %s", file)
        except UserError as error:
            # The non-finite step is the error to report, not the full disk.
            log.error("cannot save the tensors: %s", error)  # noqa: TRY400
        setup.checkpointer.save_to(folder, setup.state(step.number - 1, step.first_window))
