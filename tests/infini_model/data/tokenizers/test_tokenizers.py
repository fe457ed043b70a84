"""Every implementation gives exact ids, and decodes them back to the text."""

import hashlib
import json
import logging
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from corpora import build, files_config, make_texts, write_files, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import BOS, with_bos
from tokenizers import Tokenizer as Reference

from infini_model.config import Config
from infini_model.data.shards import dataset
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.shards.plan import plan_dataset
from infini_model.data.sources.download import download
from infini_model.data.tokenizers.bpe import END_BYTES, BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.load import load_dataset_tokenizer, load_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, prompt_ids
from infini_model.data.tokenizers.vocabulary import DatasetTokenizer
from infini_model.runtime.errors import DataError, DeviceError
from infini_model.runtime.storage import write_json

TEXTS = make_texts(200)
# What patterns distinguish: apostrophes, digits, blanks, line ends, marks, other scripts.
PIECES = ["'s", "'LL", "ſ", "a", "É", "ß", "1", "23", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "."]
PIECES += ["!?", "…", "日本", "🦊", "e\u0301", "\u200d", "\0", "<|end_of_text|>", "Ⅷ", "٣"]
adversarial = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([TEXTS], 400)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory, trained):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(folder)
    return folder / "tokenizer.json"


@given(st.lists(st.text(), max_size=5))
def test_byte_ids_are_the_utf8_bytes(texts):
    tokenizer = ByteTokenizer()
    ids, offsets = tokenizer.encode_batch(texts)
    assert ids.dtype == np.uint8
    assert offsets.dtype == np.int64
    assert ids.astype(np.uint8).tobytes() == "".join(texts).encode()
    for index, text in enumerate(texts):
        row = ids[offsets[index] : offsets[index + 1]]
        assert tokenizer.same_ids(text.encode(), row)
        assert tokenizer.decode([*row, tokenizer.eos_token_id]) == text
    assert tokenizer.eos_token_id not in ids


def test_arrow_slices_are_encoded_like_lists(trained):
    array = pa.array(["before", *TEXTS[:5], "after"]).slice(1, 5)
    for tokenizer in (ByteTokenizer(), trained, trained.reference()):
        for one, other in zip(
            tokenizer.encode_batch(array), tokenizer.encode_batch(TEXTS[:5]), strict=True
        ):
            assert np.array_equal(one, other)


@settings(max_examples=200)
@given(st.lists(adversarial, max_size=5))
def test_ids_are_those_of_tokenizers(tokenizer_file, texts):
    tokenizer = load_tokenizer(str(tokenizer_file))
    expected = [
        Reference.from_file(str(tokenizer_file)).encode(text, add_special_tokens=False).ids
        for text in texts
    ]
    for implementation in (tokenizer, tokenizer.reference()):
        ids, offsets = implementation.encode_batch(texts)
        assert np.split(ids, offsets[1:])[: len(texts)] == [pytest.approx(row) for row in expected]
    for text, row in zip(texts, expected, strict=True):
        assert tokenizer.decode([*row, tokenizer.eos_token_id]) == text


@settings(max_examples=200)
@given(adversarial | st.just(BOS + "twice"))
def test_a_prompt_begins_as_tokenizers_begins_a_text(tokenizer_file, text):
    definition = with_bos(tokenizer_file.read_text())
    tokenizer = BPETokenizer("x", definition)
    assert tokenizer.bos_token_id == 400
    whole = Reference.from_str(definition).encode(text).ids
    assert prompt_ids(tokenizer, text) == whole
    assert tokenizer.decode([*whole, tokenizer.eos_token_id]) == text
    plain = tokenizer.without_bos()
    assert plain.bos_token_id is None
    assert plain.fingerprint == tokenizer.fingerprint
    assert prompt_ids(plain, text) == plain.encode_batch([text]).ids.tolist() == whole[1:]


