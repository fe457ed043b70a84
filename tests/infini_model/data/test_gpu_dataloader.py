"""The guide's names give what the data path gives, on any device."""

import numpy as np
import torch

from infini_model.config import PackingConfig
from infini_model.data.gpu_dataloader import (
    GPUDataCollatorForCLM,
    get_gpu_train_dataloader,
    gpu_clm_process,
)
from infini_model.data.loader import Loader, open_windows
from infini_model.data.tokenizers import ByteTokenizer


def test_windows_are_cut_from_the_closed_documents():
    windows = gpu_clm_process(["abc", "", "defgh"], ByteTokenizer(), 4, "cpu")
    assert windows.dtype == torch.int64
    stream = [*b"abc", 255, 255, *b"defgh", 255]
    assert windows.tolist() == [stream[0:5], stream[4:9]]
    assert gpu_clm_process(["a"], ByteTokenizer(), 4, "cpu").shape == (0, 5)


def test_the_collator_shifts_and_masks():
    collate = GPUDataCollatorForCLM("cpu")
    batch = collate([{"input_ids": [1, 2, 3]}, {"input_ids": np.array([4, 5], np.uint16)}])
    assert batch["input_ids"].tolist() == [[1, 2], [4, 5]]
    assert batch["labels"].tolist() == [[2, 3], [5, -100]]


def test_the_loader_is_the_loader(byte_dataset):
    packing = PackingConfig(context_length=64)
    options = {"batch_size": 3, "seed": 2, "consumed": 6}
    with (
        get_gpu_train_dataloader(byte_dataset, packing, 16, **options, device="cpu") as one,
        Loader(open_windows(byte_dataset, "train", packing, 16), **options) as other,
    ):
        for mine, theirs in zip(next(one), next(other), strict=True):
            assert torch.equal(mine.input_ids, theirs.input_ids)
            assert torch.equal(mine.labels, theirs.labels)
