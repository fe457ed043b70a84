"""The tokenizer of a dataset: loaded by name, or trained on the corpus.

A trained tokenizer is cached under `<output_dir>/datasets/.tokenizers/<key>/`: the same documents
and vocabulary size give the same `tokenizer.json`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from infini_model.config import DataConfig
from infini_model.data.manifest import Corpus
from infini_model.data.sources.content import hash_documents
from infini_model.data.sources.documents import read_documents
from infini_model.data.sources.download import reading_of
from infini_model.data.sources.formats import Reading
from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, TOKENIZER_FILE, train_tokenizer
from infini_model.data.tokenizers.load import check_device, load_saved, load_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.runtime import storage

log = logging.getLogger(__name__)

# More text hardly changes the merges, and the trainer keeps all words in memory.
SAMPLE_BYTES = 128 << 20


def corpus_tokenizer(corpus: Corpus, config: DataConfig, output_dir: Path) -> Tokenizer:
    """The tokenizer that `config` asks for, on the CPU; `train` trains it once on the corpus.

    The workers put it on their devices. A corpus of over 128 MiB is sampled to that size by content
    hash. Raises `DataError` as `load_tokenizer` and `train_tokenizer` do, `DeviceError` for a GPU
    that does not exist.
    """
    check_device(config.device)
    if config.tokenizer.spec != "train":
        return load_tokenizer(config.tokenizer.spec)
    tokenizers_dir = output_dir / "datasets" / ".tokenizers"
    size = config.tokenizer.vocab_size
    ingredients = [corpus.fingerprint, size, LLAMA3_PATTERN, SAMPLE_BYTES]
    key = storage.content_key(ingredients)[:32]
    folder = tokenizers_dir / key
    with storage.lock(tokenizers_dir / ".locks" / key):
        if not (folder / TOKENIZER_FILE).is_file():
            storage.remove_leftovers(tokenizers_dir, key)
            trained = train_tokenizer(_sample(corpus, reading_of(config)), size)
            if trained.vocab_size < size:
                log.warning(
                    "the corpus yields only %d tokens, fewer than data.tokenizer.vocab_size=%d",
                    trained.vocab_size,
                    size,
                )
            with storage.atomic_folder(folder) as temporary:
                trained.save(temporary)
    return load_saved(folder, "train")


def _sample(corpus: Corpus, reading: Reading) -> Iterator[pa.StringArray]:
    """The documents, or a sample of about `SAMPLE_BYTES` chosen by content hash."""
    share = min(1.0, SAMPLE_BYTES / corpus.bytes)
    if share < 1.0:
        log.info("training the tokenizer on %.1f%% of the documents", 100 * share)
    for batch in read_documents([file.path for file in corpus.files], reading):
        if share == 1.0:
            yield batch.texts
        else:
            # The middle bits of the hash, which decide neither the bucket nor the split.
            place = (hash_documents(batch.texts)[:, 0] & np.uint64(0xFFFFFFFF)) / 2.0**32
            yield batch.texts.filter(pa.array(place < share))
