"""What a training says of itself: its metrics, the machine's use and the MFU, and its log lines.

MFU is model FLOPs utilization: recomputation, as under activation checkpointing, is not counted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from infini_model.data.loading.coverage import Coverage, measure_coverage
from infini_model.model.llama import InfiniLlama
from infini_model.model.memory import RULES
from infini_model.runtime.errors import DeviceError
from infini_model.runtime.metrics_file import MetricsFile
from infini_model.runtime.runs import step_key
from infini_model.training.callbacks import Callback, Evaluation, Status, Step
from infini_model.training.launch.devices import list_gpus
from infini_model.training.memory_estimate import Device, estimate_memory
from infini_model.training.setup import TrainingSetup

SAMPLE_SECONDS = 5.0
# Interval over which the first CPU utilization is measured.
FIRST_SECONDS = 0.1
MEGABYTE = 1e6
RULE = "=" * 46
# Losses that a spike is compared with, at least and at most.
FEWEST_LOSSES, MOST_LOSSES = 16, 64

# Dense bfloat16 peak of a GPU in TFLOP/s, by a pattern of words in its name; the first that matches
# counts. From the vendors' data sheets.
PEAK_TERAFLOPS = {
    "GB[23]00": 2500.0,
    "B[23]00": 2250.0,
    "H[12]00 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H[128]00|GH200": 989.0,
    "A[18]00": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}

log = logging.getLogger(__name__)


class Recorder(Callback):
    """Writes a line of `metrics.jsonl` per step and per evaluation, on rank 0."""

    def __init__(self, file: MetricsFile, context_length: int) -> None:
        """`context_length` is the number of tokens of a window."""
        self._file, self._context_length = file, context_length
        self._stall_seconds: float | None = None

    def metrics(self, step: Step) -> dict[str, float]:
        values = {
            "train/loss": step.loss,
            "train/learning_rate": step.learning_rate,
            "train/tokens": float(step.windows_read * self._context_length),
            "train/tokens_per_second": step.targets / step.seconds,
            "train/step_seconds": step.seconds,
            "train/data_wait_seconds": step.wait_seconds,
        }
        if step.peak_bytes is not None:
            values["train/peak_memory_megabytes"] = step.peak_bytes / MEGABYTE
        if step.loss_scale is not None:
            values["train/loss_scale"] = step.loss_scale
        if step.overflowed:
            values["train/skipped_steps"] = 1.0
        else:
            values["train/grad_norm"] = step.grad_norm
        if self._stall_seconds is not None:
            # The stall was between the previous step and this one.
            values["checkpoint/stall_seconds"] = self._stall_seconds
            self._stall_seconds = None
        return values

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Write the line of the step. Raises `UserError` if the disk is full."""
        self._file.append(step.number, metrics)

    def evaluation_metrics(self, evaluation: Evaluation) -> dict[str, float]:
        """The loss of the split, also in bits per byte, and by source."""
        split, bits = evaluation.split, evaluation.bits_per_byte
        return {
            f"{split}/loss": evaluation.loss,
            **({} if bits is None else {f"{split}/bits_per_byte": bits}),
            **{f"{split}/{name}/loss": loss for name, loss in evaluation.by_source.items()},
        }

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:
        """Write the line of the evaluation. Raises `UserError` if the disk is full."""
        self._file.append(evaluation.step, metrics)

    def after_checkpoint(self, step: int, seconds: float) -> None:  # noqa: ARG002
        """Keep the stall time for the line of the next step."""
        self._stall_seconds = seconds

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        """Close the file. Raises `OSError` if the disk is full."""
        self._file.close()


