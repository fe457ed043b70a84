"""The former GPU data loader's functions match the data pipeline, on any device."""

import numpy as np
import pytest
import torch
from streams import write_shard
from templates import with_bos

from infini_model.config import PackingConfig
from infini_model.data.loading.gpu_dataloader import (
    get_gpu_train_dataloader,
    gpu_clm_process,
    gpu_clm_windows,
)
from infini_model.data.loading.loader import Loader
from infini_model.data.loading.packing import pack
from infini_model.data.loading.windows import Windows, open_windows
from infini_model.data.shards.shard_files import ShardFiles
from infini_model.data.shards.stream import TokenStream
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer


@pytest.mark.parametrize("mode", ["packed", "aligned"])
def test_the_gpu_dataloader_is_a_loader(byte_dataset, each_device, mode):
    packing = PackingConfig(mode=mode, context_length=64)
    options = {"batch_size": 3, "gradient_accumulation_steps": 2, "seed": 2, "consumed": 6}
    with (
        get_gpu_train_dataloader(byte_dataset, packing, 16, **options, device=each_device) as one,
        Loader(open_windows(byte_dataset, "train", packing, 16), **options) as other,
    ):
        # More steps than are read ahead, so that buffers are used again.
        for _ in range(20):
            for mine, theirs in zip(next(one), next(other), strict=True):
                assert mine.tokens.device.type == each_device.type
                assert_same(mine, theirs)


def assert_same(mine, theirs):
    """Two batches have the same numbers, wherever they are."""
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None and other is None) or torch.equal(one.cpu(), other)


def as_a_dataset(tmp_path, texts, host, packing):
    """The windows of a dataset of the texts."""
    ids, offsets = host.encode_batch(texts)
    bos = [] if host.bos_token_id is None else [host.bos_token_id]
    documents = [[*bos, *row, host.eos_token_id] for row in np.split(ids, offsets[1:-1])]
    closed = np.concatenate(documents, dtype=np.int32)
    shard = write_shard(tmp_path / "texts.arrow", closed, [len(each) for each in documents])
    stream = TokenStream(ShardFiles(tmp_path, [shard], closed.dtype), host.eos_token_id)
    rows = pack(stream, packing, 8)
    return Windows(stream, rows, packing.mode == "aligned", "texts").gather(np.arange(rows.windows))


@pytest.mark.parametrize(
    ("mode", "remainder", "begun"),
    [
        ("packed", "drop", False),
        ("packed", "drop", True),
        ("document", "drop", False),
        ("document", "pad", True),
        ("aligned", "drop", True),
    ],
)
def test_windows_of_texts_match_those_of_their_dataset(
    tmp_path, texts, each_device, mode, remainder, begun
):
    host = train_tokenizer([texts], 300)
    if begun:
        host = BPETokenizer("x", with_bos(host.text))
    packing = PackingConfig(mode=mode, context_length=32, remainder=remainder)
    expected = as_a_dataset(tmp_path, texts, host, packing)
    assert len(expected.tokens) > 100
    assert_same(gpu_clm_windows(texts, host, packing, 8, each_device), expected)
    if mode == "packed":
        windows = gpu_clm_process(texts, host, 32, each_device)
        assert torch.equal(windows.cpu(), expected.tokens.squeeze(1))


@pytest.mark.cuda
def test_windows_of_a_gpu_tokenizer_match_those_of_the_dataset(tmp_path, texts, gpu):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer

    texts = texts[:3]
    host = BPETokenizer("x", with_bos(train_tokenizer([texts], 300).text))
    on_gpu = DeviceTokenizer(host, gpu, 1 << 12)
    for mode in ("packed", "aligned"):
        packing = PackingConfig(mode=mode, context_length=32, remainder="pad")
        expected = as_a_dataset(tmp_path, texts, host, packing)
        assert_same(gpu_clm_windows(texts, on_gpu, packing, 8, gpu), expected)


def test_too_little_text_gives_no_windows():
    packing = PackingConfig(mode="aligned", context_length=32)
    batch = gpu_clm_windows([], ByteTokenizer(), packing, 8, "cpu")
    assert (batch.tokens.shape, batch.valid) == ((0, 4, 9), None)
    assert gpu_clm_process(["a"], ByteTokenizer(), 4, "cpu").shape == (0, 5)
