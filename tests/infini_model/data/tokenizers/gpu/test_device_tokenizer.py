"""The GPU tokenizer gives the ids of `tokenizers`."""

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
from adversarial_text import adversarial_texts
from corpora import make_texts
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, PROBE, BPETokenizer
from infini_model.data.tokenizers.gpu import device_tokenizer, pretokens, word_model, word_table
from infini_model.data.tokenizers.gpu.device_tokenizer import DeviceTokenizer, put_on_device
from infini_model.data.tokenizers.gpu.kernels.launch import launch
from infini_model.data.tokenizers.gpu.patterns import GPT2_PATTERN, PATTERNS
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.gpu.tokens import close_documents
from infini_model.data.tokenizers.tokenizer import ByteTokenizer

pytestmark = pytest.mark.cuda
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
        vocab_size=500,
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


def on_device(definition: str, device: torch.device, slots: int = 1 << 16) -> DeviceTokenizer:
    return DeviceTokenizer(BPETokenizer("x", definition), device, slots)


def again(tokenizer: DeviceTokenizer, slots: int = 1 << 16) -> DeviceTokenizer:
    """The same with an empty table, on the same device."""
    return on_device(tokenizer.reference().definition(), tokenizer.device, slots)


def assert_exact(tokenizer: DeviceTokenizer, texts: list[str]) -> None:
    """Ids and offsets are those of the reference, document by document."""
    ragged = tokenizer.encode_batch(texts)
    expected = tokenizer._host.encode_batch(texts)  # `tokenizers`, since there is no `fast`
    assert [part.dtype for part in ragged] == [np.int32, np.int64]
    assert np.array_equal(ragged.offsets, expected.offsets)
    assert np.array_equal(ragged.ids, expected.ids)


@pytest.fixture(scope="module")
def llama(gpu):
    return on_device(train(LLAMA3_PATTERN), gpu)


@pytest.mark.parametrize("expression", PATTERNS, ids=["gpt2", "llama3", "qwen"])
def test_adversarial_strings(expression, gpu):
    large = gpu.type == "cuda"
    texts = adversarial_texts(300_000, 7) if large else adversarial_texts(100, 7, longest=9)
    assert_exact(on_device(train(expression), gpu), texts)


def test_real_text(llama, gpu):
    sources = SOURCES[: 40 if gpu.type == "cuda" else 1]
    texts = [*TEXTS[:5], *PROBE, *sources, "", "a", "\n", "0", " ", ""]
    assert_exact(llama, texts)
    assert_exact(llama, texts)  # all words known


def test_whole_words_of_a_vocabulary_that_ignores_merges(llama, gpu):
    ignoring = on_device(ignoring_merges(train(LLAMA3_PATTERN)), gpu, 64)
    words = ["import", " self.qqq", "'''' xyzzy", "naïve 0123", "        x"]
    assert_exact(ignoring, words)
    count = 100_000 if gpu.type == "cuda" else 40
    assert_exact(ignoring, [*words, *TEXTS[:3], *adversarial_texts(count, 3, longest=5)])
    assert not np.array_equal(llama.encode_batch(words).ids, ignoring.encode_batch(words).ids)


@pytest.mark.parametrize("lacking", ["bytes", "prefix"])
def test_a_model_that_the_kernels_do_not_cover_is_left_to_tokenizers(gpu, lacking):
    tree = json.loads(train(GPT2_PATTERN))
    if lacking == "bytes":
        for character in "zÃ":
            del tree["model"]["vocab"][character]
        kept = [pair for pair in tree["model"]["merges"] if not set("zÃ") & set("".join(pair))]
        tree["model"]["merges"] = kept
    else:
        tree["model"]["end_of_word_suffix"] = "</w>"
        tree["model"]["merges"] = []
    # What is not in the vocabulary has no id, or that of the unknown token.
    assert_exact(on_device(json.dumps(tree), gpu), ["a zebra é naïve zz", *TEXTS[:2], *PROBE])