class SystemMetrics(Callback):
    """Records the latest sample at every logged step."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._latest = {**_host(FIRST_SECONDS), **_gpus()}

    def on_start(self, step: int) -> None:  # noqa: ARG002
        threading.Thread(target=self._run, name="system metrics", daemon=True).start()

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_SECONDS):
            self._latest = {**_host(None), **_gpus()}

    def metrics(self, step: Step) -> dict[str, float]:
        return self._latest if step.logged else {}

    def on_end(self, status: Status) -> None:  # noqa: ARG002
        """Tell the thread to stop, without waiting for it."""
        self._ending.set()


def _host(seconds: float | None) -> dict[str, float]:
    """Measure CPU and memory use, over the next `seconds` or since the last call."""
    import psutil

    memory, process = psutil.virtual_memory(), psutil.Process()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(seconds),
        "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/process_memory_usage_megabytes": process.memory_info().rss / MEGABYTE,
    }


def _gpus() -> dict[str, float]:
    """Use of every GPU visible to CUDA, by CUDA index; empty if they cannot be queried."""
    sample: dict[str, float] = {}
    with contextlib.suppress(DeviceError):
        for number, gpu in enumerate(list_gpus()):
            used, name = gpu.total_bytes - gpu.free_bytes, f"system/gpu_{number}"
            sample[f"{name}_utilization_percentage"] = gpu.busy_percent
            sample[f"{name}_memory_usage_megabytes"] = used / MEGABYTE
            sample[f"{name}_memory_usage_percentage"] = 100 * used / gpu.total_bytes
    return sample


def peak_flops(device_name: str) -> float | None:
    """Peak bfloat16 FLOP/s of a GPU; None if unknown, as that of a slice of one (MIG)."""
    if " MIG " in device_name:
        return None
    for words, tera in PEAK_TERAFLOPS.items():
        if re.search(rf"\b({words})\b", device_name):
            return tera * 1e12
    return None


def flops_per_token(model: InfiniLlama, length: int) -> float:
    """FLOPs of forward and backward per token, in rows of `length` tokens.

    - Matrices: 6 per parameter, except the embedding, which is a lookup: a multiplication and an
      addition forward, twice that backward (Kaplan et al., arXiv 2001.08361, section 2.1). A frozen
      one has no gradient of its own: 4.
    - Window, of width W = heads · D: a query attends to L/2 of the L keys of its segment on
      average, at 2W each for the scores and for the sum of values; with the backward
      3 · 4W · L/2 = 12 · W · L/2. PaLM (Chowdhery et al., arXiv 2204.02311, appendix B) counts
      twice that, ignoring the mask; in a bidirectional model it is twice that. Of the earlier
      segments in sight it attends to all keys, as far as the row has that many.
    - Memory: a query reads D rows of D per head, 2W · D; a key-value pair is written at 2W_kv · D
      (arXiv 2404.07143, equations 7 and 8). With the backward 6D(W + W_kv), in all segments but
      one: the first reads nothing, and what the last writes is never read. A residual memory has
      features of 2D, so twice that.
    - Block diffusion has two streams, of which one writes and one has an output layer.
    """
    config = model.config
    lookup = None if config.tie_word_embeddings else model.model.embed_tokens.weight
    products = sum(
        _product_flops(parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter is not lookup and not name.endswith("memory_weight")
    )
    segment = min(config.segment_length, length)
    width = config.num_attention_heads * config.head_dim
    kv_width = config.key_value_heads * config.head_dim
    seen = segment if config.bidirectional else segment / 2
    segments = math.ceil(length / segment)
    in_sight = [min(number, config.window_segments) for number in range(segments)]
    seen += segment * sum(in_sight) / segments
    local = 12 * width * seen
    rule = RULES.get(config.memory)
    streams = 2 if config.bidirectional and config.has_past else 1
    older, features = 1 - segment / length, 0 if rule is None else config.head_dim * rule.features
    memory = 6 * features * (streams * width + kv_width) * older
    layers = products - _product_flops(model.lm_head.weight)
    repeated = (streams - 1) * layers
    return products + repeated + config.num_hidden_layers * (streams * local + memory)


def _product_flops(weight: Tensor) -> int:
    """FLOPs per token of a product with `weight`; a frozen one has no gradient."""
    return (6 if weight.requires_grad else 4) * weight.numel()


class Utilization(Callback):
    """The MFU of the training, for which only positions with a target count.

    The peak is that of 16-bit matmuls: there is no MFU in fp32, on a CPU or on an unknown GPU.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        world, peak = setup.world, None
        if world.device.type == "cuda" and setup.train_module.precision.name != "fp32":
            peak = peak_flops(torch.cuda.get_device_name(world.device))
        length = setup.config.packing.context_length
        flops = flops_per_token(setup.model, length)
        self._share = None if peak is None else flops / (world.size * peak)

    def metrics(self, step: Step) -> dict[str, float]:
        return (
            {} if self._share is None else {"train/mfu": self._share * step.targets / step.seconds}
        )


