"""The report of a step that was not finite: its faulty tensors and the text it read.

The report of a rank names every parameter and gradient with a NaN or infinity. It is printed, and
saved with these tensors and with the text of the windows that the step read.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.model.hf.weights import save_tensors
from infini_model.runtime.errors import NonFiniteError, UserError
from infini_model.runtime.storage import atomic_file
from infini_model.training.callbacks import Callback, Step
from infini_model.training.initial_weights import record_initial_weights
from infini_model.training.parallel import local_shard
from infini_model.training.setup import TrainingSetup

WIDE, NARROW = "=" * 80, "=" * 40
VALUES_SHOWN = 5
# Limit for printing; the saved report describes all.
TENSORS_PRINTED = 10
REMEDIES = (
    "Try a lower training.learning_rate, more training.warmup_steps, a smaller "
    "training.max_grad_norm, training.precision=fp32, or the preset stable"
)

log = logging.getLogger(__name__)


def faulty_tensors(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The `parameters` and `gradients` with a NaN or infinity, each by name, in model order.

    Under FSDP they are those whose part on this rank has one.
    """
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        kind: {
            name: each for name, each in members.items() if not local_shard(each).isfinite().all()
        }
        for kind, members in (("parameters", named), ("gradients", gradients))
    }


def describe_tensor(name: str, tensor: Tensor, word: str) -> str:
    """Shape, first values and counts of a tensor that is not finite; `word` is Param or Grad."""
    local, whole = local_shard(tensor), list(tensor.shape)
    flat = local.flatten()
    place = (~flat.isfinite()).byte().argmax()
    first = [int(index) for index in torch.unravel_index(place, local.shape)]
    values = ", ".join(f"{value:g}" for value in flat[place : place + VALUES_SHOWN].tolist())
    part = "" if list(local.shape) == whole else f", a shard of {whole}"
    return (
        f"  • {name} (shape: {list(local.shape)}{part})\n"
        f"    {word} values from {first} on: [{values}, ...]\n"
        f"    NaN count: {int(local.isnan().sum())}/{local.numel()}\n"
        f"    Infinity count: {int(local.isinf().sum())}/{local.numel()}"
    )


def describe(
    step: Step, gpu: int, faulty: Mapping[str, Mapping[str, Tensor]], most: int | None = None
) -> str:
    """The tensors of a rank that are not finite, as text.

    Args:
        step: The step.
        gpu: The physical number of the rank's GPU, or the rank.
        faulty: From `faulty_tensors`.
        most: How many of a kind to describe, the others are named only; None describes all.
    """
    is_loss = not math.isfinite(step.loss)
    what, value = ("LOSS", step.loss) if is_loss else ("GRADIENT", step.grad_norm)
    lines = [WIDE, f"{'NaN' if math.isnan(value) else 'INFINITE'} {what} DETECTED [GPU {gpu}]"]
    lines += [WIDE, f"Step: {step.number}", f"Loss: {step.loss:.4f}"]
    lines += [f"Gradient Norm: {step.grad_norm:.4f}", ""]
    lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW]
    for kind, word in (("parameters", "Param"), ("gradients", "Grad")):
        with_nan = [n for n, each in faulty[kind].items() if local_shard(each).isnan().any()]
        others = [name for name in faulty[kind] if name not in with_nan]
        for problem, names in (("NaN", with_nan), ("infinity", others)):
            if names:
                lines.append(f"⚠️  {kind.capitalize()} with {problem} ({len(names)} layers):")
                lines += [describe_tensor(n, faulty[kind][n], word) for n in names[:most]]
                lines += ["", f"Total layers with {problem} {kind}: {len(names)}"]
                lines += [f"Affected layers: {names}", ""]
    if not any(faulty.values()):
        lines += ["None: all values on this process are finite.", ""]
    return "\n".join([*lines, NARROW, REMEDIES])


def describe_windows(setup: TrainingSetup, step: Step) -> Iterator[str]:
    """The windows of this rank in a step, and where each of their documents is, with its text.

    Raises `DataError` if the dataset or its tokenizer cannot be read any more.
    """
    windows = setup.loader.windows_at(step.first_window)
    files = [shard.file for shard in setup.manifest.splits["train"].shards]
    tokenizer = load_dataset_tokenizer(setup.dataset_dir)
    for micro_batch, numbers in enumerate(setup.loader.numbers(step.first_window).tolist()):
        for row, number in enumerate(numbers):
            yield f"  • window {number} (micro-batch {micro_batch}, row {row})"
            for span in windows.spans(number):
                place = f"train/{files[span.shard]}, row {span.row}"
                tokens = f"tokens {span.first - span.start} to {span.last - span.start - 1}"
                text = tokenizer.decode(windows.stream.tokens_of(span))
                yield f"    {place}, {tokens}: {text!r}"


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

    def __init__(self, setup: TrainingSetup, expect_long_work: Callable[[], None]) -> None:
        self._setup, self._expect_long_work = setup, expect_long_work

    def on_non_finite(self, step: Step) -> None:
        """Save the report of this rank, and print it if this rank is the one to.

        That is each whose own loss is not finite; if only gradients are not, it is rank 0.
        """
        self._expect_long_work()
        setup, world = self._setup, self._setup.world
        folder = _report_dir(setup.run_dir, step)
        gpu = world.rank if world.gpu is None else world.gpu
        faulty = faulty_tensors(setup.model)
        own = not math.isfinite(step.rank_loss)
        if own if not math.isfinite(step.loss) else world.is_main:
            log.error("%s", describe(step, gpu, faulty, TENSORS_PRINTED))
        try:
            self._save(folder / f"rank-{world.rank}", step, gpu, faulty)
        except UserError as error:
            # The non-finite step is the error to report, not the full disk.
            log.error("cannot save the report: %s", error)  # noqa: TRY400
        # The state before the step, as a run that starts there.
        if setup.initial_weights is not None and world.is_main:
            # A full disk is reported with the checkpoint.
            with contextlib.suppress(UserError):
                record_initial_weights(folder, setup.initial_weights)
        setup.checkpointer.save_to(folder, setup.state(step.number - 1, step.first_window))

    def _save(
        self, folder: Path, step: Step, gpu: int, faulty: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Write `report.txt`, then `tensors.safetensors`: `parameters/NAME`, `gradients/NAME`."""
        text = [describe(step, gpu, faulty), NARROW, "WINDOWS OF THE STEP:", NARROW]
        with atomic_file(folder / "report.txt") as path:
            lines = [*text, *describe_windows(self._setup, step)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        tensors = {
            f"{kind}/{name}": local_shard(tensor).cpu().contiguous()
            for kind, members in faulty.items()
            for name, tensor in members.items()
        }
        with atomic_file(folder / "tensors.safetensors") as path:
            save_tensors(tensors, path)
        log.error("Debug tensors saved: %s, the windows of the step in its report.txt", folder)
