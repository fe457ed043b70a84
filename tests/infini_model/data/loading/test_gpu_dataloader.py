"""The former GPU data loader's functions match the data pipeline, on any device."""

import numpy as np
import pytest
import torch

from infini_model.config import PackingConfig
from infini_model.data.loading.gpu_dataloader import (
    get_gpu_train_dataloader,
    gpu_clm_process,
    gpu_clm_windows,
)
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.shards.stream import TokenStream
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer


def test_windows_are_cut_from_documents_with_end_of_text():
    windows = gpu_clm_process(["abc", "", "defgh"], ByteTokenizer(), 4, "cpu")
    assert windows.dtype == torch.int64
    stream = [*b"abc", 255, 255, *b"defgh", 255]
    assert windows.tolist() == [stream[0:5], stream[4:9]]
    assert gpu_clm_process(["a"], ByteTokenizer(), 4, "cpu").shape == (0, 5)


def test_the_gpu_dataloader_is_a_loader(byte_dataset):
    packing = PackingConfig(context_length=64)
    options = {"batch_size": 3, "seed": 2, "consumed": 6}
    with (
        get_gpu_train_dataloader(byte_dataset, packing, 16, **options, device="cpu") as one,
        Loader(open_windows(byte_dataset, "train", packing, 16), **options) as other,
    ):
        for mine, theirs in zip(next(one), next(other), strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert mine.valid is theirs.valid is None
            assert torch.equal(mine.keys, theirs.keys)


@pytest.mark.parametrize("mode", ["packed", "document", "aligned"])
@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_windows_of_texts_match_those_of_their_dataset(texts, mode, remainder):
    host = train_tokenizer([texts], 300)
    packing = PackingConfig(mode=mode, context_length=32, remainder=remainder)
    ids, offsets = host.encode_batch(texts)
    closed = np.insert(ids, offsets[1:], host.eos_token_id)
    ends = offsets + np.arange(len(offsets))
    stream = TokenStream([closed], [ends.astype(np.int32)], host.eos_token_id)
    rows = pack(stream.tokens, lambda: stream.document_offsets, packing, 8)
    expected = Windows(stream, rows, mode == "aligned", "texts").gather(np.arange(rows.windows))
    assert rows.windows > 100
    for tokenizer in (host, DeviceTokenizer(host, torch.device("cpu"), 1 << 12)):
        batch = gpu_clm_windows(texts, tokenizer, packing, 8, "cpu")
        for mine, theirs in zip(batch, expected, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
        if mode == "packed":
            windows = gpu_clm_process(texts, tokenizer, 32, "cpu")
            assert torch.equal(windows, expected.tokens.squeeze(1))


def test_empty_text_gives_no_windows():
    for mode in ("packed", "document", "aligned"):
        packing = PackingConfig(mode=mode, context_length=32)
        batch = gpu_clm_windows([], ByteTokenizer(), packing, 8, "cpu")
        rows = 4 if mode == "aligned" else 1
        assert batch.tokens.shape == (0, rows, 32 // rows + 1)
        assert batch.valid is None
