"""Text is split exactly where the regex of `tokenizers` splits it."""

import numpy as np
import pytest
import torch
from adversarial_text import PIECES, adversarial
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Split

from infini_model.data.tokenizers.bpe import LLAMA3_PATTERN
from infini_model.data.tokenizers.gpu.pretokens import (
    GPT2_PATTERN,
    PADDING,
    PATTERNS,
    PreTokenizer,
    TextBytes,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=PATTERNS, ids=["gpt2", "llama3", "qwen"])
def pattern(request):
    return request.param


def split(expression: str, texts: list[str]) -> list[list[int]]:
    """Where the pieces of each document start, in bytes of the document."""
    data = "".join(texts).encode()
    padded = np.zeros(-(-len(data) // 8) * 8 + PADDING, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    bounds = np.cumsum([0, *(len(text.encode()) for text in texts)])
    pre_tokenizer = PreTokenizer(PATTERNS[expression], CPU)
    text = TextBytes(torch.from_numpy(padded), len(data))
    starts = pre_tokenizer.split(text, torch.from_numpy(bounds[:-1])).numpy()
    rows = np.split(starts, np.searchsorted(starts, bounds[1:-1]))
    return [(row - first).tolist() for row, first in zip(rows, bounds, strict=False)]


def reference(expression: str, text: str) -> list[int]:
    """The same with the regex."""
    pieces = Split(Regex(expression), "isolated").pre_tokenize_str(text)
    return np.cumsum([0, *(len(piece.encode()) for piece, _ in pieces)])[:-1].tolist()


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(adversarial, min_size=1, max_size=12))
def test_splits_are_those_of_the_regex(pattern, texts):
    assert split(pattern, texts) == [reference(pattern, text) for text in texts]


def test_all_short_strings_with_one_character_per_class(pattern):
    letters = ["a", "1", " ", "\t", "\n", "!", "'", "s"]
    texts = [""]
    for _ in range(5):
        texts += [text + letter for text in texts[-(8 ** len(texts[-1])) :] for letter in letters]
    joined = "|x\nx|".join(texts)
    assert len(texts) == sum(8**length for length in range(6))
    assert split(pattern, [joined]) == [reference(pattern, joined)]


@pytest.mark.parametrize("expression", [GPT2_PATTERN, LLAMA3_PATTERN], ids=["gpt2", "llama3"])
def test_every_code_point_has_the_right_class(expression):
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
    for text, starts in zip(texts, split(expression, texts), strict=True):
        assert starts == reference(expression, text)


def test_the_pattern_of_gpt2_is_that_of_byte_level():
    text = "".join(PIECES) + " ".join(PIECES) + "\n".join(reversed(PIECES)) + "  "
    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert [len(piece) for piece, _ in pieces] == np.diff(
        [*split(GPT2_PATTERN, [text])[0], len(text.encode())]
    ).tolist()


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=[*"a1! '\n", "é", "🦊"], max_size=30), st.data())
def test_documents_are_split_independently(pattern, text, data):
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(pattern, parts) == [reference(pattern, part) for part in parts]
