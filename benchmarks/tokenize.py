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

With `--device cuda` all this is left out, and the peer is `infini` on all cores: text to shards,
where the GPUs encode and the cores do everything else. Its shards must be the same.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.corpus import text_to_shards, write_as_json_lines, write_as_texts, write_corpus
from benchmarks.report import (
    Cell,
    Ratio,
    cpu_seconds,
    publish,
    run,
    speed_ratio,
    spread,
    stopwatch,
    take_turns,
)
from infini_model.data.loading.stream import open_split
from infini_model.data.manifest import SPLITS
from infini_model.data.tokenizers.bpe import END_OF_TEXT, LLAMA3_PATTERN, train_tokenizer
from infini_model.runtime.machine import available_cores

OURS, USUAL, DATATROVE, COMPOSITE = "infini", "datasets.map", "datatrove", "composite"
GIGATOKEN, TIKTOKEN = "gigatoken", "tiktoken"
JSON_LINES, TEXTS = "infini, JSON lines", "infini, text files"
CPU = "CPU of infini / composite's"
JSON_LINES_RATE, TEXTS_RATE = "rate of JSON lines / Parquet", "rate of text files / Parquet"
MEBIBYTE = 1 << 20
BLOCK = 1024
CORES = available_cores()

Columns = dict[str, list[Any]]


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
    parser.add_argument("--device", help="data.device to measure beside all cores")
    parser.add_argument(
        "--shards",
        nargs=4,
        metavar=("WARM_UP", "CORPUS", "SPEC", "FOLDER"),
        help="only make these, after a warm-up",
    )
    return parser.parse_args()


def usual(corpus: Path, spec: str, workers: int, folder: Path) -> Any:
    """Make blocks with `datasets`, from scratch, in `folder`; returns the ids before grouping."""
    import datasets

    datasets.disable_progress_bars()
    texts = datasets.load_dataset(
        "parquet", data_files=str(corpus / "*.parquet"), split="train", cache_dir=str(folder)
    )
    options = {"batched": True, "num_proc": workers, "load_from_cache_file": False}
    ids = texts.map(ids_by(spec), remove_columns=["text"], **options)
    ids.map(group, **options)
    return ids


def ids_by(file: str) -> Callable[[Columns], Columns]:
    """A function for `map` that encodes with the `tokenizer.json` `file` and adds end-of-text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    end = tokenizer.token_to_id(END_OF_TEXT[0])

    def encode(batch: Columns) -> Columns:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*encoding.ids, end] for encoding in encodings]}

    return encode


def group(batch: Columns) -> Columns:
    """The concatenated ids of a batch, cut into blocks; the remainder is dropped."""
    ids = list(itertools.chain(*batch["input_ids"]))
    whole = len(ids) // BLOCK * BLOCK
    return {"input_ids": [ids[start : start + BLOCK] for start in range(0, whole, BLOCK)]}


def gigatoken_ids(definition: str, texts: pa.LargeStringArray) -> int:
    """Encode with `gigatoken` on all cores; returns the number of tokens."""
    return len(_encode(definition, texts)[0])


def _encode(definition: str, texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """The ids, and the offsets of the documents."""
    import awkward as ak  # type: ignore[import-untyped]
    from gigatoken import Tokenizer

    _, offsets, octets = texts.buffers()
    characters = ak.contents.NumpyArray(
        np.frombuffer(octets, np.uint8), parameters={"__array__": "char"}
    )
    index = ak.index.Index64(np.frombuffer(offsets, np.int64)[: len(texts) + 1])
    strings = ak.contents.ListOffsetArray(index, characters, parameters={"__array__": "string"})
    layout = Tokenizer.from_json(definition).encode_batch(ak.Array(strings)).layout
    return np.asarray(layout.content.data), np.asarray(layout.offsets.data)


def composite(definition: str, corpus: Path, folder: Path) -> int:
    """Parquet to Arrow with a minimal pipeline; returns the number of tokens."""
    texts = pq.read_table(corpus)["text"].cast(pa.large_string()).combine_chunks()
    ids, offsets = _encode(definition, texts)
    rows = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids.astype(np.uint16)))
    batch = pa.RecordBatch.from_arrays([rows], names=["input_ids"])
    path = str(folder / "ids.arrow")
    with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
        out.write_batch(batch)
    return len(ids)


def datatrove(corpus: Path, spec: str, workers: int, folder: Path) -> None:
    """Tokenise with `datatrove`, the files split among the processes."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    LocalPipelineExecutor(
        [
            ParquetReader(str(corpus)),
            DocumentTokenizer(
                str(folder / "ids"), spec, eos_token=END_OF_TEXT[0], shuffle_documents=False
            ),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(folder / "logs"),
    ).run()


