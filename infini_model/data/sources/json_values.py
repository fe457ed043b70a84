"""JSON in all the shapes that datasets have: lines, one array, or one object after the other.

What counts is Python's parser. Arrow's reads lines several times faster and without Python's lock,
where it can be shown to see the same.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from infini_model.data.sources.text import (
    MAX_OFFSET,
    NEWLINE,
    RETURN,
    Errors,
    as_text,
    decode,
    one_row,
)
from infini_model.runtime.errors import DataError

LEFT_BRACE, RIGHT_BRACE = b"{}"
BEGIN = re.compile(r"[^\ufeff\s,]")
# Longer than any literal or escape, at whose start a parser reports that its end is missing.
LONGEST = 16


def object_in(line: bytes, errors: Errors) -> dict[str, Any] | None:
    """The object in a line of JSON, None if the line is skipped.

    Raises `DataError` that tells what is wrong with the line, but not which line it is.
    """
    text = decode(line, errors)
    if text is None:
        return None
    try:
        row = json.loads(text, parse_int=whole_number)
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError("is not JSON: it is nested too deeply") from error
    return checked_object(row)


def checked_object(value: Any) -> dict[str, Any]:
    """A value that is an object. Raises `DataError` that tells what it is instead."""
    if not isinstance(value, dict):
        raise DataError(f"holds {type(value).__name__}, needs an object")
    return value


def values_in(data: Iterable[bytes]) -> Iterator[Any]:
    """The elements of an array, or the values that follow each other, in the chunks of a file.

    Only a single value need fit into memory. Bytes that are not UTF-8 become lone surrogates, of
    which `text_of` decides. Raises `DataError` that tells what is wrong with the next value.
    """
    decoder = json.JSONDecoder(parse_int=whole_number)
    utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, least, in_array = "", 0, False
    for chunk in chain(data, [b""]):
        text += utf8.decode(chunk, final=not chunk)
        if chunk and len(text) < least:
            continue
        place = 0
        while begin := BEGIN.search(text, place):
            place = begin.start()
            if text[place] == ("]" if in_array else "["):
                in_array, place = not in_array, place + 1
                continue
            try:
                value, place = decoder.raw_decode(text, place)
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(text) - LONGEST or error.msg.startswith("Unterminated")
                if not chunk or not is_cut or len(text) - place > MAX_OFFSET:
                    raise DataError(f"is not JSON: {error.msg}") from error
                # Read again once twice as much of it is there, so that a long value is not slow.
                least = 2 * (len(text) - place)
                break
            except RecursionError as error:
                raise DataError("is not JSON: it is nested too deeply") from error
            yield value
        else:
            place = len(text)
        text = text[place:]
    if in_array:
        raise DataError("the file ends inside its array")


def whole_number(digits: str) -> int | float:
    """A whole number of JSON; one of more digits than Python reads is infinite."""
    return int(digits) if len(digits) < sys.int_info.default_max_str_digits else math.inf


def parse_by_arrow(data: bytes, column: str) -> pa.StringArray | None:
    """The texts of JSON lines by Arrow; None if Python's parser might see any of them otherwise.

    Arrow reads objects, not lines. Where each line begins and ends with a brace none spans two
    lines, since no object continues with an opening one; and where there are no more objects than
    lines none holds two. A field that is missing is null to it, and other fields may hold numbers
    that Python refuses, such as Inf.
    """
    from pyarrow import json as arrow_json

    codes = np.frombuffer(data, np.uint8)
    ends = np.append(np.flatnonzero(codes == NEWLINE), len(codes))
    starts = np.append(0, ends[:-1] + 1)
    starts, ends = starts[ends > starts], ends[ends > starts]
    ends -= codes[ends - 1] == RETURN
    starts, ends = starts[ends > starts], ends[ends > starts]
    are_objects = (codes[starts] == LEFT_BRACE) & (codes[ends - 1] == RIGHT_BRACE)
    if not len(starts) or not are_objects.all() or b"\0" in data or as_text(one_row(data)) is None:
        return None
    schema = pa.schema([(column, pa.string())])
    options = arrow_json.ReadOptions(use_threads=False, block_size=min(len(data) + 1, MAX_OFFSET))
    parsing = arrow_json.ParseOptions(schema, unexpected_field_behavior="ignore")
    try:
        table = arrow_json.read_json(pa.BufferReader(data), options, parsing)
    except pa.ArrowException:
        return None
    texts = table.column(0).combine_chunks()
    return None if texts.null_count or len(texts) != len(starts) else texts
