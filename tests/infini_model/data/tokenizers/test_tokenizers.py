"""Every implementation gives exact ids, and decodes them back to the text."""

import functools
import json
import logging
import operator
import random

import numpy as np
import pyarrow as pa
import pytest
import torch
from corpora import PIECES, build, files_config, make_texts, write_files, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st
from templates import BOS, with_bos
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Reference

from infini_model.data import build as builds
from infini_model.data.tokenizers import bpe
from infini_model.data.tokenizers import trained as trained_tokenizers
from infini_model.data.tokenizers.bpe import (
    END_BYTES,
    BPETokenizer,
    train_tokenizer,
)
from infini_model.data.tokenizers.gpu import (
    UnsupportedTokenizerError,
    byte_of_character,
    check_supported,
)
from infini_model.data.tokenizers.load import load_dataset_tokenizer, load_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, prompt_ids
from infini_model.runtime.errors import DataError, DeviceError

TEXTS = make_texts(200)
PARTS = st.sampled_from([*PIECES, "<|end_of_text|>"])
adversarial = st.lists(PARTS, max_size=12).map("".join) | st.text(max_size=20)


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([TEXTS], 400)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory, trained):
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save(folder)
    return folder / "tokenizer.json"


@settings(max_examples=50)
@given(st.lists(st.text(), max_size=5))
def test_byte_ids_are_the_utf8_bytes(texts):
    tokenizer = ByteTokenizer()
    ids, offsets = tokenizer.encode_batch(texts)
    assert (ids.dtype, offsets.dtype) == (np.uint8, np.int64)
    rows = np.split(ids, offsets[1:])[: len(texts)]
    assert [row.tobytes() for row in rows] == [text.encode() for text in texts]
    assert [tokenizer.decode([*row, tokenizer.eos_token_id]) for row in rows] == texts
    assert tokenizer.eos_token_id not in ids


@settings(max_examples=100)
@given(st.lists(adversarial, max_size=5))
def test_ids_are_those_of_tokenizers(trained, texts):
    reference = Reference.from_str(trained.text)
    expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
    for implementation in (trained, trained.reference()):
        ids, offsets = implementation.encode_batch(texts)
        assert [row.tolist() for row in np.split(ids, offsets[1:])[: len(texts)]] == expected
    for text, row in zip(texts, expected, strict=True):
        assert trained.decode([*row, trained.eos_token_id]) == text


def changed(tokenizer, **parts):
    """The same tokenizer with other parts of its tokenizer.json, without gigatoken."""
    return BPETokenizer("x", json.dumps(json.loads(tokenizer.definition()) | parts))


