"""Text is split exactly where the regex of `tokenizers` splits it."""

import numpy as np
import pytest
import torch
from adversarial_text import adversarial_texts
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN
from infini_model.data.tokenizers.gpu import character_classes
from infini_model.data.tokenizers.gpu.patterns import GPT2_PATTERN, PATTERNS

pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch bring none")

from infini_model.data.tokenizers.gpu import pretokens
from infini_model.data.tokenizers.gpu.kernels.characters import CONTINUED, MARGIN
from infini_model.data.tokenizers.gpu.pretokens import PADDING, PreTokenizer, TextBytes

pytestmark = pytest.mark.cuda
every_pattern = pytest.mark.parametrize("expression", PATTERNS, ids=["gpt2", "llama3", "qwen"])
# Those of two different tables of characters.
each_table = pytest.mark.parametrize(
    "expression", [GPT2_PATTERN, LLAMA3_PATTERN], ids=["gpt2", "llama3"]
)


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


def assert_exact(expression: str, texts: list[str], device: torch.device) -> None:
    """Every document is split as by the regex."""
    regex = Split(Regex(expression), "isolated")
    for text, starts in zip(texts, split(expression, texts, device), strict=True):
        pieces = [len(piece.encode()) for piece, _ in regex.pre_tokenize_str(text)]
        assert starts == np.cumsum([0, *pieces])[:-1].tolist(), repr(text)


@every_pattern
def test_splits_are_those_of_the_regex(expression, gpu):
    large = gpu.type == "cuda"
    texts = adversarial_texts(300_000, 1) if large else adversarial_texts(500, 1, longest=12)
    assert_exact(expression, texts, gpu)


@every_pattern
def test_programs_see_what_is_beyond_their_bytes(expression, gpu, monkeypatch):
    monkeypatch.setattr(pretokens, "BYTES", 64)
    texts = ["x'll 12345", "é" * 9 + "1" * 90, "a\n" + " " * 40 + "\n b", "!\n\n" * 9 + "  \n c"]
    for shift in (0,) if gpu.type == "cpu" else range(64):
        assert_exact(expression, ["y" * shift, *texts], gpu)


@every_pattern
def test_all_short_strings_with_one_character_per_class(expression, gpu):
    letters, longest = ["a", "1", " ", "\t", "\n", "!", "'", "s"], 5 if gpu.type == "cuda" else 3
    texts = [""]
    for _ in range(longest):
        texts += [text + letter for text in texts[-(8 ** len(texts[-1])) :] for letter in letters]
    assert len(texts) == sum(8**length for length in range(longest + 1))
    assert_exact(expression, ["|x\nx|".join(texts)], gpu)


@each_table
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


@each_table
def test_every_kind_is_that_of_the_regex(expression, gpu):
    # Above are ideographs and unassigned code points.
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 997)]
    if gpu.type == "cpu":
        points = [*range(0x300), *points[0x300::61]]
    context = "a{0}b|1{0}2 {0} '{0}\n{0}"
    texts = ["|x|".join(context.format(chr(point)) for point in points[at::9]) for at in range(9)]
    assert_exact(expression, texts, gpu)
