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
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN, PROBE, BPETokenizer
from infini_model.data.tokenizers.gpu import device_tokenizer, pretokens, word_model, word_table
from infini_model.data.tokenizers.gpu.device_tokenizer import (
    DeviceTokenizer,
    put_on_device,
)
from infini_model.data.tokenizers.gpu.kernels.launch import launch
from infini_model.data.tokenizers.gpu.patterns import GPT2_PATTERN, PATTERNS
from infini_model.data.tokenizers.gpu.supported import UnsupportedTokenizerError
from infini_model.data.tokenizers.gpu.tokens import close_documents
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Ragged

# Without a GPU they run in `test_gpu_tokenizer_interpreted`.
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


@pytest.fixture(scope="module", params=PATTERNS, ids=["gpt2", "llama3", "qwen"])
def definition(request):
    return train(request.param)


@pytest.fixture(scope="module")
def tokenizer(definition, gpu):
    return on_device(definition, gpu)


@pytest.fixture(scope="module")
def llama_definition():
    return train(LLAMA3_PATTERN)


@pytest.fixture(scope="module")
def llama(llama_definition, gpu):
    return on_device(llama_definition, gpu)


@pytest.fixture(scope="module")
def ignoring(definition, gpu):
    return on_device(ignoring_merges(definition), gpu)


def test_adversarial_strings(tokenizer, gpu):
    large = gpu.type == "cuda"
    texts = adversarial_texts(100_000, 7) if large else adversarial_texts(100, 7, longest=9)
    assert_exact(tokenizer, texts)


@pytest.mark.story
@pytest.mark.parametrize("seed", range(8, 10))
def test_more_adversarial_strings(tokenizer, ignoring, gpu, seed):
    texts = adversarial_texts(100_000 if gpu.type == "cuda" else 2000, seed)
    assert_exact(tokenizer, texts)
    assert_exact(ignoring, texts)


@pytest.mark.story
def test_sources(tokenizer, ignoring):
    for one in (tokenizer, ignoring):
        assert_exact(one, [*TEXTS, *SOURCES[:40]])
        assert_exact(again(one, 1 << 8), SOURCES[:4])


def test_real_text(llama):
    texts = [*TEXTS[:5], *PROBE, *SOURCES[:1], "", "a", "\n", "0", " ", ""]
    assert_exact(llama, texts)
    assert_exact(llama, texts)  # all words known


def test_whole_words_of_a_vocabulary_that_ignores_merges(llama, llama_definition, gpu):
    ignoring = on_device(ignoring_merges(llama_definition), gpu, 64)
    words = ["import", " self.qqq", "'''' xyzzy", "naïve 0123", "        x"]
    assert_exact(ignoring, words)
    assert_exact(ignoring, [*words, *TEXTS[:3], *adversarial_texts(40, 3, longest=5)])
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
    tokenizer = again(llama)
    rng = random.Random(0)
    text = "".join(SOURCES[:3])[:200] + TEXTS[0][:100] + "日本語🦊" * 5
    for batch_bytes in (1, 300, 1 << 20) if llama.device.type == "cuda" else (200,):
        places = sorted(rng.choices(range(len(text) + 1), k=30))
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
    for name in ("spec", "vocab_size", "eos_token_id", "bos_token_id", "fingerprint"):
        assert getattr(llama, name) == getattr(host, name)
    ids = llama.encode_batch(["naïve\n"]).ids
    assert llama.decode(ids) == "naïve\n"
    assert llama.same_ids("naïve\n".encode(), ids)
    llama.save(tmp_path)
    assert BPETokenizer("x", (tmp_path / "tokenizer.json").read_text()).fingerprint == (
        host.fingerprint
    )


@pytest.mark.parametrize("bos", [None, 7])
def test_documents_end_with_the_end_of_text_token(llama, bos):
    texts = ["", "one two", "", "<|endoftext|>", "three"]
    ids, offsets = close_documents(llama.encode(texts), llama.eos_token_id, bos)
    rows = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets.tolist())]
    expected = [llama.encode_batch([text]).ids.tolist() for text in texts]
    first = [] if bos is None else [bos]
    assert rows == [[*first, *row, llama.eos_token_id] for row in expected]
    assert close_documents(llama.encode([]), 0, bos).offsets.tolist() == [0]


