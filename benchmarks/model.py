"""The whole model: speed and memory by length, and GPU utilization.

- Speed: tokens per second of forward and backward, on the same number of tokens as many short rows
  or as one long row.
- Memory: peak memory of a process that reads a short or a long prompt and generates; of the whole
  process, or on a GPU what PyTorch has allocated.
- Utilization: the MFU of training a billion parameters on short and long rows; see
  `benchmarks.utilization`. The activations of a long row do not fit into memory, so they are
  checkpointed, and for comparison so are those of the short rows. On CUDA only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial

import torch
from torch import Tensor

from benchmarks.report import Cell, Ratio, publish, run, speed_ratio, spread, stopwatch, take_turns
from benchmarks.utilization import BILLION, Shape, Training, utilization
from infini_model.config import ModelConfig
from infini_model.model.llama import InfiniLlama

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHORT = Shape(rows=16, length=2048, checkpointing=False)
SHORT_CHECKPOINTED = Shape(rows=64, length=2048, checkpointing=True)
LONG = Shape(rows=1, length=131_072, checkpointing=True)
MFU_TARGET = 0.5
MEBIBYTE = 1 << 20

Rows = list[dict[str, Cell]]
# Ratios with their minimum targets.
Judged = dict[str, tuple[Ratio, float]]


def parse() -> argparse.Namespace:
    """The options; defaults depend on whether there is a GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=[2048, 65_536], help="of rows")
    parser.add_argument("--prompts", type=int, nargs=2, default=[16_384, 262_144], help="tokens")
    parser.add_argument("--segment", type=int, default=512, help="tokens")
    parser.add_argument("--hidden-size", type=int, default=1024 if CUDA else 256)
    parser.add_argument("--layers", type=int, default=4 if CUDA else 2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="of the GPU, dense bfloat16 (H200: 989)"
    )
    options = parser.parse_args()
    short, long = options.lengths
    if long % short:
        parser.error(f"--lengths: {long} is not a multiple of {short}")
    return options


def shape_of(options: argparse.Namespace) -> ModelConfig:
    """The small model of the first two measurements."""
    width = options.hidden_size
    return ModelConfig(
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=width * 11 // 4,
        segment_length=options.segment,
    )


def row(name: str, tokens: int, **cells: Cell) -> dict[str, Cell]:
    """A table row: what was measured, and the length of the rows or the prompt."""
    columns = ("tokens/s", "peak MiB", "MFU")
    return {"": name, "tokens": tokens, **{column: cells.get(column) for column in columns}}


def memory(options: argparse.Namespace) -> tuple[Rows, Judged]:
    """Peak memory of generation after a short and after a long prompt."""
    shape = shape_of(options).model_dump_json()

    def peak(prompt: str) -> float:
        ended = run(["-m", "benchmarks.generate_peak", shape, prompt])
        return float(json.loads(ended.last_line)["cuda_bytes"] or ended.peak_bytes)

    short, long = map(str, options.prompts)
    peaks = take_turns({name: partial(peak, name) for name in (short, long)}, options.turns)
    rows = [
        row("generate", int(name), **{"peak MiB": statistics.median(each) / MEBIBYTE})
        for name, each in peaks.items()
    ]
    ratio = spread([a / b for a, b in zip(peaks[short], peaks[long], strict=True)])
    name = f"peak memory of generate, {options.prompts[0]:,} / {options.prompts[1]:,} tokens"
    return rows, {name: (ratio, 1 / 1.05)}


def speed(options: argparse.Namespace) -> tuple[Rows, Judged]:
    """Forward and backward of short rows and of a long one."""
    short, long = options.lengths
    torch.manual_seed(0)
    model = InfiniLlama(shape_of(options)).to(DEVICE)
    ids = torch.randint(model.lm_head.out_features, (1, long), device=DEVICE)

    def work(rows: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA):
            loss = model(rows, labels=rows).loss
        loss.backward()

    # Warm up, to exclude one-time compilation, autotuning and allocation.
    work(ids[:, :short])
    peers = {
        str(length): stopwatch(partial(work, ids.view(-1, length))) for length in (short, long)
    }
    seconds = take_turns(peers, options.turns)
    rows = [
        row("forward, backward", int(name), **{"tokens/s": long / statistics.median(each)})
        for name, each in seconds.items()
    ]
    ratio = speed_ratio(seconds[str(long)], seconds[str(short)])
    return rows, {f"tokens/s, {long:,} / {short:,} tokens": (ratio, 0.9)}


def use(options: argparse.Namespace) -> tuple[Rows, Judged]:
    """The MFU of training the large model, on CUDA only."""
    name = "train 1B"
    if not CUDA:
        return [row(name, LONG.length, MFU="not measured: no CUDA device")], {}
    shapes = (SHORT, SHORT_CHECKPOINTED, LONG)
    found = utilization(
        Training(BILLION, DEVICE), shapes, options.turns, options.peak_tflops * 1e12
    )
    shares = {str(shape): each for shape, each in found.items()}
    short, short_checkpointed, long = (shares[str(shape)] for shape in shapes)
    rows = [
        row(
            f"{name}, {shape.rows} rows" + ", checkpointed" * shape.checkpointing,
            shape.length,
            MFU=spread(each),
        )
        for shape, each in found.items()
    ]
    ratio = spread([a / b for a, b in zip(long, short_checkpointed, strict=True)])
    return rows, {
        f"MFU, {SHORT}": (spread(short), MFU_TARGET),
        f"MFU, {LONG}": (spread(long), 0.95 * MFU_TARGET),
        f"MFU, {LONG} / {SHORT_CHECKPOINTED}": (ratio, 0.95),
    }


def main() -> None:
    """Measure all three and print the results."""
    options = parse()
    # The memory benchmark comes first: on Linux a child's peak is at least that of its parent.
    measured = [measure(options) for measure in (memory, speed, use)]
    judged = {name: each for _, ratios in measured for name, each in ratios.items()}
    publish(
        "model",
        f"{options.layers} layers of {options.hidden_size}, segments of {options.segment}",
        [row for rows, _ in measured for row in rows],
        {name: ratio for name, (ratio, _) in judged.items()},
        {name: least for name, (_, least) in judged.items()},
    )


if __name__ == "__main__":
    main()
