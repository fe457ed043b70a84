"""Which device each worker tokenises on, and that it makes no difference."""

import json
import sys

import pytest
import torch
from corpora import build, files_config, make_texts, write_parquet

from infini_model.config import DataConfig
from infini_model.data.shards import dataset
from infini_model.data.shards.workers import worker_devices
from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.load import on_device
from infini_model.data.tokenizers.tokenizer import ByteTokenizer
from infini_model.data.tokenizers.vocabulary import dataset_tokenizer


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


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("device", ["cuda", "mixed", "cuda:1"])
@pytest.mark.parametrize("kind", ["bytes", "normalizer"])
def test_a_device_without_effect_is_one_warning(monkeypatch, trained, caplog, device, kind):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    tokenizer, part = ByteTokenizer(), "tokenizer bytes"
    if kind == "normalizer":
        tree = json.loads(trained.definition()) | {"normalizer": {"type": "NFC"}}
        tokenizer, part = BPETokenizer("x", json.dumps(tree)), "normalizer NFC"
    assert worker_devices(DataConfig(device=device, workers=2), tokenizer) == ["cpu", "cpu"]
    assert warnings_of(caplog) == [
        f"data.device={device} has no effect: {part} is not supported on a GPU; "
        "tokenising on the CPU with 2 threads instead"
    ]


def test_a_gpu_needs_triton(monkeypatch, trained, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert on_device(trained, "cuda:1") is trained
    assert worker_devices(DataConfig(device="cuda", workers=1), trained) == ["cpu"]
    reason = "Triton, which a GPU needs to tokenise, is not installed"
    assert warnings_of(caplog) == [
        f"cuda:1 is not used: {reason}; tokenising on the CPU",
        f"data.device=cuda has no effect: {reason}; tokenising on the CPU with 1 threads instead",
    ]


def test_mixed_without_a_gpu_is_one_warning(monkeypatch, trained, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    worker_devices(DataConfig(device="mixed", workers=3), trained)
    assert warnings_of(caplog) == [
        "data.device=mixed has no effect: this machine has no GPU; "
        "tokenising on the CPU with 3 threads instead"
    ]


def test_a_build_of_bytes_on_a_gpu_warns_and_uses_the_cpu(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    raw = write_parquet(tmp_path / "a.parquet", make_texts(5))
    manifest, _ = build(files_config(raw, device="cuda", workers=1), tmp_path)
    assert manifest.documents == 5
    (warning,) = warnings_of(caplog)
    assert warning.startswith("data.device=cuda has no effect: tokenizer bytes is not supported")


def test_a_gpu_that_gives_other_ids_is_replaced_by_the_cpu(monkeypatch, tmp_path, caplog):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu import device_tokenizer

    def disagree(tokenizer, device):
        raise UnsupportedTokenizerError(f"{device} and tokenizers disagree")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device_tokenizer, "put_on_device", disagree)
    raw = write_parquet(tmp_path / "a.parquet", make_texts(5))
    config = files_config(raw, device="cuda", tokenizer={"spec": "train", "vocab_size": 280})
    manifest, _ = build(config, tmp_path)
    assert manifest.documents == 5
    assert warnings_of(caplog) == [
        "cuda:0 is not used: cuda:0 and tokenizers disagree; tokenising on the CPU"
    ]


@pytest.mark.cuda
def test_shards_do_not_depend_on_the_device(monkeypatch, tmp_path, gpu):
    pytest.importorskip("triton")
    from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer

    raw = write_parquet(tmp_path / "a.parquet", make_texts(7, longest=40))
    config = files_config(raw, tokenizer={"spec": "train", "vocab_size": 300}, workers=1)
    expected, _ = build(config, tmp_path / "host")

    def on_tensors(*asked):
        asked_for = dataset_tokenizer(*asked)
        tensors = DeviceTokenizer(asked_for.tokenizer, gpu, 1 << 12)
        return asked_for._replace(tokenizer=tensors)

    monkeypatch.setattr(dataset, "dataset_tokenizer", on_tensors)
    manifest, _ = build(config.model_copy(update={"batch_size": 3}), tmp_path / "device")
    assert manifest.key == expected.key
    assert manifest.splits == expected.splits
