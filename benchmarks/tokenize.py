"""Text in Parquet to finished, checksummed shards, beside the usual path of the field.

`infini`: read and fingerprint the corpus, tokenise in parallel, close and split documents, write
shards with checksums and a manifest. `datasets.map`: `load_dataset`, a `map` with `tokenizers`, a
`map` that groups the ids into blocks, as many processes. Both end with Arrow files on the disk,
start from nothing each time, and must hold the same ids for the same documents.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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

from benchmarks.corpus import write_corpus
from benchmarks.report import Cell, Ratio, publish, speed_ratio, stopwatch, take_turns
from infini_model.config import DataConfig
from infini_model.data.manifest import SPLITS
from infini_model.data.shards import build_dataset
from infini_model.data.sources import download
from infini_model.data.stream import open_split
from infini_model.data.tokenizers import train_tokenizer

OURS, USUAL = "infini", "datasets.map"
BLOCK = 1024


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenize", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=60.0, help="text at most")
    parser.add_argument("--vocab-size", type=int, default=8192, help="of the BPE")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def ours(parquet: Path, spec: str, workers: int, folder: Path) -> None:
    """Make the shards by this project's path, from nothing, in `folder`."""
    config = DataConfig.model_validate(
        {
            "source": {"paths": [str(parquet)]},
            "tokenizer": {"spec": spec},
            "workers": workers,
        }
    )
    build_dataset(download(config, folder), config, folder)


def usual(parquet: Path, spec: str, workers: int, folder: Path) -> Any:
    """Make blocks by `datasets`, from nothing, in `folder`; returns the ids before grouping."""
    import datasets

    datasets.disable_progress_bars()
    encode = bytes_of if spec == "bytes" else ids_by(spec)
    texts = datasets.load_dataset(
        "parquet", data_files=str(parquet), split="train", cache_dir=str(folder)
    )
    options = {"batched": True, "num_proc": workers, "load_from_cache_file": False}
    ids = texts.map(encode, remove_columns=["text"], **options)
    ids.map(group, **options)
    return ids


Columns = dict[str, list[Any]]


def bytes_of(batch: Columns) -> Columns:
    """Each document's bytes, and 255 behind them."""
    return {"input_ids": [[*text.encode(), 255] for text in batch["text"]]}


def ids_by(file: str) -> Callable[[Columns], Columns]:
    """A function for `map` that encodes by the `tokenizer.json` at `file` and closes documents."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    end = tokenizer.token_to_id("<|end_of_text|>")

    def encode(batch: Columns) -> Columns:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[*encoding.ids, end] for encoding in encodings]}

    return encode


def group(batch: Columns) -> Columns:
    """The ids of a batch one after another, in blocks; what is left over is dropped."""
    ids = list(itertools.chain(*batch["input_ids"]))
    whole = len(ids) // BLOCK * BLOCK
    return {"input_ids": [ids[start : start + BLOCK] for start in range(0, whole, BLOCK)]}


def documents_of_ours(folder: Path) -> Counter[bytes]:
    """How often each document of ids is in our dataset, by its hash."""
    found: Counter[bytes] = Counter()
    for split in SPLITS:
        stream = open_split(folder / "datasets" / "latest", split)
        for index in range(stream.documents):
            found[hash_ids(stream.document(index))] += 1
    return found


def documents_of_usual(ids: Any) -> Counter[bytes]:
    """The same of a dataset of the `datasets` library."""
    found: Counter[bytes] = Counter()
    for batch in ids.with_format("arrow").iter(1000):
        column = batch["input_ids"].combine_chunks()
        for row in range(len(column)):
            found[hash_ids(column[row].values.to_numpy())] += 1
    return found


def hash_ids(ids: np.ndarray) -> bytes:
    """A hash of ids, in whatever type they are stored."""
    return hashlib.blake2b(ids.astype(np.int32).tobytes(), digest_size=16).digest()


class Comparison:
    """Both paths with one tokenizer, on one corpus, below one folder."""

    def __init__(self, parquet: Path, spec: str, workers: int, folder: Path) -> None:
        self._arguments = (parquet, spec, workers)
        self._folder = folder
        self._found: dict[str, Counter[bytes]] = {}

    def peers(self) -> dict[str, Callable[[], float]]:
        """The two for `take_turns`."""
        return {OURS: self._ours, USUAL: self._usual}

    def _ours(self) -> float:
        folder = self._emptied(OURS)
        seconds = stopwatch(lambda: ours(*self._arguments, folder))()
        self._found[OURS] = documents_of_ours(folder)
        return seconds

    def _usual(self) -> float:
        folder, made = self._emptied(USUAL), []
        seconds = stopwatch(lambda: made.append(usual(*self._arguments, folder)))()
        self._found[USUAL] = documents_of_usual(made[0])
        return seconds

    def _emptied(self, name: str) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def check_same_ids(self) -> int:
        """The number of documents. Raises `SystemExit` unless both have the same ids for each."""
        if self._found[OURS] != self._found[USUAL]:
            raise SystemExit(f"{self._arguments[1]}: the two paths give different ids")
        return self._found[OURS].total()


def train_bpe(parquet: Path, vocab_size: int, folder: Path) -> str:
    """Train a byte-level BPE on the corpus; returns the path of its `tokenizer.json`."""
    column = pq.read_table(parquet)["text"].combine_chunks().cast(pa.string())
    train_tokenizer([column], vocab_size).save(folder)
    return str(folder / "tokenizer.json")


def compare(
    name: str, spec: str, parquet: Path, size: int, options: argparse.Namespace
) -> tuple[dict[str, Cell], Ratio]:
    """The row of one tokenizer, and our speed over that of the usual path."""
    comparison = Comparison(parquet, spec, options.workers, parquet.parent / name)
    seconds = take_turns(comparison.peers(), options.turns)
    documents = comparison.check_same_ids()
    ratio = speed_ratio(seconds[OURS], seconds[USUAL])
    rates = {
        f"{peer} MB/s": size / 1e6 / statistics.median(times) for peer, times in seconds.items()
    }
    return {"tokenizer": name, "documents": documents, **rates, f"speed / {USUAL}": ratio}, ratio


def main() -> None:
    """Measure both tokenizers and tell it."""
    options = parse()
    # Workers are processes: threads within them would only get in each other's way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with tempfile.TemporaryDirectory() as folder:
        parquet = Path(folder) / "corpus.parquet"
        size = write_corpus(parquet, options.megabytes)
        bpe = train_bpe(parquet, options.vocab_size, Path(folder))
        specs = {"bytes": "bytes", f"BPE of {options.vocab_size}": bpe}
        compared = {
            name: compare(name, spec, parquet, size, options) for name, spec in specs.items()
        }
    rows = [row for row, _ in compared.values()]
    ratios = {f"{USUAL}, {name}": ratio for name, (_, ratio) in compared.items()}
    heading = f"Parquet to shards, {size / 1e6:.1f} MB of text, {options.workers} processes"
    publish("tokenize", heading, rows, ratios)


if __name__ == "__main__":
    main()
