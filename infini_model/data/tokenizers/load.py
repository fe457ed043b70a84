"""The tokenizer that a name stands for: bytes, a `tokenizer.json`, or one from the hub."""

from __future__ import annotations

from pathlib import Path

from infini_model.data.manifest import read_manifest
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE, BPETokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.runtime.errors import DataError, DeviceError


def load_tokenizer(spec: str, device: str = "cpu") -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, a path to a `tokenizer.json`, or a hub name.

    `device` is `cpu`, `auto` (the CPU as well), `cuda` or `cuda:N`. On a GPU comes a
    `DeviceTokenizer`, unless the tokenizer has a part that only the CPU knows: then one log line
    names it. Bytes are always counted on the CPU.

    Raises `DataError` where the file is no tokenizer or has no end-of-text token, `DeviceError`
    where the device is not there, `SourceUnreachableError` where the hub cannot be reached.
    """
    check_device(device)
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "train":
        raise DataError("tokenizer train: is made from a corpus, by build_dataset")
    path = Path(spec).expanduser()
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        if spec.endswith(".json") or spec.count("/") > 1 or spec.startswith((".", "/", "~")):
            raise DataError(f"{spec}: there is no such tokenizer file")
        from infini_model.data.sources.hub import fetch_tokenizer

        path = fetch_tokenizer(spec)
    return _load_file(path, spec, device)


def check_device(device: str) -> None:
    """Raise `DeviceError` where `device` is a GPU that is not there."""
    if not device.startswith("cuda"):
        return
    import torch

    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"data.device: got {device!r}: there are {torch.cuda.device_count()} GPUs"
        )


def _load_file(path: Path, spec: str, device: str) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no tokenizer.json: it is not UTF-8") from error
    tokenizer = BPETokenizer(spec, text)
    tokenizer.use_gigatoken()
    if not device.startswith("cuda"):
        return tokenizer
    from infini_model.data.tokenizers.gpu.device_tokenizer import put_on_device

    return put_on_device(tokenizer, device)


def load_saved(folder: Path, spec: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` left in `folder`; `spec` is what it was asked for as."""
    if spec == "bytes":
        return ByteTokenizer()
    return _load_file(folder / TOKENIZER_FILE, spec, "cpu")


def load_dataset_tokenizer(dataset_dir: Path) -> Tokenizer:
    """The tokenizer that a dataset folder was made with, from the copy that it keeps.

    Raises `DataError` where the folder is no complete dataset, or the copy is not the one that
    its manifest tells of.
    """
    record = read_manifest(dataset_dir).tokenizer
    tokenizer = load_saved(dataset_dir, record.spec)
    if tokenizer.fingerprint != record.fingerprint:
        raise DataError(f"{dataset_dir / TOKENIZER_FILE}: is not the tokenizer of its manifest")
    return tokenizer