def test_any_documents_in_batches_of_any_size(llama):
    tokenizer, rng = again(llama), random.Random(0)
    text = "".join(SOURCES[:3])[:200] + TEXTS[0][:100] + "日本語🦊" * 5
    for batch_bytes in (1, 300, 1 << 20) if llama.device.type == "cuda" else (200,):
        places = sorted(rng.choices(range(len(text) + 1), k=30))
        tokenizer.batch_bytes = batch_bytes
        ends = zip([0, *places], [*places, len(text)], strict=True)
        assert_exact(tokenizer, [text[start:end] for start, end in ends])


def test_slices_and_empty_input(llama):
    array = pa.array(["before", *TEXTS[:3], "after"]).slice(1, 3)
    assert np.array_equal(llama.encode_batch(array).ids, llama.encode_batch(TEXTS[:3]).ids)
    for nothing in ([], [""], ["", ""]):
        ids, offsets = llama.encode_batch(nothing)
        assert len(ids) == 0
        assert offsets.tolist() == [0] * (len(nothing) + 1)


def test_it_has_the_properties_of_the_file(llama, tmp_path):
    host = BPETokenizer("x", train(LLAMA3_PATTERN))
    for name in ("spec", "vocab_size", "eos_token_id", "bos_token_id", "fingerprint"):
        assert getattr(llama, name) == getattr(host, name)
    ids = llama.encode_batch(["naïve\n"]).ids
    assert llama.decode(ids) == "naïve\n"
    assert llama.same_ids("naïve\n".encode(), ids)
    llama.save(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == host.text


@pytest.mark.parametrize("bos", [None, 7])
def test_documents_end_with_the_end_of_text_token(llama, bos):
    texts = ["", "one two", "", "<|endoftext|>", "three"]
    ids, offsets = close_documents(llama.encode(texts), llama.eos_token_id, bos)
    rows = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    expected = [llama.encode_batch([text]).ids.tolist() for text in texts]
    first = [] if bos is None else [bos]
    assert rows == [[*first, *row, llama.eos_token_id] for row in expected]
    assert close_documents(llama.encode([]), 0, bos).offsets.tolist() == [0]


def test_a_tokenizer_that_gives_other_ids_is_refused(monkeypatch, gpu):
    monkeypatch.setattr(device_tokenizer, "PROBE", PROBE[:5])
    host = BPETokenizer("x", train(LLAMA3_PATTERN))
    assert isinstance(put_on_device(host, str(gpu)), DeviceTokenizer)
    monkeypatch.setattr(host, "same_ids", lambda text, ids: False)
    with pytest.raises(UnsupportedTokenizerError, match=f"{gpu} and tokenizers disagree on x"):
        put_on_device(host, str(gpu))
    with pytest.raises(UnsupportedTokenizerError, match="tokenizer bytes is not supported"):
        put_on_device(ByteTokenizer(), str(gpu))


# Tokens that are prefixes or parts of others, or contain blanks or parts of contractions.
RAW = ("<|a|>", "<|a|><|b|>", "<|b|>", "<|", "|>", "日本", "a b", "'s", "\n\n", "z")
SOFT = (">x", "b|", "本語", "  ", "z'", "aa", "🦊")


def test_added_tokens_are_found_before_words(gpu):
    added = [AddedToken(token, normalized=False, special=True) for token in RAW]
    added += [AddedToken(token, normalized=True) for token in SOFT]
    chance, count = random.Random(0), 10_000 if gpu.type == "cuda" else 300
    parts = [*RAW, *SOFT, "<", "|", ">", "a", "b", " ", "s", "\n", "1", "日", "語"]
    rows = [chance.choices(parts, k=chance.randrange(12)) for _ in range(count)]
    tokenizer = on_device(train(GPT2_PATTERN, tuple(added)), gpu)
    assert_exact(tokenizer, ["".join(row) for row in rows])


def test_hundreds_of_added_tokens(gpu):
    tree = json.loads(train(LLAMA3_PATTERN))
    names = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    (plain,) = tree["added_tokens"]
    tree["added_tokens"] += [
        plain | {"id": 9000 + number, "content": name} for number, name in enumerate(names)
    ]
    texts = ["".join(names), " ".join(names), names[7][:-1], "<|" + names[9] + "|>", *TEXTS[:2]]
    assert_exact(on_device(json.dumps(tree), gpu), texts)


# Around the ends of what a key holds and of what the smaller kernel merges.
NEAR = [*range(10), *range(13, 19), *range(29, 36)]
LENGTHS = ["a" * length + tail for length in NEAR for tail in ("", "b", " c", "\0")]
LENGTHS += ["\0" * length for length in range(1, 40, 3)]
LONGEST = ["!" * length for length in (64, 255, 256, 257, 300)]
# Words of one piece, equal in their first bytes and of the same hash.
ALIKE = ["a" * length + tail for length in (7, 8, 14, 15, 16, 17, 31) for tail in "abcd"]


def test_words_of_every_length(llama):
    assert_exact(again(llama), [*LENGTHS, *LENGTHS, "".join(LENGTHS[:60]), *LONGEST, *LONGEST])


def test_every_word_has_the_same_hash(monkeypatch, gpu):
    """And probes from the same slot; words of more than 15 bytes have the same key."""
    monkeypatch.setattr(word_table, "MULTIPLIER", 0)
    # The table is empty at first: each word is compared with all that came before.
    monkeypatch.setattr(BPETokenizer, "vocabulary", lambda _: [])
    poor = on_device(train(LLAMA3_PATTERN), gpu, 1 << 10)
    assert_exact(poor, ALIKE[::2])
    assert_exact(poor, [*ALIKE[::-1], *ALIKE])


def test_a_full_table_is_emptied(llama):
    small, text = again(llama, 64), TEXTS[0][:300]
    for texts in ([text], LENGTHS[:9], [text]):
        assert_exact(small, texts)
        assert small._words.words <= 32


def test_a_failed_insertion_leaves_a_valid_table(monkeypatch, llama):
    fresh = again(llama)

    def fail(words, which, pool):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(fresh._words._model, "encode", fail)
        with pytest.raises(MemoryError):
            fresh.encode_batch(["qqxx yyzzyy"])
    assert_exact(fresh, ["qqxx yyzzyy"])


class Counter(TorchDispatchMode):
    """Counts kernels, and operators that do work."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.kernels = self.operators = 0
        for module in (pretokens, word_table, word_model):
            monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, *arguments, **constants):
        self.kernels += 1
        with _disable_current_modes():  # the interpreter copies the arguments
            launch(*arguments, **constants)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators += not function.is_view and "empty" not in function.name()
        return function(*args, **(kwargs or {}))


def test_known_words_take_few_kernels_and_operators(monkeypatch, llama):
    text = "".join(TEXTS[:20])[:30_000]
    llama.encode([text])
    with Counter(monkeypatch) as counted:
        llama.encode([text])
    assert counted.kernels <= 9
    assert counted.operators <= 40


def test_running_out_of_memory_halves_the_batches(monkeypatch, llama, caplog):
    fresh = again(llama)
    encode = fresh._encode

    def limited(texts):
        if sum(len(text.as_py().encode()) for text in texts) > 9000:
            raise torch.OutOfMemoryError
        return encode(texts)

    monkeypatch.setattr(fresh, "_encode", limited)
    with caplog.at_level("INFO"):
        assert_exact(fresh, [*TEXTS[:10], "x" * 9001, *TEXTS[:4]])
    assert fresh.batch_bytes <= 9000
    assert "halving the batch size" in caplog.text
    assert "out of memory: tokenising a document on the CPU" in caplog.text
