"""What was read and computed in a step that was not finite, traced to the text of its windows.

The report names every parameter and gradient with a NaN or infinity, and the windows of the step,
each with its loss, shards and documents. It is printed, and saved with those tensors, the batch and
its text as safetensors and JSON, which open without running code. The gradients of the step are
computed again, and its windows scored one by one, with the weights from before the step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infini_model.data.loading.stream import Span
from infini_model.data.loading.windows import Batch
from infini_model.data.manifest import Split
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime.errors import DataError, NonFiniteError, UserError
from infini_model.runtime.storage import atomic_folder
from infini_model.training.callbacks import Callback, Step
from infini_model.training.initial_weights import record_initial_weights
from infini_model.training.parallel import local_shard
from infini_model.training.setup import TrainingSetup

SPLIT: Split = "train"
WIDE, NARROW = "=" * 80, "=" * 40
# Limits for printing; the saved files are complete.
VALUES_SHOWN = 5
TENSORS_SHOWN = 10
WINDOWS_SHOWN = 3
PASSAGES_SHOWN = 4
CHARACTERS_SHOWN = 160
# Limit for the affected tensors; a checkpoint with all parameters is saved beside them.
SAVED_BYTES = 1 << 30
REMEDIES = (
    "Try a lower training.learning_rate, more training.warmup_steps, a smaller "
    "training.max_grad_norm, training.precision=fp32, or the preset stable"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passage:
    """The part of a document that a window reads.

    Attributes:
        shard: File in the dataset folder.
        row: The document's row in that file.
        document: Its number in the split, as `datasets.load_from_disk` counts.
        first_token: Offset of the passage in the document, in tokens.
        tokens: Number of tokens, including the target of the last position.
        text: The decoded tokens.
    """

    shard: str
    row: int
    document: int
    first_token: int
    tokens: int
    text: str

    def __str__(self) -> str:
        shown = repr(self.text[:CHARACTERS_SHOWN])
        more = "…" if len(self.text) > CHARACTERS_SHOWN else ""
        place = f"tokens {self.first_token} to {self.first_token + self.tokens - 1}"
        return f"{self.shard}, row {self.row}, {place}: {shown}{more}"


@dataclass(frozen=True)
class WindowRead:
    """A window of a step.

    Attributes:
        window: Its number in the split.
        micro_batch: Index of its micro-batch in this process.
        row: Its row in the micro-batch.
        loss: Its mean loss, scored again.
        passages: The passages it reads, in order.
    """

    window: int
    micro_batch: int
    row: int
    loss: float
    passages: list[Passage]

    def as_json(self) -> dict[str, Any]:
        """As a JSON tree; a loss that is not finite becomes a string, as JSON has no NaN."""
        return asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else str(self.loss)}


def read_back(setup: TrainingSetup, step: Step) -> list[WindowRead]:
    """The windows of this rank's share of a step, largest loss first, with their text.

    Scoring runs the model, so under FSDP all ranks must call this together.
    """
    windows = setup.loader.windows_at(step.first_window)
    files = [f"{SPLIT}/{shard.file}" for shard in setup.manifest.splits[SPLIT].shards]
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = load_dataset_tokenizer(setup.dataset_dir)
    except DataError as error:
        log.warning("%s; windows are listed without their text", error)

    def passage(span: Span) -> Passage:
        return Passage(
            shard=files[span.shard],
            row=span.row,
            document=span.document,
            first_token=span.first - span.start,
            tokens=span.last - span.first,
            text="" if tokenizer is None else tokenizer.decode(windows.stream.tokens_of(span)),
        )

    reads = []
    numbers = setup.loader.numbers(step.first_window).tolist()
    for micro_batch, batch in enumerate(step.batches):
        for row, window in enumerate(batch.chunk(len(batch.tokens))):
            total, targets = setup.train_module.score(window).sum(1).tolist()
            number, loss = numbers[micro_batch][row], total / max(1.0, targets)
            passages = [passage(span) for span in windows.spans(number)]
            reads.append(WindowRead(number, micro_batch, row, loss, passages))
    return sorted(reads, key=lambda read: -read.loss if math.isfinite(read.loss) else -math.inf)


def describe_windows(reads: Sequence[WindowRead]) -> list[str]:
    """The first few of `reads` as lines of text."""
    lines = []
    for read in reads[:WINDOWS_SHOWN]:
        place = f"micro-batch {read.micro_batch}, row {read.row}"
        lines.append(f"  • window {read.window} ({place}): loss {read.loss:.4f}")
        lines += [f"    {passage}" for passage in read.passages[:PASSAGES_SHOWN]]
        if more := len(read.passages[PASSAGES_SHOWN:]):
            lines.append(f"    … and {more} more documents")
    if more := len(reads[WINDOWS_SHOWN:]):
        lines.append(f"  … and {more} more windows")
    return lines


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

    def __str__(self) -> str:
        part = "" if self.shape == self.whole_shape else f", a shard of {self.whole_shape}"
        word = "Param" if self.kind == "parameters" else "Grad"
        return (
            f"  • {self.name} (shape: {self.shape}{part})\n"
            f"    {word} values from {self.first} on: [{', '.join(self.values)}, ...]\n"
            f"    NaN count: {self.nan}/{self.size}\n"
            f"    Infinity count: {self.infinite}/{self.size}"
        )


def find_faults(model: nn.Module) -> Iterator[tuple[Fault, Tensor]]:
    """Every parameter, then every gradient, with a NaN or infinity, in model order.

    Under FSDP only the part that this process holds is searched, and returned.
    """
    named = list(model.named_parameters())
    tensors = [("parameters", name, parameter.detach()) for name, parameter in named]
    tensors += [("gradients", name, p.grad) for name, p in named if p.grad is not None]
    for kind, name, tensor in tensors:
        local = local_shard(tensor)
        flat = local.flatten()
        places = (~torch.isfinite(flat)).nonzero().flatten()
        if len(places) == 0:
            continue
        first = int(places[0])
        fault = Fault(
            kind=kind,
            name=name,
            shape=list(local.shape),
            whole_shape=list(tensor.shape),
            size=local.numel(),
            nan=int(local.isnan().sum()),
            infinite=int(local.isinf().sum()),
            first=[int(index) for index in torch.unravel_index(places[0], local.shape)],
            values=[f"{value:g}" for value in flat[first : first + VALUES_SHOWN].tolist()],
        )
        yield fault, local


def describe(step: Step, gpu: int, faults: Sequence[Fault], reads: Sequence[WindowRead]) -> str:
    """The report of a rank as text; `gpu` is the physical number of its GPU, or the rank."""
    is_loss = not math.isfinite(step.loss)
    what, value = ("LOSS", step.loss) if is_loss else ("GRADIENT", step.grad_norm)
    lines = [WIDE, f"{'NaN' if math.isnan(value) else 'INFINITE'} {what} DETECTED [GPU {gpu}]"]
    lines += [WIDE, f"Step: {step.number}", f"Loss: {step.loss:.4f}"]
    lines += [f"Gradient Norm: {step.grad_norm:.4f}", ""]
    lines += [NARROW, "PROBLEMATIC TENSORS:", NARROW]
    for kind in ("parameters", "gradients"):
        for name, is_nan in (("NaN", True), ("infinity", False)):
            members = [each for each in faults if each.kind == kind and bool(each.nan) == is_nan]
            if members:
                lines.append(f"⚠️  {kind.capitalize()} with {name} ({len(members)} layers):")
                lines += map(str, members[:TENSORS_SHOWN])
                lines += ["", f"Total layers with {name} {kind}: {len(members)}"]
                lines += [f"Affected layers: {[each.name for each in members]}", ""]
    if not faults:
        lines += ["None: all values are finite, but the gradient norm is not.", ""]
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
        setup: TrainingSetup,
        expect_long_work: Callable[[], None],
        recompute_gradients: Callable[[Sequence[Batch]], None],
    ) -> None:
        """`recompute_gradients` computes those of a step again, from the same weights."""
        self._setup, self._expect_long_work = setup, expect_long_work
        self._recompute_gradients = recompute_gradients

    def on_non_finite(self, step: Step) -> None:
        """Save the report of this rank, and print it if this rank is the one to.

        That is each whose own loss is not finite; if only gradients are not, it is rank 0.
        """
        self._expect_long_work()
        setup, world = self._setup, self._setup.world
        folder = _report_dir(setup.run_dir, step)
        gpu = world.rank if world.gpu is None else world.gpu
        self._recompute_gradients(step.batches)
        found = list(find_faults(setup.model))
        reads = read_back(setup, step)
        text = describe(step, gpu, [fault for fault, _ in found], reads)
        try:
            self._save(folder / f"rank-{world.rank}", step, gpu, text, found, reads)
        except UserError as error:
            # The non-finite step is the error to report, not the full disk.
            log.error("cannot save the report: %s", error)  # noqa: TRY400
        own = not math.isfinite(step.rank_loss)
        if own if not math.isfinite(step.loss) else world.is_main:
            log.error("%s", text)
        log.error("Debug tensors saved: %s", folder / f"rank-{world.rank}")
        # The state before the step, as a run that starts there.
        if setup.initial_weights is not None and world.is_main:
            # A full disk is reported with the checkpoint.
            with contextlib.suppress(UserError):
                record_initial_weights(folder, setup.initial_weights)
        setup.checkpointer.save_to(folder, setup.state(step.number - 1, step.first_window))

    def _save(
        self,
        folder: Path,
        step: Step,
        gpu: int,
        text: str,
        found: Sequence[tuple[Fault, Tensor]],
        reads: Sequence[WindowRead],
    ) -> None:
        """Write the report of this process to `folder`.

        The files are `report.txt`; `report.json`; `windows.json`, the windows with their text; and
        `tensors.safetensors`: the affected tensors as `parameters/NAME` and `gradients/NAME`, and
        the micro-batches as `batch/I/input_ids` and `batch/I/labels`.
        """
        tensors, left = dict[str, Tensor](), SAVED_BYTES
        for fault, tensor in found:
            if tensor.nbytes <= left:
                tensors[f"{fault.kind}/{fault.name}"] = tensor
                left -= tensor.nbytes
        for index, batch in enumerate(step.batches):
            inputs = self._setup.train_module.objective.inputs(batch)
            tensors[f"batch/{index}/input_ids"] = inputs.input_ids
            tensors[f"batch/{index}/labels"] = inputs.labels
        event = {"step": step.number, "rank": self._setup.world.rank, "gpu": gpu, "loss": step.loss}
        event |= {"rank_loss": step.rank_loss, "grad_norm": step.grad_norm}
        trees: dict[str, object] = {
            "report": {
                # As strings: JSON has no NaN.
                "event": {name: str(value) for name, value in event.items()},
                "faults": [asdict(fault) for fault, _ in found],
            },
            "windows": [read.as_json() for read in reads],
        }
        with atomic_folder(folder) as target:
            (target / "report.txt").write_text(text + "\n", encoding="utf-8")
            for name, tree in trees.items():
                content = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
                (target / f"{name}.json").write_text(content + "\n", encoding="utf-8")
            whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            save_file(whole, target / "tensors.safetensors")
