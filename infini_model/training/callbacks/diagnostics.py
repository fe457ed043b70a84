"""Diagnostics for a loss or gradient that is NaN or infinite.

The report names every affected parameter and gradient. It is printed, and saved with those tensors,
the batch and its text as safetensors and JSON, which open without running code.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infini_model.objectives.objective import Inputs
from infini_model.runtime.errors import NonFiniteError, UserError
from infini_model.runtime.storage import atomic_folder
from infini_model.training.callbacks.callback import Callback, Step
from infini_model.training.parallel.distributed import World
from infini_model.training.parallel.sharding import own_shard
from infini_model.training.provenance import Attribution, WindowRead, describe_windows

WIDE, NARROW = "=" * 80, "=" * 40
VALUES_SHOWN = 5
# Per kind; for the rest only the names are printed.
TENSORS_SHOWN = 10
# Limit for the affected tensors; a checkpoint with all parameters is saved beside them.
SAVED_BYTES = 1 << 30
REMEDIES = (
    "Try a lower training.learning_rate, more training.warmup_steps, a smaller "
    "training.max_grad_norm, training.precision=fp32, or the preset stable"
)
KINDS = ("parameters", "gradients")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """A tensor with non-finite values.

    Attributes:
        kind: `parameters` or `gradients`.
        name: The parameter's name.
        shape: Shape of the part that this process holds.
        whole_shape: Shape of the whole tensor; differs if FSDP shards it.
        size: Number of values that this process holds.
        nan: Number of NaN values.
        infinite: Number of infinite values.
        first: Index in `shape` of the first non-finite value.
        values: The values from that index on.
    """

    kind: str
    name: str
    shape: list[int]
    whole_shape: list[int]
    size: int
    nan: int
    infinite: int
    first: list[int]
    values: list[str]


@dataclass(frozen=True)
class NonFiniteStep:
    """A non-finite step, as seen by one rank.

    Attributes:
        step: The step that was not taken.
        rank: Rank of this process.
        gpu: Physical number of its GPU; the rank on a CPU.
        loss: Mean loss over the global batch.
        rank_loss: Sum of the losses of this rank's share of it.
        grad_norm: Norm of all gradients before clipping.
    """

    step: int
    rank: int
    gpu: int
    loss: float
    rank_loss: float
    grad_norm: float

    @property
    def is_loss(self) -> bool:
        """Whether the loss itself is not finite; otherwise only the gradients are not."""
        return not math.isfinite(self.loss)

    @property
    def is_printed(self) -> bool:
        """Whether this rank prints its report: its own loss, or the gradients on rank 0."""
        return not math.isfinite(self.rank_loss) if self.is_loss else self.rank == 0


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Every parameter, then every gradient, in model order: kind, name, tensor."""
    for name, parameter in model.named_parameters():
        yield "parameters", name, parameter.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield "gradients", name, parameter.grad


def _fault(kind: str, name: str, tensor: Tensor) -> Fault | None:
    local = own_shard(tensor)
    finite = torch.isfinite(local)
    if bool(finite.all()):
        return None
    flat = local.flatten()
    first = int((~finite).flatten().nonzero()[0])
    place = torch.unravel_index(torch.tensor(first), local.shape)
    return Fault(
        kind=kind,
        name=name,
        shape=list(local.shape),
        whole_shape=list(tensor.shape),
        size=local.numel(),
        nan=int(local.isnan().sum()),
        infinite=int(local.isinf().sum()),
        first=[int(index) for index in place],
        values=[f"{value:g}" for value in flat[first : first + VALUES_SHOWN].tolist()],
    )


def find_faults(model: nn.Module) -> list[Fault]:
    """Every parameter, then every gradient, with a NaN or infinity, in model order.

    Under FSDP only the part that this process holds is searched.
    """
    return [fault for entry in _tensors(model) if (fault := _fault(*entry))]


def _describe_tensors(faults: Sequence[Fault]) -> list[str]:
    lines = []
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        for what, members in (
            ("NaN", [fault for fault in of_kind if fault.nan]),
            ("infinity", [fault for fault in of_kind if not fault.nan]),
        ):
            if members:
                lines.append(f"⚠️  {kind.capitalize()} with {what} ({len(members)} layers):")
                lines += [line for each in members[:TENSORS_SHOWN] for line in _describe(each)]
                lines += ["", f"Total layers with {what} {kind}: {len(members)}"]
                lines += [f"Affected layers: {[fault.name for fault in members]}", ""]
    return lines or ["None: all values are finite, but the gradient norm is not.", ""]


def _describe(fault: Fault) -> list[str]:
    part = "" if fault.shape == fault.whole_shape else f", a shard of {fault.whole_shape}"
    word = "Param" if fault.kind == "parameters" else "Grad"
    return [
        f"  • {fault.name} (shape: {fault.shape}{part})",
        f"    {word} values from {fault.first} on: [{', '.join(fault.values)}, ...]",
        f"    NaN count: {fault.nan}/{fault.size}",
        f"    Infinity count: {fault.infinite}/{fault.size}",
    ]


