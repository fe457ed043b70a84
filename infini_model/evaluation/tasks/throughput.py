"""Speed and peak memory by the length of the prompt: reading it, and generating after it.

The model carries a state of constant size, so neither the speed of a token nor the memory should
depend on how much was read before.
"""

from __future__ import annotations

import contextlib
import platform
import statistics
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from infini_model.config.evaluation import ThroughputConfig
from infini_model.evaluation.reporting.markdown import table
from infini_model.evaluation.reporting.plots import plot_speed_by_length
from infini_model.evaluation.subject import Subject
from infini_model.evaluation.tasks.task import EvaluationTask, Picture, TaskResult
from infini_model.model.generate import stream
from infini_model.model.llama import InfiniLlama

# Trials of a length, if they fit into its time.
MAX_TRIALS = 5
MEBIBYTE = 1 << 20
# Linux: writing 5 to the first resets the peak resident memory that the second shows.
CLEAR_PEAK, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Trial(BaseModel):
    """A prompt that was read, and tokens that were generated after it.

    Attributes:
        prompt_rate: Tokens of the prompt per second, to the first new token.
        new_rate: Further new tokens per second.
        prompt_bytes: Peak memory while reading; None where it cannot be measured.
        new_bytes: Peak memory while generating.
        seconds: Of both together.
    """

    model_config = ConfigDict(frozen=True)

    prompt_rate: float
    new_rate: float
    prompt_bytes: int | None
    new_bytes: int | None
    seconds: float

    @property
    def peaks(self) -> tuple[int | None, int | None]:
        """While reading, and while generating."""
        return self.prompt_bytes, self.new_bytes


class Conditions(BaseModel):
    """What decides a measurement besides the model: the key of its cells."""

    model_config = ConfigDict(frozen=True)

    settings: ThroughputConfig
    machine: str
    device: str
    threads: int
    attention_backend: str


class Task(EvaluationTask):
    """Trials of one sequence at each length, warm, one length after another."""

    title = "Speed and memory by length"

    def sequences(self, subject: Subject) -> int:
        """One for each length."""
        bidirectional = subject.model.config.bidirectional
        return 0 if bidirectional else len(_lengths(subject))

    def run(self, subject: Subject) -> TaskResult:
        """Measure each length; those that would take too long are named and left out."""
        if subject.model.config.bidirectional:
            return TaskResult(section="Measured for causal models only.")
        lengths, settings = _lengths(subject), subject.config.evaluation.throughput
        cells = subject.cells("throughput", _conditions(subject))
        found = dict[int, list[Trial]]()
        for length in lengths:
            rate = min((t.prompt_rate for each in found.values() for t in each), default=None)
            if rate is None or length / rate <= settings.max_seconds:
                kept = cells.measured(str(length), partial(_measure, subject, length))
                found[length] = [Trial.model_validate(each) for each in kept]
            subject.on_windows(1)
        context = subject.config.packing.context_length
        metrics = dict[str, float]()
        for length, trials in found.items():
            name = f"evaluation/throughput/{length // context}x"
            metrics[f"{name}/prompt_tokens_per_second"] = _median(t.prompt_rate for t in trials)
            metrics[f"{name}/new_tokens_per_second"] = _median(t.new_rate for t in trials)
            if (peak := _peak(each for t in trials for each in t.peaks)) is not None:
                metrics[f"{name}/peak_memory_bytes"] = float(peak)
        return TaskResult(
            metrics=metrics,
            section=_section(subject, found, [each for each in lengths if each not in found]),
            pictures=[_picture(subject, found)],
            details={str(k): [each.model_dump() for each in v] for k, v in found.items()},
        )


def _lengths(subject: Subject) -> list[int]:
    context = subject.config.packing.context_length
    return [context * each for each in sorted(set(subject.config.evaluation.throughput.lengths))]


def _device(subject: Subject) -> torch.device:
    return subject.model.lm_head.weight.device


def _conditions(subject: Subject) -> Conditions:
    device = _device(subject)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Conditions(
        settings=subject.config.evaluation.throughput,
        machine=platform.node(),
        device=name,
        threads=torch.get_num_threads(),
        attention_backend=subject.model.attention_backend,
    )