@pytest.fixture(scope="module")
def cut_or_whole(trained):
    """Tokenizers by whether a long text is encoded in parts: those whose words end at spaces."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    (end,) = json.loads(trained.definition())["added_tokens"]
    spaced = end | {"id": 400, "content": "e t"}
    return {
        True: [
            trained.reference(),
            changed(trained, pre_tokenizer=level | {"use_regex": True}),
            changed(trained, normalizer={"type": "NFC"}),
        ],
        False: [
            changed(trained, pre_tokenizer=level | {"use_regex": False}),
            changed(trained, normalizer={"type": "Prepend", "prepend": "e"}),
            changed(trained, added_tokens=[end, spaced]),
            changed(trained, added_tokens=[end | {"rstrip": True}]),
        ],
    }


@settings(max_examples=100)
@given(st.lists(adversarial | st.just("the e t <|end_of_text|>  the\u0301 "), max_size=5))
def test_a_long_text_in_parts_has_the_ids_of_the_whole(cut_or_whole, texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PART", 3)
        for may_be_cut, tokenizers in cut_or_whole.items():
            for tokenizer in tokenizers:
                reference = Reference.from_str(tokenizer.text)
                expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
                ids, offsets = tokenizer.encode_batch(texts)
                rows = np.split(ids, offsets[1:])[: len(texts)]
                assert [row.tolist() for row in rows] == expected
                assert tokenizer._may_be_cut == may_be_cut


# The first and the last of the letters of Unicode 17 in some blocks of each of its planes.
NEWEST = [0x88F, 0xC5C, 0xCDC, 0xA7CE, 0xA7F1, 0x10940, 0x10959, 0x11DB0, 0x11DE9, 0x16EA0]
NEWEST += [0x16FF6, 0x187FF, 0x18D1E, 0x18DF2, 0x1E6C0, 0x1E6FF, 0x2B73F, 0x2CEAD, 0x323B0, 0x33479]


def test_letters_that_gigatoken_alone_knows_are_left_to_tokenizers(trained):
    """In a tokenizer that shows where words end: what is no letter merges with the next sign."""
    pytest.importorskip("gigatoken")
    tree = json.loads(trained.definition())
    vocabulary = {name: row for name, row in tree["model"]["vocab"].items() if row <= 256}
    last = [name for name, byte in byte_of_character().items() if 0x80 <= byte < 0xC0]
    vocabulary |= {f"{name}<": 257 + number for number, name in enumerate(last)}
    tree["model"] |= {"vocab": vocabulary, "merges": [[name, "<"] for name in last]}
    tokenizer = BPETokenizer("x", json.dumps(tree), fast=True)
    texts = ["é<", *(f"{chr(letter)}<s" for letter in NEWEST), "", "…<", "😀< é<"]
    for some in (texts, texts[::-1], texts[-1:], texts[1:2]):
        ids, expected = tokenizer.encode_batch(some), tokenizer.reference().encode_batch(some)
        assert ids.ids.tolist() == expected.ids.tolist()
        assert ids.offsets.tolist() == expected.offsets.tolist()
    assert tokenizer._fast is not None


@pytest.fixture(scope="module")
def with_beginning(trained):
    """A tokenizer that begins every text with a token, and its definition."""
    definition = with_bos(trained.text)
    return BPETokenizer("x", definition), Reference.from_str(definition)


@settings(max_examples=100)
@given(adversarial | st.just(BOS + "twice"))
def test_a_prompt_begins_as_tokenizers_begins_a_text(with_beginning, trained, text):
    tokenizer, reference = with_beginning
    whole = reference.encode(text).ids
    assert whole[0] == tokenizer.bos_token_id == 400
    assert prompt_ids(tokenizer, text) == whole
    assert tokenizer.decode([*whole, tokenizer.eos_token_id]) == text
    plain = tokenizer.encode_batch([text]).ids.tolist()
    assert plain == whole[1:]
    assert prompt_ids(trained, "a") == trained.encode_batch(["a"]).ids.tolist()


def test_the_tokenizer_of_a_dataset_is_the_one_in_its_folder(tmp_path, trained):
    raw = write_parquet(tmp_path / "a.parquet", TEXTS[:20])
    (tmp_path / "tokenizer.json").write_text(with_bos(trained.text))
    config = files_config(raw, tokenizer={"spec": str(tmp_path)})
    manifest, folder = build(config, tmp_path)
    assert load_dataset_tokenizer(folder).bos_token_id == manifest.tokenizer.bos_token_id == 400
    trained.save(folder)
    with pytest.raises(DataError, match=r"tokenizer\.json: does not match manifest"):
        load_dataset_tokenizer(folder)


def test_training_depends_only_on_the_documents(trained):
    shuffled = TEXTS.copy()
    random.Random(1).shuffle(shuffled)
    again = train_tokenizer([shuffled[:50], pa.array(shuffled[50:])], 400)
    assert again.fingerprint == trained.fingerprint
    assert trained.vocab_size == 400
    assert train_tokenizer([TEXTS], 300).fingerprint != trained.fingerprint


def test_a_long_document_is_learnt_in_parts(trained, monkeypatch, caplog):
    monkeypatch.setattr(bpe, "PART", 40)
    texts = ["".join(TEXTS)]
    whole = train_tokenizer([texts], 400).fingerprint
    split = pre_tokenizers.Split(Regex(bpe.LLAMA3_PATTERN), "isolated")
    parts = list(bpe.training_parts(texts, split))
    assert "".join(parts) == texts[0]
    assert max(map(len, parts)) <= 2 * 40
    monkeypatch.setattr(bpe, "PART", 1 << 20)
    assert train_tokenizer([texts], 400).fingerprint == whole
    assert not caplog.messages
    word = "Abcd" * bpe.LONGEST_WORD
    texts = [f"the {word}, {word}\n", "end"]
    parts = list(bpe.training_parts(texts, split))
    assert "".join(parts) == "".join(texts)
    assert max(map(len, parts)) == bpe.LONGEST_WORD
    (told,) = caplog.messages
    assert f"a word of {len(word)} characters" in told


def test_of_a_long_document_the_sample_is_the_beginning(tmp_path, trained_by, monkeypatch):
    monkeypatch.setattr(trained_tokenizers, "SAMPLE_BYTES", 1000)
    beginning = "the stone under the river " * 40
    (tmp_path / "raw" / "short.txt").write_text(beginning[:1000])
    (tmp_path / "raw" / "long.txt").write_text(beginning + "zyx " * 5000)
    assert trained_by("short", "short.txt") == trained_by("long", "long.txt")


def test_neither_path_nor_truncation_nor_padding_is_part_of_it(tokenizer_file, tmp_path, trained):
    reference = Reference.from_file(str(tokenizer_file))
    reference.enable_truncation(3)
    reference.enable_padding(length=50)
    reference.save(str(tmp_path / "renamed.json"))
    expected = trained.encode_batch(TEXTS[:3]).ids
    for spec in (tokenizer_file, tokenizer_file.parent, tmp_path / "renamed.json"):
        tokenizer = load_tokenizer(str(spec))
        assert tokenizer.fingerprint == trained.fingerprint
        assert np.array_equal(tokenizer.encode_batch(TEXTS[:3]).ids, expected)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{}", r"a\.json: is not a tokenizer"),
        (b"\xff", r"a\.json: is not UTF-8"),
        (None, r"a\.json: no such tokenizer file"),
        ("<|stop|>", r"has no end-of-text token; data\.tokenizer\.eos_token .*: <\|stop\|>"),
    ],
    ids=["another file", "not UTF-8", "missing", "without an end"],
)
def test_a_file_that_is_no_tokenizer_is_named(tokenizer_file, tmp_path, content, complaint):
    path = tmp_path / "a.json"
    if isinstance(content, str):
        path.write_text(tokenizer_file.read_text().replace("<|end_of_text|>", content))
    elif content:
        path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_gpu_is_refused_and_one_that_does_not_help_is_a_warning(monkeypatch, caplog):
    with pytest.raises(DeviceError, match=r"data\.device: got 'cuda:99'"):
        load_tokenizer("bytes", "cuda:99")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert isinstance(load_tokenizer("bytes", "cuda:1"), ByteTokenizer)
    (told,) = caplog.messages
    assert told.startswith("cuda:1 is not used: tokenizer bytes is not supported on a GPU; ")


WORDS = {"type": "WordLevel", "vocab": {"<|end_of_text|>": 0}, "unk_token": "<|end_of_text|>"}
FEW_BYTES = {"type": "BPE", "vocab": {"<|end_of_text|>": 0}, "merges": []}
SPLIT, LEVEL = (("pre_tokenizer", "pretokenizers", step) for step in (0, 1))


# What is written where in the tokenizer.json, and what is said of it.
@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (("normalizer",), {"type": "NFC"}, "normalizer NFC"),
        (("model",), WORDS, "model WordLevel"),
        (("model", "dropout"), 0.1, "BPE with dropout"),
        (("model", "vocab", "same"), 300, "a vocabulary in which two tokens have the same id"),
        (("model",), FEW_BYTES, "a vocabulary without some bytes"),
        (("added_tokens", 0, "lstrip"), True, "added token '.*' with lstrip"),
        (("added_tokens", 0, "content"), "  ", "added token '  ' of white space"),
        (("pre_tokenizer",), {"type": "Whitespace"}, "pre-tokenizer Whitespace"),
        ((*LEVEL, "add_prefix_space"), True, "ByteLevel with add_prefix_space"),
        ((*LEVEL, "use_regex"), True, "Split before ByteLevel with use_regex"),
        ((*SPLIT, "pattern"), {"Regex": r"\w+"}, r"Split by '\\\\w\+'"),
        ((*SPLIT, "behavior"), "Removed", "Split with behavior Removed"),
    ],
)
def test_what_the_kernels_of_a_gpu_do_not_support_is_named(trained, place, value, complaint):
    tree = json.loads(trained.definition())
    functools.reduce(operator.getitem, place[:-1], tree)[place[-1]] = value
    with pytest.raises(UnsupportedTokenizerError, match=f"{complaint} is not supported on a GPU"):
        check_supported(BPETokenizer("x", json.dumps(tree), eos_token=0))


def test_a_wrong_fast_tokenizer_is_detected_and_replaced(tmp_path, trained, caplog, monkeypatch):
    gigatoken = pytest.importorskip("gigatoken")
    train_tokenizer([["something else entirely"] * 9], 280).save(tmp_path)
    fast = gigatoken.Tokenizer(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(bpe, "checked_gigatoken", lambda _: fast)
    wrong = BPETokenizer("x", trained.text, fast=True)
    assert not wrong.same_ids(TEXTS[0].encode(), wrong.encode_batch(TEXTS[:1]).ids)

    raw = write_parquet(tmp_path / "a.parquet", TEXTS[:50])
    config = files_config(raw)
    made = []
    for tokenizer in (wrong, BPETokenizer("x", trained.text)):
        monkeypatch.setattr(builds, "dataset_tokenizer", lambda *_, used=tokenizer: (used, None))
        made.append(build(config, tmp_path / str(len(made)))[0])
    assert caplog.text.count("the fast tokenizer and tokenizers disagree") == 1
    assert made[0].splits == made[1].splits


def test_a_long_document_is_compared_at_both_ends(trained):
    text = "".join(TEXTS)[: 5 * END_BYTES]
    ids = trained.reference().encode_batch([text]).ids
    assert trained.same_ids(text.encode(), ids)
    for place in (2, -2):
        wrong = ids.copy()
        wrong[place] += 1
        assert not trained.same_ids(text.encode(), wrong)


@pytest.fixture
def trained_by(tmp_path):
    """Returns the fingerprint of the tokenizer that a dataset of the texts gets."""
    write_files(tmp_path / "raw", TEXTS[:20])

    def made(name="grows", files="*", **fields):
        tokenizer = {"spec": "train", "vocab_size": 280} | fields
        config = files_config(tmp_path / "raw" / files, name=name, tokenizer=tokenizer)
        return build(config, tmp_path)[0].tokenizer.fingerprint

    return made


def test_a_source_that_grows_keeps_its_tokenizer(tmp_path, trained_by, caplog):
    (tmp_path / "raw" / "0.txt").touch()
    with pytest.raises(DataError, match=r"\.txt: no documents left to train a tokenizer on"):
        trained_by(files="0.txt")
    first = trained_by()
    assert trained_by("other") == first
    (tmp_path / "raw" / "more.txt").write_text("zyx " * 5000)
    assert trained_by("another") != first
    assert trained_by(vocab_size=281) != first
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert trained_by() == first
    assert "training one of 280 tokens" not in caplog.text


def test_what_is_damaged_is_trained_again(tmp_path, trained_by):
    first = trained_by()
    kept = tmp_path / "datasets" / ".tokenizers"
    (file,), pin = kept.glob("*/tokenizer.json"), kept / "grows.280.json"

    def tear():
        file.write_text(file.read_text()[:1000])

    for harm in (
        lambda: pin.write_text("{broken"),
        lambda: file.unlink(),
        tear,
        lambda: tear() or pin.unlink(),
        lambda: train_tokenizer([["zyx"] * 99], 280).save(file.parent),
    ):
        harm()
        assert trained_by() == first
