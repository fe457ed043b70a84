"""Who tokenises where, and that it makes no difference."""

import pytest
import torch
from corpora import build, files_config, make_texts, write_parquet

from infini_model.config import DataConfig
from infini_model.data.shards import dataset
from infini_model.data.shards.workers import worker_devices
from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.data.tokenizers.vocabulary import corpus_tokenizer


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([make_texts(20)], 280)


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("auto", 2, ["cpu"] * 3),
        ("cpu", 2, ["cpu"] * 3),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("mixed", 2, ["cuda:0", "cuda:1", "cpu"]),
        ("mixed", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("mixed", 0, ["cpu"] * 3),
    ],
)
def test_workers_have_devices(monkeypatch, trained, device, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert worker_devices(DataConfig(device=device, workers=3), trained) == expected


def test_what_gpus_cannot_do_the_cpu_does_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = DataConfig(device="cuda", workers=2)
    assert worker_devices(config, ByteTokenizer()) == ["cpu", "cpu"]
    assert "bytes: is tokenised on the CPU: tokenizer bytes is not done on a GPU" in caplog.text


def test_shards_do_not_depend_on_the_device(monkeypatch, tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", make_texts(150))
    config = files_config(raw, tokenizer={"spec": "train", "vocab_size": 300}, workers=1)
    expected, _ = build(config, tmp_path / "host")

    def on_tensors(*asked):
        return DeviceTokenizer(corpus_tokenizer(*asked), torch.device("cpu"), 1 << 12)

    monkeypatch.setattr(dataset, "corpus_tokenizer", on_tensors)
    manifest, _ = build(config.model_copy(update={"batch_size": 7}), tmp_path / "device")
    assert manifest.key == expected.key
    assert manifest.splits == expected.splits