def describe(event: NonFiniteStep, faults: Sequence[Fault], reads: Sequence[WindowRead]) -> str:
    """The report as text."""
    value = event.loss if event.is_loss else event.grad_norm
    what = "LOSS" if event.is_loss else "GRADIENT"
    kind = "NaN" if math.isnan(value) else "INFINITE"
    lines = [WIDE, f"{kind} {what} DETECTED [GPU {event.gpu}]"]
    lines += [WIDE, f"Step: {event.step}", f"Loss: {event.loss:.4f}"]
    lines += [f"Gradient Norm: {event.grad_norm:.4f}", ""]
    lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW, *_describe_tensors(faults)]
    bad = sum(not math.isfinite(read.loss) for read in reads)
    lines += [NARROW, "WINDOWS OF THE STEP, LARGEST LOSS FIRST:", NARROW]
    lines += [f"{bad} of the {len(reads)} windows of this process have a non-finite loss."]
    return "\n".join([*lines, *describe_windows(reads), NARROW, REMEDIES])


def non_finite_error(step: Step, run_dir: Path, *, reported: bool) -> NonFiniteError:
    """The error that ends a training at `step`; `reported` says whether there is a report."""
    advice = "set logging.debug=true to list the affected tensors"
    if reported:
        advice = f"the report is in {_report_dir(run_dir, step)}"
    message = (
        f"step {step.number}: loss {step.loss}, gradient norm {step.grad_norm}; "
        f"the step was not taken. {REMEDIES}; {advice}"
    )
    return NonFiniteError(message, step.first_window)


def _report_dir(run_dir: Path, step: Step) -> Path:
    return run_dir / "debug" / f"step-{step.number}"


class NonFiniteReports(Callback):
    """Reports a non-finite step in `<run>/debug/step-N`, with a checkpoint from before it."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        model: nn.Module,
        attribution: Attribution,
        before_pause: Callable[[], None],
        save_before: Callable[[Path, int], None],
    ) -> None:
        """`save_before(folder, windows)` saves a checkpoint positioned after `windows` windows."""
        self._run_dir, self._world, self._model = run_dir, world, model
        self._attribution = attribution
        self._before_pause, self._save_before = before_pause, save_before

    def on_non_finite(self, step: Step) -> None:
        """Save the report of this rank, and print it if this rank is the one to."""
        self._before_pause()
        folder = _report_dir(self._run_dir, step)
        rank = self._world.rank
        gpu = rank if self._world.gpu is None else self._world.gpu
        event = NonFiniteStep(step.number, rank, gpu, step.loss, step.rank_loss, step.grad_norm)
        reads = self._attribution.read_back(step.batches)
        inputs = self._attribution.inputs(step.batches)
        try:
            text = save_report(folder, event, self._model, inputs, reads)
        except UserError as error:
            # The non-finite step is the error to report, not the full disk.
            log.error("cannot save the report: %s", error)  # noqa: TRY400
            text = describe(event, find_faults(self._model), reads)
        if event.is_printed:
            log.error("%s", text)
        log.error("Debug tensors saved: %s", folder / f"rank-{rank}")
        self._save_before(folder, step.first_window)


def save_report(
    folder: Path,
    event: NonFiniteStep,
    model: nn.Module,
    inputs: Sequence[Inputs],
    reads: Sequence[WindowRead],
) -> str:
    """Write the report of this process to `folder`/rank-R and return it as text.

    The files are `report.txt`; `report.json`; `windows.json`, the windows with their text; and
    `tensors.safetensors`: the affected tensors as `parameters/NAME` and `gradients/NAME`, and the
    micro-batches as `batch/I/input_ids` and `batch/I/labels`.

    Raises `UserError` if the folder cannot be written.
    """
    faults = find_faults(model)
    text = describe(event, faults, reads)
    tensors = _tensors_to_save(model, faults)
    for index, batch in enumerate(inputs):
        tensors[f"batch/{index}/input_ids"] = batch.input_ids
        tensors[f"batch/{index}/labels"] = batch.labels
    tree = {
        # As strings: JSON has no NaN.
        "event": {name: str(value) for name, value in asdict(event).items()},
        "faults": [asdict(fault) for fault in faults],
    }
    with atomic_folder(folder / f"rank-{event.rank}") as target:
        (target / "report.txt").write_text(text + "\n", encoding="utf-8")
        _write_tree(target / "report.json", tree)
        _write_tree(target / "windows.json", [read.as_json() for read in reads])
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            target / "tensors.safetensors",
        )
    return text


def _write_tree(path: Path, tree: object) -> None:
    text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _tensors_to_save(model: nn.Module, faults: Sequence[Fault]) -> dict[str, Tensor]:
    """The affected tensors by kind and name, up to the size limit."""
    wanted = {f"{fault.kind}/{fault.name}" for fault in faults}
    found: dict[str, Tensor] = {}
    left = SAVED_BYTES
    for kind, name, tensor in _tensors(model):
        local = own_shard(tensor)
        if f"{kind}/{name}" in wanted and local.nbytes <= left:
            found[f"{kind}/{name}"] = local
            left -= local.nbytes
    return found
