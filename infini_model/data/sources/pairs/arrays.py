"""Pairs as Arrow arrays: read from lines and tables, and laid out for tokenising.

Up to the tokenizer a pair is a row with two fields. A tokenizer sees texts, so there the prompts
and answers alternate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from infini_model.data.sources.json_lines import map_rows
from infini_model.data.sources.pairs.rows import ANSWERS, PROMPT, Pair, pair_columns, pair_of
from infini_model.data.sources.separated import Block
from infini_model.data.sources.utf8 import Errors
from infini_model.runtime.errors import DataError

ANSWER = ANSWERS[0]
TYPE = pa.struct([(PROMPT, pa.string()), (ANSWER, pa.string())])
# Prompt and answer: the texts of one pair.
TEXTS = 2


def parse_pairs(block: Block, template: str, errors: Errors) -> pa.StructArray:
    """The pairs of whole JSON lines, null where one is skipped. Raises `LineError`."""
    return _as_array(map_rows(block, lambda row: pair_of(row, template, errors), errors))


def pairs_of_rows(
    batch: pa.RecordBatch, template: str, errors: Errors, address: str, first_row: int
) -> pa.StructArray:
    """The pairs of the rows of a table, null where one is skipped; `first_row` counts from zero.

    Raises `DataError` that names the file and the row.
    """
    # Arrow trusts a file that declares its bytes to be UTF-8, so they are decoded here.
    columns = {name: _raw(batch.column(name)) for name in batch.schema.names}
    pairs = []
    for number, row in enumerate(pa.RecordBatch.from_pydict(columns).to_pylist(), first_row + 1):
        try:
            pairs.append(pair_of(row, template, errors))
        except DataError as error:
            raise DataError(f"{address}, row {number}: {error}") from error
    return _as_array(pairs)


def columns_of(address: str, schema: pa.Schema) -> list[str]:
    """The columns of pairs in a table. Raises `DataError` that names the file if it has none."""
    try:
        return pair_columns(schema.names)
    except DataError as error:
        raise DataError(f"{address}: {error}") from error


def _raw(array: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(_raw_type(array.type))


def _raw_type(kind: pa.DataType) -> pa.DataType:
    """The type with the bytes of its texts, also those inside of lists and structs."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _raw_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_raw_type(kind.value_type))
    return kind


def _as_array(pairs: Sequence[Pair | None]) -> pa.StructArray:
    return pa.array([None if pair is None else pair._asdict() for pair in pairs], TYPE)


def answers(pairs: pa.StructArray) -> pa.StringArray:
    """The answers of pairs, null where a pair is."""
    return pairs.flatten()[1]


def alternate(pairs: pa.StructArray) -> pa.StringArray:
    """The prompts and the answers of pairs in turn."""
    count = len(pairs)
    order = np.arange(TEXTS * count).reshape(TEXTS, count).T.reshape(-1)
    return pa.concat_arrays(pairs.flatten()).take(pa.array(order))


def join(texts: pa.StringArray) -> pa.StringArray:
    """Each prompt and its answer as one text, without a copy; as `alternate` lays them out."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset :][: len(texts) + 1]
    joined = pa.py_buffer(np.ascontiguousarray(offsets[::TEXTS]))
    return pa.StringArray.from_buffers(len(texts) // TEXTS, joined, texts.buffers()[2])
