"""Arrow's parser of JSON gives exactly what Python's does, and errors name the line of the file."""

import gzip
import json

import pytest
import zstandard
from corpora import cut_file, rows_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infini_model.data.sources import formats
from infini_model.runtime.errors import DataError

ERRORS = ("fail", "skip", "replace")
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The texts of lines, or why there are none; `parser` replaces functions of the reader."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"

    def outcome(data: bytes, errors: str = "fail", column: str = "text", **parser) -> object:
        path.write_bytes(data + b"\n")  # so that all lines are in one block
        with pytest.MonkeyPatch.context() as patch:
            for name, function in parser.items():
                patch.setattr(formats, name, function)
            try:
                return rows_of(*cut_file(path), errors=errors, column=column)
            except DataError as error:
                return str(error).removeprefix(f"{path}, ")

    return outcome


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("text", max_size=4), inner),
    max_leaves=5,
)
# Valid lines, written as different programs do.
LINES = st.builds(
    lambda row, ascii_, space: json.dumps(
        row, ensure_ascii=ascii_, separators=(",", ":" + space)
    ).encode("utf-8", "surrogatepass"),
    st.fixed_dictionaries(
        {"text": st.text(max_size=8) | VALUES}, optional={"id": VALUES, "a": VALUES}
    ),
    st.booleans(),
    st.sampled_from(["", " "]),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b'"text"', b'"text":', b'{"text":"a"', b"\\"),
    *(b'{"text":"a"}', b'"x":', b"null", b"true", b"1", b"-", b"01", b"1e999", b"9" * 30),
    *(b"NaN", b"-NaN", b"Inf", b"-Inf", b"Infinity", b"-Infinity", b"a", b"/"),
    *(b"\\ud83e", b"\\udd8a", b"\\u0000", b"\xff", b"\xc3", b"\xa9", b"\xed\xa0\x80"),
    *(b"\n", b"\r\n", b"\r", b" ", b"\t", b"\x0b", b"\x0c", b"\0", b"\x1f", b"\x7f"),
    *(b"\xef\xbb\xbf", b"\xe2\x80\xa8"),
)
SOUP = st.lists(st.sampled_from(TOKENS), max_size=12).map(b"".join)


@st.composite
def mutated(draw) -> bytes:
    """A valid line with a few bytes replaced, inserted or left out."""
    line = draw(LINES)
    for _ in range(draw(st.integers(1, 2))):
        at, width = draw(st.integers(0, len(line))), draw(st.integers(0, 2))
        line = line[:at] + draw(st.sampled_from([*TOKENS, b""])) + line[at + width :]
    return line


BLOCKS = st.lists(LINES | LINES | mutated() | SOUP, max_size=5).map(b"\n".join)


@settings(max_examples=250)
@given(BLOCKS, st.sampled_from(ERRORS), st.sampled_from(["text", "x", "a"]))
@example(b'{"text":"a"}{"text":"b"}\n{"text":"c","x":{}\n}', "fail", "text")
@example(b'{"text":"a","text":"b"}\n{"text":"a","text":null}', "fail", "text")
@example(b'{"text":"a","x":-NaN}', "fail", "text")
@example(b'{"text":"a","x":[Inf]}', "fail", "text")
@example(b'{"text":"a","x":1e999}\n{"text":"b","x":NaN}', "fail", "text")
@example(b'\xef\xbb\xbf{"text":"a"}', "fail", "text")
@example(b'{"text":null}\n{"x":1}', "skip", "text")
@example(b'\r\n{"text":"a"}\r\n\r\n\n{"text":"b"}\n\x0c\n', "fail", "text")
@example(b'{"te\\u0078t":"a\\u0000b"}', "fail", "text")
@example(b'{"text":"a","x":"\xff"}', "skip", "text")
@example(b'{"text":"a","x":' + b"9" * 5000 + b"}", "fail", "text")
@example(b'{"text":"a"}\0', "fail", "text")
@example(b"[" * 100_000, "fail", "text")
@example(b'{"text":' + DEEP + b"}", "fail", "text")
def test_both_parsers_agree(read, data, errors, column):
    by_python = read(data, errors, column, parse_by_arrow=lambda *_: None)
    assert read(data, errors, column) == by_python


@settings(max_examples=60)
@given(
    st.lists(
        st.builds(json.dumps, st.fixed_dictionaries({"text": st.text(), "x": VALUES})), min_size=1
    )
)
def test_arrow_reads_what_is_usual(read, lines):
    texts = [json.loads(line)["text"] for line in lines]
    data = "\n".join(lines).encode()
    assert read(data, object_in=lambda *_: pytest.fail("read by Python")) == texts


def test_what_is_nested_too_deeply_for_python_is_said_in_one_line(read):
    line = b'{"text": "a", "x": ' + DEEP + b"}"
    assert read(line) == ["a"]  # Arrow has no such limit
    said = read(b'{"text": null}\n' + line)
    assert said == "line 2: is not JSON: it is nested too deeply"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_files_of_several_members_are_read_to_the_end(tmp_path, request, compress):
    texts = [f"{number} " * 50 for number in range(3000)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    path = tmp_path / f"a.jsonl.{request.node.callspec.id}"
    path.write_bytes(compress(b"".join(lines[:1700])) + compress(b"".join(lines[1700:])))
    assert rows_of(*cut_file(path), batch_bytes=10_000) == texts
