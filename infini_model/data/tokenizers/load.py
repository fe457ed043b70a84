"""Loading a tokenizer by name: bytes, a `tokenizer.json`, or one from the hub."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from infini_model.config.model import TOKENIZER_NAME
from infini_model.data.manifest import AGAIN, read_manifest
from infini_model.data.tokenizers.bpe import BPETokenizer
from infini_model.data.tokenizers.stated import (
    NOTHING_STATED,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    StatedTokens,
    read_text,
)
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.runtime.errors import DataError, DeviceError
from infini_model.runtime.storage import MANIFEST

log = logging.getLogger(__name__)

# Of SentencePiece, of tiktoken, and of GPT-2: the files that older folders have.
OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "vocab.json")


def load_tokenizer(spec: str, device: str = "cpu", *, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `spec` names: `bytes`, a path to a `tokenizer.json`, or a hub name.

    A hub name may end in `@revision`, and a path may be that of a folder with the file. Where
    a folder or a model has none, its config.json may name `bytes`, as exports do.

    `device` is `cpu`, `auto` (also the CPU), `cuda` or `cuda:N`. A GPU gives a `DeviceTokenizer`,
    or the tokenizer on the CPU with a warning if it cannot run on a GPU, as that of bytes.
    `eos_token` ends every document, whatever the files beside a tokenizer.json state.

    Raises `DataError` if the file is not a tokenizer or has no end-of-text token, `DeviceError` if
    the device does not exist, `UnreachableError` if the hub cannot be reached.
    """
    check_device(device)
    return on_device(_load(spec, eos_token), device)


def _load(spec: str, eos_token: str | None) -> Tokenizer:
    """The tokenizer that `spec` names, on the CPU."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "train":
        raise DataError("tokenizer train: is trained on a corpus, by build_dataset")
    if spec == "model":
        raise DataError("tokenizer model: is that of model.initial_weights, which is not set")
    path = Path(spec).expanduser()
    if path.is_file():
        stated = StatedTokens.read(path.parent) if path.name == TOKENIZER_FILE else NOTHING_STATED
        return _load_file(path, spec, stated, eos_token)
    if not path.is_dir():
        if spec.endswith(".json") or spec.count("/") > 1 or spec.startswith((".", "/", "~")):
            raise DataError(f"{spec}: no such tokenizer file")
        from infini_model.data.sources.hub import fetch_tokenizer

        path = fetch_tokenizer(spec, TOKENIZER_FILES)
    tokenizer = tokenizer_of(path, spec, eos_token)
    if tokenizer is None:
        raise DataError(f"{spec}: {why_none(path)}")
    return tokenizer


def tokenizer_of(folder: Path, spec: str, eos_token: str | None = None) -> Tokenizer | None:
    """The tokenizer that a folder of weights, which is named `spec`, brings, if any."""
    stated = StatedTokens.read(folder)
    if stated.model.get(TOKENIZER_NAME) == ByteTokenizer.spec:
        return ByteTokenizer()
    if (folder / TOKENIZER_FILE).is_file():
        return _load_file(folder / TOKENIZER_FILE, spec, stated, eos_token)
    return None


def why_none(folder: Path) -> str:
    """Describe what a folder without a tokenizer has instead, for a message."""
    others = [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]
    if not others:
        return f"has no {TOKENIZER_FILE}"
    return (
        f"has {others[0]}, but only {TOKENIZER_FILE} is read; transformers writes one: "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


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


def _load_file(
    path: Path, spec: str, stated: StatedTokens, eos_token: str | int | None = None
) -> Tokenizer:
    text = read_text(path)
    if text is None:
        raise DataError(f"{path}: does not exist")

    def load(text: str) -> BPETokenizer:
        return BPETokenizer(spec, text, stated=stated, eos_token=eos_token, fast=True)

    tokenizer, rows = load(text), stated.model.get("vocab_size")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        text, names = _without_rowless(text, rows)
        if names:
            log.warning(
                "%s: its weights have %d tokens, without %s: what a text spells so is read as "
                "any other text",
                spec,
                rows,
                " ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            )
            return load(text)
    return tokenizer


def _without_rowless(text: str, rows: int) -> tuple[str, list[str]]:
    """A tokenizer.json without the added tokens that no row of the weights is for; their names."""
    tree = json.loads(text)
    added, vocabulary = tree["added_tokens"], tree["model"].get("vocab")
    rowless = [each["content"] for each in added if each["id"] >= rows]
    tree["added_tokens"] = [each for each in added if each["id"] < rows]
    if isinstance(vocabulary, dict):
        for name in rowless:
            vocabulary.pop(name, None)
    return json.dumps(tree, ensure_ascii=False), rowless


def on_device(tokenizer: Tokenizer, device: str) -> Tokenizer:
    """The tokenizer on a device, or itself with a warning if it cannot run on that GPU."""
    if usable_device(tokenizer, device) == "cpu":
        return tokenizer
    # The kernels need Triton, which is there if this tokenizer is supported.
    from infini_model.data.tokenizers.gpu.device import put_on_device

    return put_on_device(tokenizer, device)


def usable_device(tokenizer: Tokenizer, device: str) -> str:
    """The device, or `cpu` with a warning if it is a GPU on which the tokenizer cannot run."""
    if not device.startswith("cuda"):
        return "cpu"
    from infini_model.data.tokenizers.gpu import UnsupportedTokenizerError, check_supported

    try:
        check_supported(tokenizer)
    except UnsupportedTokenizerError as error:
        log.warning("%s is not used: %s; tokenising on the CPU", device, error)
        return "cpu"
    return device


def load_saved(folder: Path, spec: str, eos_token_id: int | None = None) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`; `spec` is its original name.

    `eos_token_id` is the token that ends documents, where a record says it.
    """
    if spec == "bytes":
        return ByteTokenizer()
    return _load_file(folder / TOKENIZER_FILE, spec, StatedTokens.read(folder), eos_token_id)


def load_dataset_tokenizer(dataset_dir: Path) -> Tokenizer:
    """The tokenizer of a dataset, from the copy in its folder.

    Raises `DataError` if the folder is not a complete dataset, or the copy does not match the
    manifest.
    """
    record = read_manifest(dataset_dir).tokenizer
    tokenizer = load_saved(dataset_dir, record.spec, record.eos_token_id)
    found = (tokenizer.fingerprint, tokenizer.bos_token_id)
    if found != (record.fingerprint, record.bos_token_id):
        raise DataError(f"{dataset_dir / TOKENIZER_FILE}: does not match {MANIFEST}; {AGAIN}")
    return tokenizer
