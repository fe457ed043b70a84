"""The GPU tokenizer, from text in memory to ids, and packing the ids into windows.

- `ids on the device`: text to ids that stay on the device.
- `ids on the host`: text to ids in host memory.
- `tokenizer on the CPU`: the same with `gigatoken`, if installed, on all cores.
- `tokenizers`: the same with `tokenizers`, on all cores.
- `windows`: ids on the device into `input_ids` and `labels`; `copy` moves as many bytes there.

The ids must be the same. Needs a GPU; with TRITON_INTERPRET=1 Triton's interpreter rehearses it on
CPU tensors, thousands of times slower.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.corpus import write_corpus
from benchmarks.report import Cell, publish, speed_ratio, spread, stopwatch, take_turns
from infini_model.config import PackingConfig
from infini_model.data.loading.gpu_dataloader import pack_tokens
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer
from infini_model.data.tokenizers.gpu.tokens import close_documents

ON_DEVICE, ON_HOST, PEER = "ids on the device", "ids on the host", "tokenizer on the CPU"
REFERENCE = "tokenizers"
WINDOWS, COPY = "windows", "copy"
PACKING = PackingConfig(context_length=2048)
# Per token: an id is read, and written as an input and as a label.
BYTES_MOVED = 4 + 8 + 8


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize_device",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=float, default=100.0, help="maximum size of the text")
    parser.add_argument("--vocab-size", type=int, default=8192, help="vocabulary size of the BPE")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args()


def read_corpus(megabytes: float) -> pa.StringArray:
    """The documents of the benchmarks' corpus."""
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name) / "corpus", megabytes)
        texts: pa.StringArray = pq.read_table(Path(name) / "corpus")["text"].combine_chunks()
        return texts


def measure(
    host: BPETokenizer, texts: pa.StringArray, device: str, turns: int
) -> dict[str, list[float]]:
    """The seconds of each, turn by turn. Raises `SystemExit` if the ids differ."""
    tokenizer = DeviceTokenizer(host, torch.device(device))
    for ours, theirs in zip(tokenizer.encode_batch(texts), host.encode_batch(texts), strict=True):
        if not np.array_equal(ours, theirs):
            raise SystemExit(f"{device} and the CPU's tokenizer give different ids")
    tokens = close_documents(tokenizer.encode(texts), host.eos_token_id)
    # A copy reads as many bytes as it writes.
    copied = torch.empty(BYTES_MOVED // 2 * len(tokens.ids), dtype=torch.uint8, device=device)
    reference = host.reference()
    peers = {
        ON_DEVICE: stopwatch(lambda: tokenizer.encode(texts)),
        ON_HOST: stopwatch(lambda: tokenizer.encode_batch(texts)),
        PEER: stopwatch(lambda: host.encode_batch(texts)),
        REFERENCE: stopwatch(lambda: reference.encode_batch(texts)),
        WINDOWS: stopwatch(lambda: pack_tokens(tokens, host.eos_token_id, PACKING, 2048)),
        COPY: stopwatch(copied.clone),
    }
    return take_turns(peers, turns)


def main() -> None:
    """Measure and print the results."""
    options = parse()
    rehearsed = os.environ.get("TRITON_INTERPRET") == "1"
    if not (rehearsed or torch.cuda.is_available()):
        raise SystemExit("torch sees no GPU; TRITON_INTERPRET=1 rehearses it on the CPU")
    device = "cpu" if rehearsed else "cuda"
    texts = read_corpus(options.megabytes)
    host = train_tokenizer([texts], options.vocab_size)
    seconds = measure(host, texts, device, options.turns)
    size = float(np.diff(np.frombuffer(texts.buffers()[1], np.int32)).sum())
    rows: list[dict[str, Cell]] = [
        {"": name, "MB of text / s": size / 1e6 / statistics.median(times)}
        for name, times in seconds.items()
    ]
    ratios = {
        f"{PEER}, {ON_HOST}": speed_ratio(seconds[ON_HOST], seconds[PEER]),
        f"{COPY}, {WINDOWS}": speed_ratio(seconds[WINDOWS], seconds[COPY]),
        f"GB of text / s, {ON_DEVICE}": spread([size / 1e9 / each for each in seconds[ON_DEVICE]]),
        f"{REFERENCE}, {ON_HOST}": speed_ratio(seconds[ON_HOST], seconds[REFERENCE]),
    }
    heading = f"Tokenising {size / 1e6:.1f} MB with the GPU tokenizer, tensors on {device}"
    # The last has no target.
    targets = dict(zip(ratios, (3.0, 0.5, 5.0), strict=False)) if device == "cuda" else {}
    publish("tokenize_device", heading, rows, ratios, targets)


if __name__ == "__main__":
    main()