@pytest.mark.parametrize(
    ("template", "begins"),
    [("{} $A", True), ("{} $A {}", True), ("$A", False), ("$A {}", False), ("{} {} $A", False)],
)
def test_only_one_token_in_front_of_every_text_begins_documents(trained, template, begins):
    tokenizer = BPETokenizer("x", with_bos(trained.text, "<|end_of_text|>", template))
    assert tokenizer.bos_token_id == (tokenizer.eos_token_id if begins else None)
    assert trained.bos_token_id is ByteTokenizer().bos_token_id is None


def test_a_dataset_older_than_beginning_of_text_tokens_has_none(tmp_path, trained):
    raw = write_parquet(tmp_path / "a.parquet", TEXTS[:20])
    (tmp_path / "tokenizer.json").write_text(with_bos(trained.text))
    config = files_config(raw, tokenizer={"spec": str(tmp_path)})
    manifest, folder = build(config, tmp_path)
    assert load_dataset_tokenizer(folder).bos_token_id == manifest.tokenizer.bos_token_id == 400
    tree = json.loads((folder / "manifest.json").read_text())
    del tree["tokenizer"]["bos_token_id"]
    (folder / "manifest.json").write_text(json.dumps(tree))
    older = load_dataset_tokenizer(folder)
    assert older.bos_token_id is None
    older.save(tmp_path)
    exported = Reference.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.encode(TEXTS[0]).ids == older.encode_batch(TEXTS[:1]).ids.tolist()
    trained.save(folder)
    write_json(folder / "manifest.json", tree | {"tokenizer": manifest.tokenizer.model_dump()})
    with pytest.raises(DataError, match=r"tokenizer\.json: does not match manifest"):
        load_dataset_tokenizer(folder)


def test_training_depends_only_on_the_documents(trained):
    shuffled = TEXTS.copy()
    random.Random(1).shuffle(shuffled)
    again = train_tokenizer([shuffled[:50], pa.array(shuffled[50:])], 400)
    assert again.fingerprint == trained.fingerprint
    assert trained.vocab_size == 400
    assert train_tokenizer([TEXTS], 300).fingerprint != trained.fingerprint
    assert trained.decode(trained.encode_batch(["naïve 日本"]).ids) == "naïve 日本"


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(DataError, match="vocab_size: got 200: takes 257 or more"):
        train_tokenizer([TEXTS], 200)


def test_the_fingerprint_does_not_depend_on_the_path(tokenizer_file, tmp_path, trained):
    (tmp_path / "renamed.json").write_text(tokenizer_file.read_text())
    for spec in (tokenizer_file, tokenizer_file.parent, tmp_path / "renamed.json"):
        assert load_tokenizer(str(spec)).fingerprint == trained.fingerprint


def test_truncation_and_padding_in_the_file_are_disabled(tokenizer_file, tmp_path, trained):
    reference = Reference.from_file(str(tokenizer_file))
    reference.enable_truncation(3)
    reference.enable_padding(length=50)
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.fingerprint == trained.fingerprint
    for one in (tokenizer, tokenizer.reference()):
        assert np.array_equal(one.encode_batch(TEXTS[:3]).ids, trained.encode_batch(TEXTS[:3]).ids)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{}", "is not a tokenizer"),
        (b"no json", "is not a tokenizer"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path, content, complaint):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"broken\.json: .*{complaint}") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    for spec in (str(tmp_path / "gone.json"), "gone.json", "./gone"):
        with pytest.raises(DataError, match=r"gone.*: no such tokenizer file"):
            load_tokenizer(spec)