def _measure(subject: Subject, length: int) -> list[dict[str, float | None]]:
    """The trials of a length, without the first, which warms caches and kernels up."""
    settings = subject.config.evaluation.throughput
    generator = torch.Generator().manual_seed(subject.config.run.seed)
    prompt = torch.randint(subject.manifest.tokenizer.vocab_size, (1, length), generator=generator)
    first = _trial(subject.model, prompt, settings.new_tokens)
    count = max(1, min(MAX_TRIALS, int(settings.max_seconds / first.seconds)))
    trials = [_trial(subject.model, prompt, settings.new_tokens) for _ in range(count)]
    return [each.model_dump() for each in trials]


def _trial(model: InfiniLlama, prompt: torch.Tensor, new_tokens: int) -> Trial:
    device = model.lm_head.weight.device
    _forget_peak(device)
    began = time.perf_counter()
    tokens = stream(model, prompt, max_new_tokens=new_tokens, temperature=0.0)
    next(tokens)  # its value is on the host, so a GPU has finished
    read = time.perf_counter()
    prompt_bytes = _peak_bytes(device)
    _forget_peak(device)
    generated = sum(1 for _ in tokens)
    ended = time.perf_counter()
    return Trial(
        prompt_rate=prompt.size(1) / (read - began),
        new_rate=generated / (ended - read),
        prompt_bytes=prompt_bytes,
        new_bytes=_peak_bytes(device),
        seconds=ended - began,
    )


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        CLEAR_PEAK.write_text("5", encoding="ascii")


def _peak_bytes(device: torch.device) -> int | None:
    """Peak allocated memory of the GPU, or peak resident memory of this process on Linux."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = STATUS.read_text(encoding="ascii")
    except OSError:
        return None
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Median, lowest and highest."""
    known = sorted(values)
    return _median(known), known[0], known[-1]


def _peak(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)


def _section(subject: Subject, found: dict[int, list[Trial]], left_out: list[int]) -> str:
    settings, device = subject.config.evaluation.throughput, _device(subject)
    header = (
        "Prompt",
        "Reading (tokens/s)",
        "Peak memory (MiB)",
        "Generating (tokens/s)",
        "Peak memory (MiB)",
    )
    rows = []
    for length, trials in found.items():
        spreads = [_spread(t.prompt_rate for t in trials), _spread(t.new_rate for t in trials)]
        speeds = [f"{mid:,.0f} ({low:,.0f} to {high:,.0f})" for mid, low, high in spreads]
        peaks = [_peak(t.prompt_bytes for t in trials), _peak(t.new_bytes for t in trials)]
        memory = ["–" if each is None else f"{each / MEBIBYTE:,.0f}" for each in peaks]
        rows.append((f"{length:,} tokens", speeds[0], memory[0], speeds[1], memory[1]))
    measured = "the memory that torch allocates on the GPU"
    if device.type != "cuda":
        measured = "the resident memory of the whole process"
    notes = [
        f"One sequence at a time on {_conditions(subject).device}, {settings.new_tokens:,} new "
        "tokens after each prompt; medians of up to "
        f"{MAX_TRIALS} trials after one that does not count, with the lowest and highest. Peak "
        f"memory, while reading and while generating, is {measured}."
    ]
    if left_out:
        names = ", ".join(f"{each:,}" for each in left_out)
        notes.append(
            f"Left out, as one trial would take more than {settings.max_seconds:g} seconds "
            f"(`evaluation.throughput.max_seconds`): {names} tokens."
        )
    return "\n\n".join([table(header, rows), *notes])


def _picture(subject: Subject, found: dict[int, list[Trial]]) -> Picture:
    rates = {
        "reading the prompt": [_spread(t.prompt_rate for t in each) for each in found.values()],
        "generating": [_spread(t.new_rate for t in each) for each in found.values()],
    }
    peaks = [_peak(peak for t in each for peak in t.peaks) for each in found.values()]
    known = [each for each in peaks if each is not None]
    path = plot_speed_by_length(
        list(found),
        rates,
        known if len(known) == len(peaks) else None,
        subject.plots_dir / "speed_by_length.png",
    )
    return Picture(path=path, caption="Tokens per second and peak memory by length of the prompt")
