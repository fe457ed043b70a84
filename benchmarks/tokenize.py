"""Text in Parquet to finished, checksummed shards, compared with common pipelines.

- `infini`: read and fingerprint the corpus, tokenise, check a sample, append end-of-text, split
  documents, write shards with checksums and a manifest; also of the same documents as JSON lines
  and as text files of one document each.
- `datasets.map`: `load_dataset`, a `map` with `tokenizers`, a `map` that cuts the ids into blocks.
- `datatrove`: its Parquet reader and its `DocumentTokenizer`, which writes files of ids.
- `composite`: Parquet to `gigatoken` to Arrow; no fingerprints, splits or checks.
- `gigatoken`, `tiktoken`: only these, from text in memory to ids in memory.

All are warmed up on a megabyte, to exclude imports. Then each run starts from scratch and uses all
cores; its CPU seconds include all threads and children. The ids must match: per document for
`datasets.map`, in number for the others. Finally `infini` runs in a separate process on the corpus
and on a corpus several times as large, to measure throughput and peak memory.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpus import write_as_json_lines, write_as_texts, write_corpus
from benchmarks.report import (
    Cell,
    Ratio,
    publish,
    run,
    speed_ratio,
    spread,
    stopwatch,
    take_turns,
)
from benchmarks.shards_once import text_to_shards
from benchmarks.tokenize_peers import composite, datatrove, gigatoken_ids, tiktoken_of, usual
from benchmarks.usage import cpu_seconds
from infini_model.data.manifest import SPLITS
from infini_model.data.shards.stream import open_split
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.runtime.cores import available_cores

OURS, USUAL, DATATROVE, COMPOSITE = "infini", "datasets.map", "datatrove", "composite"
GIGATOKEN, TIKTOKEN = "gigatoken", "tiktoken"
JSON_LINES, TEXTS = "infini, JSON lines", "infini, text files"
CPU = "CPU of infini / composite's, BPE"
JSON_LINES_RATE, TEXTS_RATE = "rate of JSON lines / Parquet", "rate of text files / Parquet"
MEBIBYTE = 1 << 20
CORES = available_cores()


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--megabytes", type=float, default=100.0, help="maximum size of the text")
    parser.add_argument(
        "--times", type=int, default=10, help="size factor of the larger corpus; 1 skips it"
    )
    parser.add_argument("--vocab-size", type=int, default=8192, help="vocabulary size of the BPE")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


class Corpus:
    """The text of a comparison, in Parquet files, in other formats and in memory."""

    def __init__(self, folder: Path, megabytes: float) -> None:
        self.folder = folder / "parquet"
        self.json_lines, self.text_files = folder / "jsonl", folder / "txt"
        self.bytes = write_corpus(self.folder, megabytes)
        write_as_json_lines(self.folder, self.json_lines)
        write_as_texts(self.folder, self.text_files)
        column = pq.read_table(self.folder)["text"].cast(pa.large_string())
        self.texts: list[str] = column.to_pylist()


class Comparison:
    """The pipelines with one tokenizer on one corpus, in one folder."""

    def __init__(self, corpus: Corpus, spec: str, folder: Path) -> None:
        self._corpus, self._spec, self._folder = corpus, spec, folder
        self._documents: dict[str, Counter[bytes]] = {}
        self._tokens: dict[str, int] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def peers(self) -> dict[str, Callable[[], float]]:
        """The pipelines for `take_turns`; some need a byte-level BPE."""
        corpus = self._corpus
        peers: dict[str, Callable[[], float]] = {
            OURS: functools.partial(self._ours, OURS, corpus.folder, "*.parquet"),
            USUAL: self._usual,
        }
        if self._spec != "bytes":
            peers |= {
                JSON_LINES: functools.partial(self._ours, JSON_LINES, corpus.json_lines, "*.jsonl"),
                TEXTS: functools.partial(self._ours, TEXTS, corpus.text_files, "*.txt"),
                COMPOSITE: self._composite,
                DATATROVE: self._datatrove,
                GIGATOKEN: self._gigatoken,
                TIKTOKEN: self._tiktoken,
            }
        return peers

    def check_same_ids(self) -> int:
        """The number of documents. Raises `SystemExit` unless all pipelines give the same ids."""
        for name, documents in self._documents.items():
            if documents != self._documents[OURS]:
                raise SystemExit(f"{self._spec}: {OURS} and {name} give different ids")
        if len(set(self._tokens.values())) > 1:
            raise SystemExit(f"{self._spec}: different numbers of tokens: {self._tokens}")
        return self._documents[OURS].total()

    def _ours(self, name: str, corpus: Path, pattern: str) -> float:
        folder = self._emptied(name)
        seconds = self._timed(name, lambda: text_to_shards(corpus, self._spec, folder, pattern))
        self._documents[name] = documents_of_ours(folder)
        splits = [open_split(folder / "datasets" / "latest", split) for split in SPLITS]
        self._tokens[name] = sum(split.tokens for split in splits)
        return seconds

    def _usual(self) -> float:
        folder = self._emptied(USUAL)
        made: list[Any] = []
        seconds = self._timed(
            USUAL, lambda: made.append(usual(self._corpus.folder, self._spec, CORES, folder))
        )
        self._documents[USUAL] = documents_of_usual(made[0])
        return seconds

    def _composite(self) -> float:
        return self._counted(COMPOSITE, composite, self._corpus.folder, self._emptied(COMPOSITE))

    def _datatrove(self) -> float:
        folder = self._emptied(DATATROVE)
        work = functools.partial(datatrove, self._corpus.folder, self._spec, CORES, folder)
        # Its processes are not children of this one, which cannot tell their CPU time.
        seconds = stopwatch(work)()
        files = folder.glob("ids/*.ds")
        self._tokens[DATATROVE] = sum(path.stat().st_size for path in files) // 2
        return seconds

    def _gigatoken(self) -> float:
        texts = pa.array(self._corpus.texts, pa.large_string())
        return self._counted(GIGATOKEN, gigatoken_ids, texts)

    def _tiktoken(self) -> float:
        encode = functools.partial(tiktoken_of(self._spec).encode_ordinary_batch, num_threads=CORES)
        return self._counted(
            TIKTOKEN, lambda _, texts: sum(map(len, encode(texts))), self._corpus.texts
        )

    def _counted(self, name: str, work: Callable[..., int], *arguments: Any) -> float:
        """The seconds of `work`, which returns its token count without end-of-text tokens."""
        made: list[int] = []
        loaded = Path(self._spec).read_text()
        seconds = self._timed(name, lambda: made.append(work(loaded, *arguments)))
        self._tokens[name] = made[0] + len(self._corpus.texts)
        return seconds

    def _timed(self, name: str, work: Callable[[], object]) -> float:
        """The seconds of `work`; notes its CPU seconds."""
        began = cpu_seconds()
        seconds = stopwatch(work)()
        self.cpu_seconds.setdefault(name, []).append(cpu_seconds() - began)
        return seconds

    def _emptied(self, name: str) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


def documents_of_ours(folder: Path) -> Counter[bytes]:
    """Count the documents in our dataset by the hash of their ids."""
    found: Counter[bytes] = Counter()
    for split in SPLITS:
        stream = open_split(folder / "datasets" / "latest", split)
        for index in range(stream.documents):
            found[hash_ids(stream.document(index))] += 1
    return found


def documents_of_usual(ids: Any) -> Counter[bytes]:
    """Count the documents in a dataset of the `datasets` library by the hash of their ids."""
    found: Counter[bytes] = Counter()
    for batch in ids.with_format("arrow").iter(1000):
        column = batch["input_ids"].combine_chunks()
        for row in range(len(column)):
            found[hash_ids(column[row].values.to_numpy())] += 1
    return found


def hash_ids(ids: np.ndarray) -> bytes:
    """A hash of ids that does not depend on their dtype."""
    return hashlib.sha256(ids.astype(np.int32).tobytes()).digest()


def train_bpe(corpus: Corpus, vocab_size: int, folder: Path) -> str:
    """Train a byte-level BPE on the corpus; returns the path of its `tokenizer.json`."""
    train_tokenizer([corpus.texts], vocab_size).save(folder)
    return str(folder / "tokenizer.json")


def compare(
    name: str, spec: str, corpus: Corpus, warm_up: Corpus, turns: int, folder: Path
) -> tuple[list[dict[str, Cell]], dict[str, Ratio]]:
    """A row per pipeline with one tokenizer, and our speed relative to each."""
    take_turns(Comparison(warm_up, spec, folder / name).peers(), 1)
    comparison = Comparison(corpus, spec, folder / name)
    seconds = take_turns(comparison.peers(), turns)
    documents = comparison.check_same_ids()
    cpu = comparison.cpu_seconds
    ratios = {
        peer: speed_ratio(seconds[OURS], times) for peer, times in seconds.items() if peer != OURS
    }
    cpu_ratios = {peer: speed_ratio(cpu[peer], cpu[OURS]) for peer in cpu if peer != OURS}
    rows = [
        row(f"{name}, {peer}", documents, corpus.bytes, times, ratio=ratios.get(peer))
        | {
            "CPU s": statistics.median(cpu[peer]) if peer in cpu else None,
            "CPU of infini / its": cpu_ratios.get(peer),
        }
        for peer, times in seconds.items()
    ]
    named = {f"{peer}, {name}": ratio for peer, ratio in ratios.items()}
    if COMPOSITE in ratios:
        named[CPU] = cpu_ratios[COMPOSITE]
        named[JSON_LINES_RATE] = speed_ratio(seconds[JSON_LINES], seconds[OURS])
        named[TEXTS_RATE] = speed_ratio(seconds[TEXTS], seconds[OURS])
    return rows, named


def row(
    name: str,
    documents: int | None,
    size: int,
    seconds: list[float],
    ratio: Ratio | None = None,
    peak: float | None = None,
) -> dict[str, Cell]:
    """A row of the table."""
    return {
        "": name,
        "documents": documents,
        "MB/s": size / 1e6 / statistics.median(seconds),
        "speed of infini / its": ratio,
        "CPU s": None,
        "CPU of infini / its": None,
        "peak MiB": peak,
    }


def grow(
    spec: str, corpus: Corpus, warm_up: Corpus, options: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Cell]], dict[str, Ratio]]:
    """Throughput and memory on the corpus and on a larger one, each in a fresh process."""
    large = folder / "large"
    sizes = {1: corpus.bytes, options.times: write_corpus(large, options.megabytes, options.times)}
    peaks: dict[int, float | None] = dict.fromkeys(sizes)

    def measure(times: int) -> float:
        made = folder / "grown"
        shutil.rmtree(made, ignore_errors=True)
        text = large if times > 1 else corpus.folder
        arguments = [warm_up.folder, text, spec, made]
        ended = run(["-m", "benchmarks.shards_once", *map(str, arguments)])
        found = json.loads(ended.last_line)
        if found["peak_bytes"] is not None:
            peaks[times] = max(peaks[times] or 0.0, found["peak_bytes"] / MEBIBYTE)
        return float(found["seconds"])

    seconds = take_turns(
        {str(times): functools.partial(measure, times) for times in sizes}, options.turns
    )
    rows = [
        row(
            f"{OURS} alone, {size / 1e6:.0f} MB", None, size, seconds[str(times)], peak=peaks[times]
        )
        for times, size in sizes.items()
    ]
    growth = sizes[options.times] / sizes[1]
    pairs = zip(seconds["1"], seconds[str(options.times)], strict=True)
    return rows, {f"rate at {options.times} times": spread([growth * a / b for a, b in pairs])}


def main() -> None:
    """Measure and print the results."""
    options = parse()
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    # The workers are processes: threads within them would oversubscribe the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    targets = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus(folder / "corpus", options.megabytes)
        bpe = train_bpe(corpus, options.vocab_size, folder)
        warm_up = Corpus(folder / "warm-up", 1.0)
        rows, ratios = compare("BPE", bpe, corpus, warm_up, options.turns, folder)
        targets |= {f"{USUAL}, BPE": 40.0, f"{COMPOSITE}, BPE": 1.0}
        targets |= {JSON_LINES_RATE: 0.6, TEXTS_RATE: 0.6}
        more_rows, more = compare("bytes", "bytes", corpus, warm_up, options.turns, folder)
        rows, ratios = rows + more_rows, ratios | more
        if options.times > 1:
            more_rows, more = grow(bpe, corpus, warm_up, options, folder)
            rows, ratios = rows + more_rows, ratios | more
            targets |= dict.fromkeys(more, 0.95)
    heading = (
        f"Parquet to shards, {corpus.bytes / 1e6:.1f} MB of text, a BPE of {options.vocab_size} or "
        f"bytes, {CORES} cores"
    )
    publish("tokenize", heading, rows, ratios, targets, {CPU: 1.1})


if __name__ == "__main__":
    main()
