"""What to look at when the loss or a gradient is no longer finite.

The report names every parameter and gradient with a NaN or an infinity in it; it is printed, and
saved with those tensors and the batch, as safetensors and JSON that open without running code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infini_model.data.loader import Batch
from infini_model.storage import atomic_folder

WIDE, NARROW = "=" * 80, "=" * 40
VALUES_SHOWN = 5
REMEDIES = (
    "What helps: a lower training.learning_rate, a longer training.warmup_steps, a smaller "
    "training.max_grad_norm, training.precision=fp32, or --preset stable"
)


@dataclass(frozen=True)
class Fault:
    """A tensor with values that are not finite; `kind` is `Parameters` or `Gradients`."""

    kind: str
    name: str
    shape: list[int]
    size: int
    nan: int
    infinite: int
    values: list[str]


@dataclass(frozen=True)
class NonFinite:
    """The step that went wrong, as one rank saw it.

    Attributes:
        step: The step that was not taken.
        rank: Number of this process.
        loss: Mean loss over the global batch.
        rank_loss: Sum of the losses of this rank's own share of it.
        grad_norm: Norm of all gradients before clipping.
    """

    step: int
    rank: int
    loss: float
    rank_loss: float
    grad_norm: float


def _fault(kind: str, name: str, tensor: Tensor | None) -> Fault | None:
    if tensor is None or bool(torch.isfinite(tensor).all()):
        return None
    return Fault(
        kind=kind,
        name=name,
        shape=list(tensor.shape),
        size=tensor.numel(),
        nan=int(tensor.isnan().sum()),
        infinite=int(tensor.isinf().sum()),
        values=[f"{value:g}" for value in tensor.flatten()[:VALUES_SHOWN].tolist()],
    )


def find_faults(model: nn.Module) -> list[Fault]:
    """Every parameter, then every gradient, that holds a NaN or an infinity, in model order."""
    tensors: list[tuple[str, str, Tensor | None]] = [
        ("Parameters", name, p) for name, p in model.named_parameters()
    ]
    tensors += [("Gradients", name, p.grad) for name, p in model.named_parameters()]
    return [fault for entry in tensors if (fault := _fault(*entry))]


def describe(event: NonFinite, faults: Sequence[Fault]) -> str:
    """The report as text."""
    what = "GRADIENT" if event.loss == event.loss and abs(event.loss) != float("inf") else "LOSS"
    lines = [WIDE, f"NON-FINITE {what} [GPU {event.rank}]", WIDE]
    lines += [f"Step: {event.step}", f"Loss: {event.loss:.4f}"]
    lines += [f"Gradient Norm: {event.grad_norm:.4f}", "", NARROW, "TENSORS AT FAULT:", NARROW]
    for kind in ("Parameters", "Gradients"):
        members = [fault for fault in faults if fault.kind == kind]
        lines.append(f"{kind} with NaN or infinity ({len(members)}):")
        for fault in members:
            lines.append(f"  • {fault.name} (shape: {fault.shape})")
            lines.append(f"    Values: [{', '.join(fault.values)}, ...]")
            lines.append(f"    NaN count: {fault.nan}/{fault.size}")
            lines.append(f"    Infinity count: {fault.infinite}/{fault.size}")
    return "\n".join([*lines, NARROW, REMEDIES])


def save_report(
    run_dir: Path, event: NonFinite, model: nn.Module, batches: Sequence[Batch]
) -> tuple[Path, str]:
    """Write `<run>/debug/step-N-gpu-R/` and return it with the report's text.

    It holds `report.txt`, `report.json`, and `tensors.safetensors`: the tensors at fault as
    `parameters/NAME` and `gradients/NAME`, and the rank's micro-batches as `batch/I/input_ids` and
    `batch/I/labels`.

    Raises `UserError` if the folder cannot be written.
    """
    faults = find_faults(model)
    text = describe(event, faults)
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for fault in faults:
        parameter = parameters[fault.name]
        value = parameter if fault.kind == "Parameters" else parameter.grad
        if value is not None:
            tensors[f"{fault.kind.lower()}/{fault.name}"] = value.detach().cpu().contiguous()
    for index, batch in enumerate(batches):
        tensors[f"batch/{index}/input_ids"] = batch.input_ids.cpu().contiguous()
        tensors[f"batch/{index}/labels"] = batch.labels.cpu().contiguous()
    target = run_dir / "debug" / f"step-{event.step}-gpu-{event.rank}"
    with atomic_folder(target) as folder:
        (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
        tree = {
            # As text: JSON has no NaN.
            "event": {name: str(value) for name, value in asdict(event).items()},
            "faults": [asdict(fault) for fault in faults],
        }
        (folder / "report.json").write_text(json.dumps(tree, indent=2), encoding="utf-8")
        save_file(tensors, folder / "tensors.safetensors")
    return target, text
