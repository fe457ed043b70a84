"""Text is split exactly where the regex of `tokenizers` splits it."""

import random

import numpy as np
import pytest
import torch
from adversarial_text import PIECES, adversarial_texts
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Split

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN
from infini_model.data.tokenizers.gpu import character_classes
from infini_model.data.tokenizers.gpu.patterns import GPT2_PATTERN, PATTERNS

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

from infini_model.data.tokenizers.gpu import pretokens
from infini_model.data.tokenizers.gpu.kernels.characters import CONTINUED, MARGIN
from infini_model.data.tokenizers.gpu.pretokens import PADDING, PreTokenizer, TextBytes

# Without a GPU they run in `test_gpu_tokenizer_interpreted`.
pytestmark = pytest.mark.cuda
every_pattern = pytest.mark.parametrize("expression", PATTERNS, ids=["gpt2", "llama3", "qwen"])


def on_device(data: bytes, device: torch.device) -> TextBytes:
    """Text as it is uploaded."""
    padded = np.zeros(-(-len(data) // 8) * 8 + PADDING, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return TextBytes(torch.from_numpy(padded).to(device), len(data))


def split(expression: str, texts: list[str], device: torch.device) -> list[list[int]]:
    """Where the pieces of each document start, in bytes of the document."""
    text = on_device("".join(texts).encode(), device)
    bounds = np.cumsum([0, *(len(text.encode()) for text in texts)])
    pre_tokenizer = PreTokenizer(PATTERNS[expression], torch.zeros(1 << 16), device)
    classified = pre_tokenizer.classify(text)
    classified.mark_sections(torch.from_numpy(bounds).to(device))
    *starts, end = pre_tokenizer.split(text, classified).tolist()
    assert end == text.size
    rows = np.split(starts, np.searchsorted(starts, bounds[1:-1]))
    return [(row - first).tolist() for row, first in zip(rows, bounds, strict=False)]


def reference(expression: str, text: str) -> list[int]:
    """The same with the regex."""
    pieces = Split(Regex(expression), "isolated").pre_tokenize_str(text)
    return np.cumsum([0, *(len(piece.encode()) for piece, _ in pieces)])[:-1].tolist()


def assert_exact(expression: str, texts: list[str], device: torch.device) -> None:
    """Every document is split as by the regex."""
    found = split(expression, texts, device)
    for text, starts in zip(texts, found, strict=True):
        assert starts == reference(expression, text), repr(text)


@every_pattern
def test_splits_are_those_of_the_regex(expression, gpu):
    large = gpu.type == "cuda"
    texts = adversarial_texts(100_000, 1) if large else adversarial_texts(500, 1, longest=12)
    assert_exact(expression, texts, gpu)


@pytest.mark.story
@pytest.mark.parametrize("seed", range(2, 4))
@every_pattern
def test_splits_of_more_text(expression, seed, gpu):
    assert_exact(expression, adversarial_texts(100_000 if gpu.type == "cuda" else 5000, seed), gpu)


@every_pattern
def test_programs_see_what_is_beyond_their_bytes(expression, gpu, monkeypatch):
    monkeypatch.setattr(pretokens, "BYTES", 64)
    texts = ["x'll 12345", "é" * 9 + "1" * 90, "a\n" + " " * 40 + "\n b", "!\n\n" * 9 + "  \n c"]
    for shift in (0,) if gpu.type == "cpu" else range(64):
        assert_exact(expression, ["y" * shift, *texts], gpu)


@pytest.mark.parametrize("longest", [3, pytest.param(5, marks=pytest.mark.story)])
@every_pattern
def test_all_short_strings_with_one_character_per_class(expression, longest, gpu):
    letters = ["a", "1", " ", "\t", "\n", "!", "'", "s"]
    texts = [""]
    for _ in range(longest):
        texts += [text + letter for text in texts[-(8 ** len(texts[-1])) :] for letter in letters]
    assert len(texts) == sum(8**length for length in range(longest + 1))
    assert_exact(expression, ["|x\nx|".join(texts)], gpu)


@pytest.mark.parametrize("expression", [GPT2_PATTERN, LLAMA3_PATTERN], ids=["gpt2", "llama3"])
def test_every_character_has_its_kind(expression, gpu):
    """All bytes of a character do."""
    characters = [chr(point) for point in (*range(0xD800), *range(0xE000, 0x110000))]
    if gpu.type == "cpu":  # where an encoding or a page may end, and a sample
        characters = [
            one for one in characters if ord(one) % 257 == 0 or ord(one) & 0xFF in (0, 255)
        ]
    data = "".join(characters).encode()
    llama = expression == LLAMA3_PATTERN
    table = character_classes.kinds(newlines=llama, any_case=llama)
    lengths = [len(one.encode()) for one in characters]
    expected = np.repeat(table[[ord(one) for one in characters]], lengths)
    starts = np.cumsum([0, *lengths])[:-1]
    expected |= np.where(np.isin(np.arange(len(data)), starts), 0, CONTINUED).astype(np.uint8)
    pre_tokenizer = PreTokenizer(PATTERNS[expression], torch.zeros(1 << 16), gpu)
    kinds = pre_tokenizer.classify(on_device(data, gpu)).kinds[MARGIN:-MARGIN]
    assert np.array_equal(kinds.cpu().numpy(), expected)


@pytest.mark.story
@pytest.mark.parametrize("expression", [GPT2_PATTERN, LLAMA3_PATTERN], ids=["gpt2", "llama3"])
def test_every_code_point_has_the_right_class(expression, gpu):
    planes = [*range(0xD800), *range(0xE000, 0x20000)]
    # Above are ideographs and unassigned code points: where ranges may end, and a sample.
    ends = [p + d for p in range(0x20000, 0x110000, 0x1000) for d in (-1, 0, 1)]
    points = sorted({*planes, *ends, *range(0x20000, 0x110000, 997)})
    block = 1 << 14
    context = "a{0}b|1{0}2 {0} '{0}\n{0}"
    texts = [
        "|x|".join(context.format(chr(point)) for point in points[start : start + block])
        for start in range(0, len(points), block)
    ]
    assert_exact(expression, texts, gpu)


def test_the_pattern_of_gpt2_is_that_of_byte_level(gpu):
    text = "".join(PIECES) + " ".join(PIECES) + "\n".join(reversed(PIECES)) + "  "
    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert [len(piece) for piece, _ in pieces] == np.diff(
        [*split(GPT2_PATTERN, [text], gpu)[0], len(text.encode())]
    ).tolist()


@every_pattern
def test_documents_are_split_independently(expression, gpu):
    chance = random.Random(0)
    text = "".join(chance.choices([*"a1! '\n", "é", "🦊", "'s"], k=2000))
    places = sorted(chance.choices(range(len(text) + 1), k=800))
    assert_exact(
        expression,
        [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)],
        gpu,
    )
