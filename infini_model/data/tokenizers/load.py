"""Loading a tokenizer by name: bytes, a `tokenizer.json`, or one from the hub."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path

from infini_model.config.model import TOKENIZER_NAME
from infini_model.data.manifest import AGAIN, read_manifest
from infini_model.data.tokenizers.bpe import TOKENIZER_FILE, BPETokenizer, checked_gigatoken
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.runtime.errors import DataError, DeviceError
from infini_model.runtime.storage import MANIFEST

log = logging.getLogger(__name__)


def load_tokenizer(spec: str, device: str = "cpu") -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, a path to a `tokenizer.json`, or a hub name.

    A hub name may end in `@revision`, and a path may be that of a folder with the file. Where
    a folder or a model has none, its config.json may name `bytes`, as exports do.

    `device` is `cpu`, `auto` (also the CPU), `cuda` or `cuda:N`. A GPU gives a `DeviceTokenizer`,
    or the tokenizer on the CPU with a warning if it cannot run on a GPU, as that of bytes.

    Raises `DataError` if the file is not a tokenizer or has no end-of-text token, `DeviceError` if
    the device does not exist, `UnreachableError` if the hub cannot be reached.
    """
    check_device(device)
    return on_device(_load(spec), device)


def _load(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names, on the CPU."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "train":
        raise DataError("tokenizer train: is trained on a corpus, by build_dataset")
    if spec == "model":
        raise DataError("tokenizer model: is that of model.initial_weights, which is not set")
    path = Path(spec).expanduser()
    if path.is_file():
        return _load_file(path, spec)
    if not path.is_dir():
        if spec.endswith(".json") or spec.count("/") > 1 or spec.startswith((".", "/", "~")):
            raise DataError(f"{spec}: no such tokenizer file")
        from infini_model.data.sources.hub import fetch_tokenizer

        path = fetch_tokenizer(spec)
    tokenizer = tokenizer_of(path, spec)
    if tokenizer is None:
        raise DataError(f"{spec}: has no {TOKENIZER_FILE}")
    return tokenizer


def tokenizer_of(folder: Path, spec: str) -> Tokenizer | None:
    """The tokenizer that a folder of weights, which is named `spec`, brings, if any."""
    if (folder / TOKENIZER_FILE).is_file():
        return _load_file(folder / TOKENIZER_FILE, spec)
    # A config.json that is missing or damaged is for whoever reads the weights to tell.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if tree.get(TOKENIZER_NAME) == ByteTokenizer.spec:
            return ByteTokenizer()
    return None


def check_device(device: str) -> None:
    """Raise `DeviceError` if `device` is a GPU that does not exist."""
    if not device.startswith("cuda"):
        return
    import torch

    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"data.device: got {device!r}: this machine has {torch.cuda.device_count()} GPUs"
        )


def _load_file(path: Path, spec: str) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not a tokenizer.json: it is not UTF-8") from error
    return BPETokenizer(spec, text, make_fast=checked_gigatoken)


def on_device(tokenizer: Tokenizer, device: str) -> Tokenizer:
    """The tokenizer on a device, or itself with a warning if it cannot run on that GPU."""
    if not device.startswith("cuda"):
        return tokenizer
    reason = why_unsupported(tokenizer)
    if reason is not None:
        log.warning("%s is not used: %s; tokenising on the CPU", device, reason)
        return tokenizer
    # The kernels need Triton, which is there if this tokenizer is supported.
    from infini_model.data.tokenizers.gpu.device import put_on_device

    return put_on_device(tokenizer, device)


def why_unsupported(tokenizer: Tokenizer) -> str | None:
    """Why the tokenizer cannot run on a GPU, or None if it can."""
    from infini_model.data.tokenizers.gpu import UnsupportedTokenizerError, check_supported

    try:
        check_supported(tokenizer)
    except UnsupportedTokenizerError as error:
        return str(error)
    return None


def load_saved(folder: Path, spec: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`; `spec` is its original name."""
    if spec == "bytes":
        return ByteTokenizer()
    return _load_file(folder / TOKENIZER_FILE, spec)


def load_dataset_tokenizer(dataset_dir: Path) -> Tokenizer:
    """The tokenizer of a dataset, from the copy in its folder.

    Raises `DataError` if the folder is not a complete dataset, or the copy does not match the
    manifest.
    """
    record = read_manifest(dataset_dir).tokenizer
    tokenizer = load_saved(dataset_dir, record.spec)
    found = (tokenizer.fingerprint, tokenizer.bos_token_id)
    if found != (record.fingerprint, record.bos_token_id):
        raise DataError(f"{dataset_dir / TOKENIZER_FILE}: does not match {MANIFEST}; {AGAIN}")
    return tokenizer