def test_an_unsupported_tokenizer_is_refused_with_the_reason(llama_definition, monkeypatch, gpu):
    host = BPETokenizer("x", llama_definition)
    assert isinstance(put_on_device(host, str(gpu)), DeviceTokenizer)
    monkeypatch.setattr(host, "same_ids", lambda text, ids: False)
    with pytest.raises(UnsupportedTokenizerError, match=f"{gpu} and tokenizers disagree on x"):
        put_on_device(host, str(gpu))
    tree = json.loads(llama_definition) | {"normalizer": {"type": "NFC"}}
    with pytest.raises(UnsupportedTokenizerError, match="normalizer NFC is not supported"):
        put_on_device(BPETokenizer("y", json.dumps(tree)), str(gpu))
    with pytest.raises(UnsupportedTokenizerError, match="tokenizer bytes is not supported"):
        put_on_device(ByteTokenizer(), str(gpu))


# Tokens that are prefixes or parts of others, or contain blanks or parts of contractions.
RAW = ("<|a|>", "<|a|><|b|>", "<|b|>", "<|", "|>", "日本", "a b", "'s", "\n\n", "z")
SOFT = ("<|", ">x", "b|", "本語", "  ", "z'", "aa", "🦊")


@pytest.fixture(scope="module")
def with_added(gpu):
    added = [AddedToken(token, normalized=False, special=True) for token in RAW]
    added += [AddedToken(token, normalized=True) for token in SOFT if token not in RAW]
    return on_device(train(GPT2_PATTERN, tuple(added)), gpu)


def test_added_tokens_are_found_before_words(with_added, gpu):
    chance = random.Random(0)
    parts = [*RAW, *SOFT, "<", "|", ">", "a", "b", " ", "s", "\n", "1", "日", "語"]
    count = 10_000 if gpu.type == "cuda" else 300
    rows = [chance.choices(parts, k=chance.randrange(12)) for _ in range(count)]
    assert_exact(with_added, ["".join(row) for row in rows])


def test_hundreds_of_added_tokens(llama_definition, gpu):
    tree = json.loads(llama_definition)
    names = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    plain = {"single_word": False, "lstrip": False, "rstrip": False}
    tree["added_tokens"] += [
        {"id": 9000 + number, "content": name, **plain, "normalized": False, "special": True}
        for number, name in enumerate(names)
    ]
    many = on_device(json.dumps(tree), gpu)
    texts = ["".join(names), " ".join(names), names[7][:-1], "<|" + names[9] + "|>", *TEXTS[:2]]
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
def test_unsupported_parts_are_named(change, complaint, gpu):
    tree = json.loads(train(GPT2_PATTERN))
    for part, fields in change.items():
        if part == "added_tokens":
            tree[part][0].update(fields)
        elif fields is None or part == "normalizer":
            tree[part] = fields
        else:
            tree[part].update(fields)
    with pytest.raises(UnsupportedTokenizerError, match=f"{complaint} is not supported on a GPU"):
        on_device(json.dumps(tree), gpu)


@pytest.mark.parametrize(
    ("split", "use_regex", "complaint"),
    [
        ({"pattern": {"Regex": r"\w+"}}, False, r"Split by '\\\\w\+'"),
        ({"pattern": {"String": " "}}, False, "Split by None"),
        ({"behavior": "Removed"}, False, "Split with behavior Removed"),
        ({}, True, "Split before ByteLevel with use_regex"),
    ],
)
def test_unsupported_patterns_are_named(split, use_regex, complaint, gpu):
    tree = json.loads(train(LLAMA3_PATTERN))
    first, second = tree["pre_tokenizer"]["pretokenizers"]
    first.update(split)
    second["use_regex"] = use_regex
    with pytest.raises(UnsupportedTokenizerError, match=complaint):
        on_device(json.dumps(tree), gpu)


def test_a_model_other_than_bpe_is_named(gpu):
    tree = json.loads(train(GPT2_PATTERN))
    tree["model"] = {"type": "WordLevel", "vocab": {"<unk>": 1}, "unk_token": "<unk>"}
    with pytest.raises(UnsupportedTokenizerError, match="model WordLevel"):
        on_device(json.dumps(tree), gpu)


LENGTHS = ["a" * length + tail for length in range(36) for tail in ("", "b", " c", "\0")]
LENGTHS += ["\0" * length for length in range(1, 40, 3)]
LONGEST = ["!" * length for length in (64, 255, 256, 257, 300)]
# Words of one piece, equal in their first bytes and of the same hash.
ALIKE = ["a" * length + tail for length in (7, 8, 14, 15, 16, 17, 31) for tail in "abcd"]


def test_words_of_every_length(llama):
    assert_exact(again(llama), [*LENGTHS, *LENGTHS, "".join(LENGTHS[:99]), *LONGEST, *LONGEST])