class Console(Callback):
    """Logs the banner, and `Step [10/100] | Loss: … | ETA: 5:30`; evaluations on rank 0."""

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup

    def on_start(self, step: int) -> None:
        """Log the banner, and start the clock of the ETA."""
        log_banner(self._setup)
        self._began, self._began_at = time.monotonic(), step

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if not step.logged:
            return
        # At the average pace, including validation and checkpoints: 1:05:30.
        batches = self._setup.config.training.batches_by
        done, to_do = batches(step.number) - batches(self._began_at), batches(step.total)
        pace = (time.monotonic() - self._began) / done
        minutes, seconds = divmod(round(pace * (to_do - batches(step.number))), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        log.info(
            "Step [%d/%d] | Loss: %.4f | LR: %.2e | Grad Norm: %.4f | Epoch: %.2f | ETA: %s",
            *(step.number, step.total, step.loss, step.learning_rate, step.grad_norm),
            *(step.windows_read / len(self._setup.windows("train")), left),
        )

    def after_evaluation(self, evaluation: Evaluation, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        if self._setup.world.is_main:
            total, bits = self._setup.config.training.total_steps, evaluation.bits_per_byte
            in_bits = "" if bits is None else f" | bits per byte: {bits:.4f}"
            by_source = "".join(f" | {n}: {loss:.4f}" for n, loss in evaluation.by_source.items())
            log.info(
                "Step [%d/%d] | %s/loss: %.4f%s%s",
                *(evaluation.step, total, evaluation.split, evaluation.loss, in_bits, by_source),
            )


class SpikeWarning(Callback):
    """Warns once of a loss far above the preceding ones, and begins anew with it."""

    def __init__(self) -> None:
        self._losses = deque[float](maxlen=MOST_LOSSES)

    def after_step(self, step: Step, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Compare the loss with the median, by the median absolute deviation but at least 6%."""
        if len(self._losses) >= FEWEST_LOSSES:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(loss - median) for loss in self._losses)
            if step.loss > median + max(18 * deviation, 0.06 * median):
                log.warning(
                    "Loss spike at step %d: %.4f, the median of the last %d steps is %.4f; "
                    "the step read windows %d to %d of the training",
                    *(step.number, step.loss, len(self._losses), median),
                    *(step.first_window, step.windows_read - 1),
                )
                self._losses.clear()
        self._losses.append(step.loss)


def log_banner(setup: TrainingSetup) -> None:
    """Log each rank with its GPU and, on rank 0, what is trained and the totals."""
    world = setup.world
    where = "CPU" if world.device.type == "cpu" else torch.cuda.get_device_name(world.device)
    gpu = "" if world.gpu is None else f"GPU {world.gpu}, "
    log.info("Rank %d of %d: %s%s", world.rank, world.size, gpu, where)
    if not world.is_main:
        return
    coverage = measure_coverage(setup.loader.phases[-1], setup.config.model.segment_length)
    for line in (RULE, *_banner(setup, coverage), RULE):
        log.info("%s", line)
    for warning in coverage.warnings(setup.config.packing.mode, setup.config.model.memory):
        log.warning("%s", warning)
    training, name = setup.config.training, setup.manifest.folder_name
    if training.warmup_steps > training.total_steps:
        log.warning(
            "training.warmup_steps: %d is more than the %d steps of the training, so the learning "
            "rate ends below its peak, at %.0f%% of it",
            *(training.warmup_steps, training.total_steps),
            100 * training.total_steps / training.warmup_steps,
        )
    for split in ("validation", "test"):
        if len(setup.windows(split)) == 0:
            log.warning("%s: split %s is too small for one window; no loss", name, split)


def _banner(setup: TrainingSetup, coverage: Coverage) -> list[str]:
    """What is trained, where, from which weights, and how long."""
    config, world, plan, start = setup.config, setup.world, setup.plan, setup.start
    total, windows = config.training.total_steps, len(setup.windows("train"))
    sources, layers = setup.windows("train").sources, config.model.num_hidden_layers
    positions = plan.global_batch * config.packing.context_length
    schedules = {
        "Batches of a step": config.training.batch_schedule,
        "Segments of a window": config.packing.context_schedule,
    }
    growth = [
        f"{title}: {', '.join(f'{n} from step {math.ceil(at * total)}' for at, n in each.items())}"
        for title, each in schedules.items()
        if each is not None
    ]
    sizes = [(p.numel(), p.requires_grad) for p in setup.model.parameters()]
    count, trained = sum(n for n, _ in sizes), sum(n for n, is_trained in sizes if is_trained)
    parameters = f"{count:,}"
    if config.training.lora is not None:
        parameters += f", of which {trained:,} are trained ({trained / count:.2%})"
    device: Device = "cuda" if world.device.type == "cuda" else "cpu"
    memory = estimate_memory(config, world.size, device, world.local_size)
    origin = f"Seed: {config.run.seed}"
    if start is not None and start.origin is not None and start.origin.step == start.step:
        origin = f"Branch of: {config.training.branch_of}, from step {start.step}"
    elif start is not None:
        origin = f"Resuming from: {setup.run_dir / step_key(start.step)}"
    elif (weights := setup.initial_weights) is not None:
        name = "" if weights.commit is None else f"{weights.name} in "
        origin = f"Initial weights: {name}{weights.folder}"
    return [
        f"Run: {setup.run_dir}",
        f"Dataset: {setup.manifest.folder_name}",
        f"Objective: {config.training.objective}",
        f"Device: {world.device.type}, {setup.train_module.precision.name}",
        f"Local attention: {setup.train_module.attention_backend}",
        f"torch.compile: {setup.train_module.compiled}",
        f"Number of processes: {world.size}, {config.launch.strategy}",
        f"Batch size per process: {plan.micro_batch}",
        f"Gradient accumulation: {plan.accumulation}",
        f"Total batch size: {plan.global_batch} windows, {positions:,} positions per step",
        *growth,
        *coverage.describe(config.model.memory),
        f"Model parameters: {parameters}",
        f"Memory per process, estimated: {memory}",
        f"Recomputed layers: {config.launch.gradient_checkpointing} of {layers}",
        f"Vocabulary size: {config.model.vocab_size}",
        origin,
        f"Steps: {0 if start is None else start.step} of {total} done",
        f"Epochs: {setup.windows_by(total) / windows:.2f} of {windows:,} windows",
        *(
            f"Epochs of {name}: {epochs:.2f} of {len(sources[name]):,} windows"
            for name, epochs in setup.loader.epochs(setup.windows_by(total)).items()
            if name
        ),
    ]
