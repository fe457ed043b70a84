"""The array program gives the ids of `tokenizers` on any device; tested here on the CPU."""

import functools
import itertools
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from adversarial_text import adversarial
from corpora import make_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, PROBE, BPETokenizer
from infini_model.data.tokenizers.gpu import device_tokenizer, word_table
from infini_model.data.tokenizers.gpu.device_tokenizer import (
    DeviceTokenizer,
    close_documents,
    put_on_device,
)
from infini_model.data.tokenizers.gpu.pretokens import GPT2_PATTERN, PATTERNS
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Ragged

CPU = torch.device("cpu")
TEXTS = make_texts(60)
SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
]


@functools.cache
def train(expression: str, added: tuple[AddedToken, ...] = ()) -> str:
    """The tokenizer.json of a real vocabulary, trained on real text."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model = Reference(models.BPE())
    if expression == GPT2_PATTERN:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([*TEXTS, *SOURCES[::9]], trainer)
    model.add_tokens(list(added))
    return model.to_str()


def ignoring_merges(definition: str) -> str:
    """The same, with whole words in the vocabulary that no merge produces."""
    tree = json.loads(definition)
    vocabulary = tree["model"]["vocab"]
    for word in ("Ġimport", "Ġself", "''''", "0123", "naÃ¯ve", "ĠĠĠĠĠĠĠ", "xyzzy", "qqq"):
        vocabulary.setdefault(word, 5000 + len(vocabulary))
    tree["model"]["ignore_merges"] = True
    return json.dumps(tree)


def on_device(definition: str, slots: int = 1 << 16) -> DeviceTokenizer:
    return DeviceTokenizer(BPETokenizer("x", definition), CPU, slots)


def assert_exact(tokenizer: DeviceTokenizer, texts: list[str]) -> None:
    """Ids and offsets are those of the reference, document by document."""
    ragged = tokenizer.encode_batch(texts)
    expected = tokenizer._host.encode_batch(texts)  # `tokenizers`, since there is no `fast`
    assert [part.dtype for part in ragged] == [np.int32, np.int64]
    assert np.array_equal(ragged.offsets, expected.offsets)
    assert np.array_equal(ragged.ids, expected.ids)


@pytest.fixture(scope="module", params=PATTERNS, ids=["gpt2", "llama3", "qwen"])
def definition(request):
    return train(request.param)


@pytest.fixture(scope="module")
def tokenizer(definition):
    return on_device(definition)


@pytest.fixture(scope="module")
def llama_definition():
    return train(LLAMA3_PATTERN)


@pytest.fixture(scope="module")
def llama(llama_definition):
    return on_device(llama_definition)


@pytest.fixture(scope="module")
def ignoring(definition):
    return on_device(ignoring_merges(definition))


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(adversarial, max_size=10))
def test_adversarial_strings(tokenizer, ignoring, texts):
    assert_exact(tokenizer, texts)
    assert_exact(ignoring, texts)


def test_real_text(tokenizer, ignoring):
    texts = [*TEXTS, *PROBE, *SOURCES[:6], "", "a", "\n", "0", " ", ""]
    words = ["import", " self.qqq", "'''' xyzzy", "naïve 0123", "        x"]
    for one in (tokenizer, ignoring):
        assert_exact(one, texts)
        assert_exact(one, words)
        assert_exact(one, texts)  # all words known
    assert not np.array_equal(tokenizer.encode_batch(words).ids, ignoring.encode_batch(words).ids)


def test_any_documents_in_batches_of_any_size(definition):
    tokenizer = on_device(definition)
    rng = random.Random(0)
    text = "".join(SOURCES[:3])[:6000] + TEXTS[0] + "日本語🦊" * 20
    for batch_bytes in (1, 7, 100, 5000, 1 << 20):
        places = sorted(rng.choices(range(len(text) + 1), k=100))
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        tokenizer.batch_bytes = batch_bytes
        assert_exact(tokenizer, parts)


def test_slices_and_empty_input(llama):
    array = pa.array(["before", *TEXTS[:3], "after"]).slice(1, 3)
    assert np.array_equal(llama.encode_batch(array).ids, llama.encode_batch(TEXTS[:3]).ids)
    for nothing in ([], [""], ["", ""]):
        ids, offsets = llama.encode_batch(nothing)
        assert len(ids) == 0
        assert offsets.tolist() == [0] * (len(nothing) + 1)


def test_it_has_the_properties_of_the_file(llama, llama_definition, tmp_path):
    host = BPETokenizer("x", llama_definition)
    for name in ("spec", "vocab_size", "eos_token_id", "fingerprint"):
        assert getattr(llama, name) == getattr(host, name)
    ids = llama.encode_batch(["naïve\n"]).ids
    assert llama.decode(ids) == "naïve\n"
    assert llama.same_ids("naïve\n".encode(), ids)
    llama.save(tmp_path)
    assert BPETokenizer("x", (tmp_path / "tokenizer.json").read_text()).fingerprint == (
        host.fingerprint
    )


def test_documents_end_with_the_end_of_text_token(llama):
    texts = ["", "one two", "", "<|endoftext|>", "three"]
    ids, offsets = close_documents(llama.encode(texts), llama.eos_token_id)
    rows = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    expected = [llama.encode_batch([text]).ids.tolist() for text in texts]
    assert rows == [[*row, llama.eos_token_id] for row in expected]
    assert close_documents(llama.encode([]), 0).offsets.tolist() == [0]


def test_an_unsupported_tokenizer_is_refused_with_the_reason(llama_definition, monkeypatch):
    host = BPETokenizer("x", llama_definition)
    assert isinstance(put_on_device(host, "cpu"), DeviceTokenizer)
    monkeypatch.setattr(host, "same_ids", lambda text, ids: False)
    with pytest.raises(UnsupportedTokenizerError, match="cpu and tokenizers disagree on x"):
        put_on_device(host, "cpu")
    tree = json.loads(llama_definition) | {"normalizer": {"type": "NFC"}}
    with pytest.raises(UnsupportedTokenizerError, match="normalizer NFC is not supported"):
        put_on_device(BPETokenizer("y", json.dumps(tree)), "cpu")
    with pytest.raises(UnsupportedTokenizerError, match="tokenizer bytes is not supported"):
        put_on_device(ByteTokenizer(), "cpu")


# Tokens that are prefixes or parts of others, or contain blanks or parts of contractions.
RAW = ("<|a|>", "<|a|><|b|>", "<|b|>", "<|", "|>", "日本", "a b", "'s", "\n\n", "z")
SOFT = ("<|", ">x", "b|", "本語", "  ", "z'", "aa", "🦊")


@pytest.fixture(scope="module")
def with_added():
    added = [AddedToken(token, normalized=False, special=True) for token in RAW]
    added += [AddedToken(token, normalized=True) for token in SOFT if token not in RAW]
    return on_device(train(GPT2_PATTERN, tuple(added)))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [*RAW, *SOFT, "<", "|", ">", "a", "b", " ", "s", "\n", "1", "日", "語"]
            ),
            max_size=12,
        ).map("".join),
        max_size=6,
    )
)
def test_added_tokens_are_found_before_words(with_added, texts):
    assert_exact(with_added, texts)


def test_hundreds_of_added_tokens(llama_definition):
    tree = json.loads(llama_definition)
    names = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    tree["added_tokens"] += [
        {"id": 9000 + number, "content": name, **plain, "normalized": False, "special": True}
        for number, name in enumerate(names)
    ]
    many = on_device(json.dumps(tree))
    texts = ["".join(names), " ".join(names), names[7][:-1], "<|" + names[9] + "|>", *TEXTS[:9]]
    assert_exact(many, texts)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer NFC"),
        ({"pre_tokenizer": None}, "pre-tokenizer none"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre-tokenizer Whitespace"),
        ({"pre_tokenizer": {"add_prefix_space": True}}, "ByteLevel with add_prefix_space"),
        ({"model": {"dropout": 0.1}}, "dropout of merges"),
        ({"added_tokens": {"lstrip": True}}, r"added token '<\|endoftext\|>' with lstrip"),
        ({"added_tokens": {"rstrip": True}}, "with rstrip"),
        ({"added_tokens": {"single_word": True}}, "with single_word"),
    ],
)
def test_unsupported_parts_are_named(change, complaint):
    tree = json.loads(train(GPT2_PATTERN))
    for part, fields in change.items():
        if part == "added_tokens":
            tree[part][0].update(fields)
        elif fields is None or part == "normalizer":
            tree[part] = fields
        else:
            tree[part].update(fields)
    with pytest.raises(UnsupportedTokenizerError, match=f"{complaint} is not supported on a GPU"):
        on_device(json.dumps(tree))


@pytest.mark.parametrize(
    ("split", "use_regex", "complaint"),
    [
        ({"pattern": {"Regex": r"\w+"}}, False, r"Split by '\\\\w\+'"),
        ({"pattern": {"String": " "}}, False, "Split by None"),
        ({"behavior": "Removed"}, False, "Split with behavior Removed"),
        ({}, True, "Split before ByteLevel with use_regex"),
    ],
)
def test_unsupported_patterns_are_named(split, use_regex, complaint):
    tree = json.loads(train(LLAMA3_PATTERN))
    first, second = tree["pre_tokenizer"]["pretokenizers"]
    first.update(split)
    second["use_regex"] = use_regex
    with pytest.raises(UnsupportedTokenizerError, match=complaint):
        on_device(json.dumps(tree))


def test_a_model_other_than_bpe_is_named():
    tree = json.loads(train(GPT2_PATTERN))
    tree["model"] = {"type": "WordLevel", "vocab": {"<unk>": 1}, "unk_token": "<unk>"}
    with pytest.raises(UnsupportedTokenizerError, match="model WordLevel"):
        on_device(json.dumps(tree))


LENGTHS = ["a" * length + tail for length in range(70) for tail in ("", "b", " c", "\0")]
LENGTHS += ["\0" * length for length in range(40)]
LENGTHS += ["!" * length for length in (255, 256, 257, 258, 5000)]


def test_words_of_every_length(llama):
    assert_exact(llama, LENGTHS)
    assert_exact(llama, LENGTHS)
    assert_exact(llama, ["".join(LENGTHS)])


def test_hash_collisions(monkeypatch, llama):
    def same(table, words):
        zero = torch.zeros_like(words.starts)
        return word_table.Keys(zero, zero - (1 << 56))

    monkeypatch.setattr(word_table.WordTable, "_hash", same)
    poor = on_device(llama.reference().definition())
    assert_exact(poor, LENGTHS)
    assert_exact(poor, [*reversed(LENGTHS), *TEXTS])


def test_every_word_probes_from_the_same_slot(monkeypatch, llama):
    monkeypatch.setattr(
        word_table.WordTable, "_home", lambda table, keys: torch.zeros_like(keys.low)
    )
    assert_exact(on_device(llama.reference().definition(), 1 << 12), TEXTS[:3])


def test_a_full_table_is_emptied(llama):
    small = on_device(llama.reference().definition(), 64)
    for texts in (TEXTS[:5], LENGTHS, TEXTS[:5]):
        assert_exact(small, texts)
        assert small._words.words <= 32


def test_a_failed_insertion_leaves_a_valid_table(monkeypatch, llama):
    fresh = on_device(llama.reference().definition())
    encode = fresh._words._encode

    def fail(words):
        raise MemoryError

    monkeypatch.setattr(fresh._words, "_encode", fail)
    with pytest.raises(MemoryError):
        fresh.encode_batch(SOURCES[:1])
    monkeypatch.setattr(fresh._words, "_encode", encode)
    assert_exact(fresh, SOURCES[:1])


@pytest.mark.parametrize(
    ("gigabytes", "batch", "slots"),
    [(139, 250 << 20, 1 << 24), (8, 14 << 20, 1 << 20), (0, 1, 1 << 16)],
)
def test_free_memory_decides_batch_and_table_size(monkeypatch, gigabytes, batch, slots):
    free = gigabytes * 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert device_tokenizer._batch_bytes(torch.device("cuda:1")) >= batch
    assert device_tokenizer._table_slots(torch.device("cuda:1")) == slots


def test_running_out_of_memory_halves_the_batches(monkeypatch, llama, caplog):
    fresh = on_device(llama.reference().definition())
    encode, sizes = fresh._encode, []

    def limited(texts):
        sizes.append(sum(len(text.as_py().encode()) for text in texts))
        if sizes[-1] > 3000:
            raise torch.OutOfMemoryError
        return encode(texts)

    monkeypatch.setattr(fresh, "_encode", limited)
    texts = [*TEXTS, "x" * 3001, *TEXTS[:4]]
    with caplog.at_level("INFO"):
        assert_exact(fresh, texts)
    assert fresh.batch_bytes <= 3000
    assert "halving the batch size" in caplog.text
    assert "out of memory: tokenising a document on the CPU" in caplog.text
    assert isinstance(fresh.encode_batch(["a"]), Ragged)