def test_every_word_has_the_same_hash(monkeypatch, gpu):
    """And probes from the same slot; words of more than 15 bytes have the same key."""
    monkeypatch.setattr(word_table, "MULTIPLIER", 0)
    # The table is empty at first: each word is compared with all that came before.
    monkeypatch.setattr(BPETokenizer, "vocabulary", lambda _: [])
    poor = on_device(train(LLAMA3_PATTERN), gpu, 1 << 10)
    assert_exact(poor, ALIKE[::2])
    assert_exact(poor, [*ALIKE[::-1], *ALIKE])


def test_a_full_table_is_emptied(llama):
    small = again(llama, 64)
    for texts in (TEXTS[:1], LENGTHS[:9], TEXTS[:1]):
        assert_exact(small, texts)
        assert small._words.words <= 32


def test_a_failed_insertion_leaves_a_valid_table(monkeypatch, llama):
    fresh = again(llama)
    model = fresh._words._model
    encode = model.encode

    def fail(words, which, pool):
        raise MemoryError

    monkeypatch.setattr(model, "encode", fail)
    with pytest.raises(MemoryError):
        fresh.encode_batch(["qqxx yyzzyy"])
    monkeypatch.setattr(model, "encode", encode)
    assert_exact(fresh, ["qqxx yyzzyy"])


# What stays in the cache of a GPU, or lists unknown words, when none is; a slot of the table is
# counted for each word.
UNTOUCHED = {"table", "kept", "pages", "blocks", "prefixes", "symbols", "pairs", "pool", "missing"}
SLOT_BYTES = 32


class Traffic(TorchDispatchMode):
    """Counts kernels and operators, and the bytes of the tensors that they read and write."""

    def __init__(self, monkeypatch, device):
        super().__init__()
        self.device = device
        self.kernels, self.operators, self.moved = [], 0, 0
        for module in (pretokens, word_table, word_model):
            monkeypatch.setattr(module, "launch", self.launch)

    def launch(self, kernel, grid, *arguments, **constants):
        self.kernels.append(kernel.fn.__name__)
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        tensors = {
            value.data_ptr(): value.nbytes
            for name, value in named.items()
            if isinstance(value, torch.Tensor) and name not in UNTOUCHED
        }
        self.moved += sum(tensors.values())
        if kernel.fn.__name__ == "probe":
            self.moved += SLOT_BYTES * named["count"]
        with _disable_current_modes():  # the interpreter copies the arguments
            launch(kernel, grid, *arguments, **constants)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in function.name():
            self.operators += 1
            # Of a tensor that is indexed or searched only some elements move, of a model none.
            partly = ("aten::index", "aten::searchsorted", "aten::new_")
            read = args[1:] if function.name().startswith(partly) else args
            moved = [read, () if result is args[0] else result]
            tensors = (each for each in tree_leaves(moved) if isinstance(each, torch.Tensor))
            self.moved += sum(each.nbytes for each in tensors if each.device == self.device)
        return result


def test_few_bytes_are_moved_and_few_operators_run(monkeypatch, llama):
    """At most 25 bytes for each byte of known words, of four bytes on average here."""
    text = "".join(TEXTS[:20])[:30_000]
    llama.encode([text])
    traffic = Traffic(monkeypatch, llama.device)
    # A batch as large as a program's share, since the last program's bits are whole.
    monkeypatch.setattr(pretokens, "BYTES", 1 << 12)
    with traffic:
        llama.encode([text])
    assert traffic.kernels == [
        *("classify", "count_bits", "place_bits", "cut", "count_bits", "place_bits"),
        *("probe", "count_ids", "emit"),
    ]
    assert traffic.operators <= 40
    assert traffic.moved <= 25 * len(text.encode())


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
    fresh = again(llama)
    encode, sizes = fresh._encode, []

    def limited(texts):
        sizes.append(sum(len(text.as_py().encode()) for text in texts))
        if sizes[-1] > 9000:
            raise torch.OutOfMemoryError
        return encode(texts)

    monkeypatch.setattr(fresh, "_encode", limited)
    texts = [*TEXTS[:10], "x" * 9001, *TEXTS[:4]]
    with caplog.at_level("INFO"):
        assert_exact(fresh, texts)
    assert fresh.batch_bytes <= 9000
    assert "halving the batch size" in caplog.text
    assert "out of memory: tokenising a document on the CPU" in caplog.text
    assert isinstance(fresh.encode_batch(["a"]), Ragged)