def test_a_tokenizer_without_end_of_text_is_named(tokenizer_file, tmp_path):
    tree = json.loads(tokenizer_file.read_text().replace("<|end_of_text|>", "<|stop|>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"has no end-of-text token; .* <\|end_of_text\|> "):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(
        tokenizer_file.read_text().replace("<|end_of_text|>", "</s>")
    )
    assert load_tokenizer(str(tmp_path)).eos_token_id == 0


def test_a_missing_gpu_is_refused():
    with pytest.raises(DeviceError, match=r"data\.device: got 'cuda:99'"):
        load_tokenizer("bytes", "cuda:99")


@pytest.mark.parametrize("kind", ["bytes", "normalizer"])
def test_an_unsupported_device_is_one_warning(tokenizer_file, tmp_path, kind, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    spec, part = "bytes", "tokenizer bytes"
    if kind == "normalizer":
        tree = json.loads(tokenizer_file.read_text()) | {"normalizer": {"type": "NFC"}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        spec, part = str(tmp_path), "normalizer NFC"
    tokenizer = load_tokenizer(spec, "cuda:1")
    assert isinstance(tokenizer, ByteTokenizer | BPETokenizer)
    assert [record.getMessage() for record in caplog.records] == [
        f"cuda:1 is not used: {part} is not supported on a GPU; tokenising on the CPU"
    ]


def test_a_wrong_fast_tokenizer_is_detected_and_replaced(
    tmp_path, tokenizer_file, caplog, monkeypatch
):
    gigatoken = pytest.importorskip("gigatoken")
    text = tokenizer_file.read_text()
    other = train_tokenizer([["something else entirely"] * 9], 280)
    other.save(tmp_path)
    fast = gigatoken.Tokenizer(str(tmp_path / "tokenizer.json"))
    wrong = BPETokenizer("x", text, make_fast=lambda _: fast)
    assert not wrong.same_ids(TEXTS[0].encode(), wrong.encode_batch(TEXTS[:1]).ids)

    raw = write_parquet(tmp_path / "a.parquet", TEXTS[:50])
    config = files_config(raw, batch_size=7)
    made = []
    for tokenizer in (wrong, BPETokenizer("x", text)):
        given = DatasetTokenizer(tokenizer, "kept")
        monkeypatch.setattr(dataset, "dataset_tokenizer", lambda *_, given=given: given)
        with caplog.at_level(logging.WARNING):
            made.append(build(config, tmp_path / str(len(made)))[0])
    assert caplog.text.count("the fast tokenizer and tokenizers disagree") == 1
    assert made[0].splits == made[1].splits


@pytest.mark.parametrize("place", ["start", "end"])
def test_a_long_document_is_compared_at_both_ends(trained, place):
    text = "".join(TEXTS) * 2
    assert len(text) > 4 * END_BYTES
    ids = trained.reference().encode_batch([text]).ids.copy()
    assert trained.same_ids(text.encode(), ids)
    assert not trained.same_ids(text.encode(), ids[:-1])
    assert not trained.same_ids(text.encode(), ids[1:])
    ids[2 if place == "start" else -2] += 1
    assert not trained.same_ids(text.encode(), ids)


def test_a_text_whose_ends_are_ambiguous_is_compared_as_a_whole():
    eights = train_tokenizer([["aaaaaaaa"] * 9], 260)
    # The remainder at the end of the text differs from that of its last characters alone.
    text = "a" * (4 * END_BYTES + 3)
    whole = eights.reference().encode_batch([text]).ids
    assert len(whole) < len(text) / 7
    assert eights.same_ids(text.encode(), whole)
    assert not eights.same_ids(text.encode(), whole[:-1])


def test_a_dataset_contains_its_tokenizer(tmp_path, tokenizer_file):
    raw = write_parquet(tmp_path / "a.parquet", TEXTS)
    for spec in ("bytes", "train", str(tokenizer_file)):
        config = files_config(raw, tokenizer={"spec": spec, "vocab_size": 300})
        manifest, folder = build(config, tmp_path)
        tokenizer = load_dataset_tokenizer(folder)
        assert tokenizer.fingerprint == manifest.tokenizer.fingerprint
        assert tokenizer.vocab_size == manifest.tokenizer.vocab_size
    kept = folder / "tokenizer.json"
    assert hashlib.sha256(kept.read_bytes()).digest() == (
        hashlib.sha256(tokenizer_file.read_bytes()).digest()
    )
    train_tokenizer([TEXTS], 290).save(folder)
    with pytest.raises(DataError, match=r"tokenizer\.json: does not match manifest"):
        load_dataset_tokenizer(folder)
    with pytest.raises(DataError, match="is not a dataset folder"):
        load_dataset_tokenizer(tmp_path / "gone")


def test_a_trained_tokenizer_is_trained_once(tmp_path):
    raw = write_parquet(tmp_path / "a.parquet", TEXTS)
    config = files_config(raw, tokenizer={"spec": "train", "vocab_size": 300})
    build(config, tmp_path)
    (file,) = (tmp_path / "datasets" / ".tokenizers").glob("*/tokenizer.json")
    stamp = file.stat().st_mtime_ns
    build(config.model_copy(update={"splits": config.splits, "name": "other"}), tmp_path)
    assert file.stat().st_mtime_ns == stamp


def trained_by(config, tmp_path, caplog):
    """The fingerprint of the tokenizer of a dataset, and what the plan says about it."""
    caplog.clear()
    settings = Config(data=config, run={"output_dir": tmp_path})
    with caplog.at_level(logging.INFO):
        listing = download(config, tmp_path)
        plan_dataset(listing, settings)
        manifest = build_dataset(listing, config, tmp_path)
    return manifest.tokenizer.fingerprint, "reusing the one trained for dataset" in caplog.text


def test_a_source_that_grows_keeps_its_tokenizer_until_asked(tmp_path, caplog):
    write_files(tmp_path / "raw", TEXTS[:20])
    config = files_config(
        tmp_path / "raw" / "*", name="grows", tokenizer={"spec": "train", "vocab_size": 280}
    )
    first, reused = trained_by(config, tmp_path, caplog)
    assert not reused
    (tmp_path / "raw" / "more.txt").write_text("zyx " * 5000)
    assert trained_by(config, tmp_path, caplog) == (first, True)

    def asked(**tokenizer):
        changed = config.tokenizer.model_copy(update=tokenizer)
        return config.model_copy(update={"tokenizer": changed})

    assert trained_by(asked(vocab_size=281), tmp_path, caplog)[0] != first
    retrained, reused = trained_by(asked(retrain=True), tmp_path, caplog)
    assert retrained != first
    assert not reused
    assert trained_by(config, tmp_path, caplog) == (retrained, True)
    other = config.model_copy(update={"name": "other"})
    assert trained_by(other, tmp_path, caplog) == (retrained, False)


def test_a_source_without_documents_pins_no_tokenizer(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("")
    config = files_config(tmp_path / "*.txt", tokenizer={"spec": "train", "vocab_size": 280})
    with pytest.raises(DataError, match=r"a\.txt: no documents left to train a tokenizer on"):
        build(config, tmp_path / "out")
    (tmp_path / "b.txt").write_text(" ".join(TEXTS))
    _, reused = trained_by(config, tmp_path / "out", caplog)
    assert not reused


@pytest.mark.parametrize("harm", ["pin", "folder", "torn", "another"])
def test_a_damaged_pin_or_a_missing_tokenizer_is_trained_again(tmp_path, caplog, harm):
    write_files(tmp_path / "raw", TEXTS[:20])
    config = files_config(tmp_path / "raw" / "*", tokenizer={"spec": "train", "vocab_size": 280})
    first, _ = trained_by(config, tmp_path, caplog)
    tokenizers = tmp_path / "datasets" / ".tokenizers"
    if harm == "pin":
        (tokenizers / "corpus.json").write_text("{broken")
    elif harm == "torn":
        for file in tokenizers.glob("*/tokenizer.json"):
            file.write_text(file.read_text()[:1000])
    elif harm == "another":
        for file in tokenizers.glob("*/tokenizer.json"):
            train_tokenizer([["zyx"] * 99], 280).save(file.parent)
    else:
        for file in tokenizers.glob("*/tokenizer.json"):
            file.unlink()
    assert trained_by(config, tmp_path, caplog) == (first, False)
    assert "again" in caplog.text
