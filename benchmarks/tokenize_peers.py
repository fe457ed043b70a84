"""The peers of `benchmarks.tokenize`, which describes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.data.tokenizers.bpe import END_OF_TEXT, LLAMA3_PATTERN

BLOCK = 1024


def usual(corpus: Path, spec: str, workers: int, folder: Path) -> Any:
    """Make blocks with `datasets`, from scratch, in `folder`; returns the ids before grouping."""
    import datasets

    datasets.disable_progress_bars()
    encode = bytes_of if spec == "bytes" else ids_by(spec)
    texts = datasets.load_dataset(
        "parquet", data_files=str(corpus / "*.parquet"), split="train", cache_dir=str(folder)
    )
    options = {"batched": True, "num_proc": workers, "load_from_cache_file": False}
    ids = texts.map(encode, remove_columns=["text"], **options)
    ids.map(group, **options)
    return ids


Columns = dict[str, list[Any]]


def bytes_of(batch: Columns) -> Columns:
    """Each document's bytes, followed by 255."""
    return {"input_ids": [[*text.encode(), 255] for text in batch["text"]]}


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