def tiktoken_of(file: str) -> Any:
    """The `tokenizer.json` at `file` as a `tiktoken` encoding."""
    import tiktoken
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [b for b in range(256) if chr(b) in alphabet]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable}
    byte_of |= {chr(256 + place): b for place, b in enumerate(others)}
    vocabulary = json.loads(Path(file).read_text())["model"]["vocab"]
    ranks = {
        bytes(byte_of[letter] for letter in token): rank
        for token, rank in vocabulary.items()
        if token != END_OF_TEXT[0]
    }
    return tiktoken.Encoding(
        "ours", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


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
    """The pipelines on one corpus, in one folder."""

    def __init__(self, corpus: Corpus, spec: str, folder: Path) -> None:
        self._corpus, self._spec, self._folder = corpus, spec, folder
        self._documents: dict[str, Counter[bytes]] = {}
        self._tokens: dict[str, int] = {}
        self.cpu_seconds: dict[str, list[float]] = {}

    def peers(self) -> dict[str, Callable[[], float]]:
        """The pipelines for `take_turns`."""
        corpus = self._corpus
        return {
            OURS: functools.partial(self._ours, OURS, corpus.folder, "*.parquet"),
            USUAL: self._usual,
            JSON_LINES: functools.partial(self._ours, JSON_LINES, corpus.json_lines, "*.jsonl"),
            TEXTS: functools.partial(self._ours, TEXTS, corpus.text_files, "*.txt"),
            COMPOSITE: self._composite,
            DATATROVE: self._datatrove,
            GIGATOKEN: self._gigatoken,
            TIKTOKEN: self._tiktoken,
        }

    def check_same_ids(self) -> int:
        """The number of documents. Raises `SystemExit` unless all pipelines give the same ids."""
        for name, documents in self._documents.items():
            if documents != self._documents[OURS]:
                raise SystemExit(f"{OURS} and {name} give different ids")
        if len(set(self._tokens.values())) > 1:
            raise SystemExit(f"different numbers of tokens: {self._tokens}")
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


def compare(
    spec: str, corpus: Corpus, warm_up: Corpus, turns: int, folder: Path
) -> tuple[list[dict[str, Cell]], dict[str, Ratio]]:
    """A row per pipeline, and our speed relative to each."""
    take_turns(Comparison(warm_up, spec, folder).peers(), 1)
    comparison = Comparison(corpus, spec, folder)
    seconds = take_turns(comparison.peers(), turns)
    documents = comparison.check_same_ids()
    cpu = comparison.cpu_seconds
    ratios = {
        peer: speed_ratio(seconds[OURS], times) for peer, times in seconds.items() if peer != OURS
    }
    cpu_ratios = {peer: speed_ratio(cpu[peer], cpu[OURS]) for peer in cpu if peer != OURS}
    rows = [
        row(peer, documents, corpus.bytes, times, ratio=ratios.get(peer))
        | {
            "CPU s": statistics.median(cpu[peer]) if peer in cpu else None,
            "CPU of infini / its": cpu_ratios.get(peer),
        }
        for peer, times in seconds.items()
    ]
    ratios[CPU] = cpu_ratios[COMPOSITE]
    ratios[JSON_LINES_RATE] = speed_ratio(seconds[JSON_LINES], seconds[OURS])
    ratios[TEXTS_RATE] = speed_ratio(seconds[TEXTS], seconds[OURS])
    return rows, ratios


def compare_device(device: str, megabytes: float, turns: int, folder: Path, size: int) -> None:
    """Measure and print the speed on a device relative to that on all cores."""
    corpus, spec = folder / "corpus", str(folder / "tokenizer.json")
    text_bytes = write_corpus(corpus, megabytes)
    column = pq.read_table(corpus)["text"]
    train_tokenizer([column.slice(0, len(column) // 8).to_pylist()], size).save(folder)

    def make(where: str) -> float:
        made = folder / where
        shutil.rmtree(made, ignore_errors=True)
        return stopwatch(lambda: text_to_shards(corpus, spec, made, device=where))()

    peers = {
        name: functools.partial(make, where)
        for name, where in {"cores": "cpu", device: device}.items()
    }
    take_turns(peers, 1)
    seconds = take_turns(peers, turns)
    hashes = {documents_hash(folder / where) for where in {"cpu", device}}
    if len(hashes) > 1:
        raise SystemExit(f"{device} and the CPU give different shards")
    ratio = speed_ratio(seconds[device], seconds["cores"])
    rows = [row(name, len(column), text_bytes, times) for name, times in seconds.items()]
    heading = f"Text to shards, {text_bytes / 1e6:.1f} MB, a BPE of {size}, {CORES} cores"
    name = f"speed of {device} / cores"
    publish("tokenize", heading, rows, {name: ratio}, {name: 1.2}, {})


def documents_hash(folder: Path) -> str:
    """A hash of all shards of a dataset."""
    shards = sorted((folder / "datasets" / "latest").resolve().rglob("*.arrow"))
    content = hashlib.sha256()
    for shard in shards:
        content.update(shard.read_bytes())
    return content.hexdigest()


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
        ended = run(["-m", "benchmarks.tokenize", "--shards", *map(str, arguments)])
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


def print_shards(warm_up: str, corpus: str, spec: str, folder: str) -> None:
    """Make shards in this process; prints the seconds and its peak memory as one line of JSON.

    The memory includes mapped files (Linux; null elsewhere). `wait4` would report at least that of
    the parent.
    """
    text_to_shards(Path(warm_up), spec, Path(folder) / "warm-up")
    began = time.perf_counter()
    text_to_shards(Path(corpus), spec, Path(folder) / "measured")
    seconds, peak, status = time.perf_counter() - began, None, Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        peak = int(lines["VmHWM"].split()[0]) * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


def main() -> None:
    """Measure and print the results."""
    options = parse()
    if options.shards:
        print_shards(*options.shards)
        return
    if options.device:
        with tempfile.TemporaryDirectory() as name:
            numbers = options.megabytes, options.turns, Path(name), options.vocab_size
            compare_device(options.device, *numbers)
        return
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    # The workers are processes: threads within them would oversubscribe the cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    targets = {USUAL: 40.0, COMPOSITE: 1.0, JSON_LINES_RATE: 0.6, TEXTS_RATE: 0.6}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = Corpus(folder / "corpus", options.megabytes)
        train_tokenizer([corpus.texts], options.vocab_size).save(folder)
        spec = str(folder / "tokenizer.json")
        warm_up = Corpus(folder / "warm-up", 1.0)
        rows, ratios = compare(spec, corpus, warm_up, options.turns, folder / "made")
        if options.times > 1:
            more_rows, more = grow(spec, corpus, warm_up, options, folder)
            rows, ratios = rows + more_rows, ratios | more
            targets |= dict.fromkeys(more, 0.95)
    heading = (
        f"Parquet to shards, {corpus.bytes / 1e6:.1f} MB of text, a BPE of {options.vocab_size}, "
        f"{CORES} cores"
    )
    publish("tokenize", heading, rows, ratios, targets, {CPU: 1.1})


if __name__ == "__main__":
    main()
