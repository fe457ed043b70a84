"""Prompts and answers from rows of any format, and conversations as text."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import as_rows, cut_file, make_pairs, write_rows
from hypothesis import given
from hypothesis import strategies as st

from infini_model.config import DataConfig, FilesSource, HubSource
from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.formats import Reading, read_documents
from infini_model.data.sources.listing import download, reading_of
from infini_model.data.sources.pairs import pair_of
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE)
LLAMA = ChatTemplate("<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>")
READING = Reading(template=TEMPLATE)


def message(role, content):
    return {"role": role, "content": content}


def rows_with(columns, pairs):
    """Rows of pairs in these columns, and the pairs that they are read as."""
    if columns != "messages":
        return [dict(zip(columns.split(), pair, strict=True)) for pair in pairs], pairs
    rows = [{"messages": [message("user", a), message("assistant", b)]} for a, b in pairs]
    return rows, [(f"user:\n{a}\n\nassistant:\n", b) for a, b in pairs]


CHAT = [message("system", "Be brief."), message("user", "1 + 1?"), message("assistant", "2")]


def pairs_in(ranges, reading=READING):
    """The pairs of ranges of files, and how many rows were left out."""
    batches = list(read_documents(ranges, reading, 2000))
    texts = [text for batch in batches for text in batch.texts.to_pylist()]
    found = list(zip(texts[::2], texts[1::2], strict=True))
    return found, sum(batch.skipped for batch in batches)


@pytest.mark.parametrize("columns", ["prompt answer", "prompt completion", "messages"])
def test_the_pairs_are_those_of_the_rows_in_every_format(tmp_path, columns):
    rows, pairs = rows_with(columns, make_pairs(40))
    # A row of messages may have other columns, too.
    rows = [{"prompt": "alone", "other": [1]} | row for row in rows]
    table = pa.Table.from_pylist(rows)
    write_rows(tmp_path / "a.jsonl", rows)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    with pa.ipc.new_stream(tmp_path / "c.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=9)
    for path in tmp_path.iterdir():
        assert pairs_in(cut_file(path)) == (pairs, 0)


def test_the_last_message_of_the_assistant_is_the_answer():
    row = {"messages": [*CHAT, message("user", "2 + 2?"), message("assistant", "4")]}
    asked = "system:\nBe brief.\n\nuser:\n1 + 1?\n\nassistant:\n2\n\nuser:\n2 + 2?\n\nassistant:\n"
    assert pair_of(row, TEMPLATE, "fail") == {"prompt": asked, "answer": "4"}
    row["messages"].append(message("user", "Thanks."))
    assert pair_of(row, TEMPLATE, "fail") == {"prompt": asked, "answer": "4"}
    # As TRL divides a conversation.
    halves = {"prompt": CHAT[:2], "completion": CHAT[2:]}
    assert pair_of(halves, TEMPLATE, "fail") == pair_of({"messages": CHAT}, TEMPLATE, "fail")
    asked = "<|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
    begun = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    expected = {"prompt": asked + begun, "answer": "2<|eot_id|>"}
    assert pair_of({"messages": CHAT[1:]}, LLAMA, "fail") == expected


@given(st.lists(st.text(), min_size=1), st.sampled_from([TEMPLATE, LLAMA]))
def test_what_a_message_says_is_never_read_as_a_template(contents, template):
    contents = ["{role}{content}{0.__class__}%s", *contents, "{content}"]
    row = {"messages": [message("user", each) for each in contents]}
    row["messages"][-1]["role"] = "assistant"
    prompt, answer = pair_of(row, template, "fail").values()
    head, _, tail = template.source.replace("{role}", "user").partition("{content}")
    assert prompt.startswith("".join(head + each + tail for each in contents[:-1]))
    assert answer.startswith("{content}")


def test_a_template_decides_nothing_of_texts():
    assert reading_of(DataConfig(source=FilesSource(template="{role}{content}"))) == Reading()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_message_without_content_is_left_out_of_its_conversation(tmp_path, kind):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    bare = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    asked, tool, answer = message("user", "1 + 1?"), message("tool", "2"), message("assistant", "2")
    conversations = [
        *([asked, each, tool, answer] for each in (call, bare)),
        [asked, answer, asked, call],
        [asked, bare],
    ]
    rows, path = [{"messages": each} for each in conversations], tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_rows(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    begun = "user:\n1 + 1?\n\n"
    long = (f"{begun}tool:\n2\n\nassistant:\n", "2")
    assert pairs_in(cut_file(path)) == ([long, long, (f"{begun}assistant:\n", "2")], 1)


def test_rows_without_an_answer_are_skipped_and_counted(tmp_path):
    pairs = make_pairs(6)
    rows = as_rows(pairs)
    rows[0]["answer"], rows[1]["prompt"], rows[2]["answer"], rows[3]["prompt"] = "", None, None, ""
    kept = [("", pairs[3][1]), *pairs[4:]]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert pairs_in(cut_file(path)) == (kept, 3)
    write_rows(path, as_rows([("long prompt", "ab"), ("", "abc")]))
    short = Reading(template=TEMPLATE, min_characters=3)
    assert pairs_in(cut_file(path), short) == ([("", "abc")], 1)


WRONG = [
    ('{"text": "a"}', "has neither columns 'prompt' and 'answer' nor 'messages'; it has: text"),
    ('{"prompt": 3, "answer": "a"}', "column 'prompt' is int, not text"),
    ('{"messages": "a"}', "column 'messages' is str, not a list"),
    ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
    ('{"messages": ["a"]}', "message 1 is str, not an object"),
    ('{"messages": [{"content": "a"}]}', "message 1 has no 'role'; it has: content"),
    ('{"messages": [{"role": "user", "content": 5}]}', "message 1: 'content' is int, not text"),
    ('{"prompt": "\\ud800", "answer": "a"}', "is not UTF-8: a lone surrogate at character 0"),
    ("[" * 100_000, "is not JSON: it is nested too deeply"),
]


def test_a_wrong_row_is_named_in_one_line(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", as_rows(make_pairs(20)))
    fine = path.read_text()
    for line, reason in WRONG:
        path.write_text(fine + line)
        for ranges in (cut_file(path), cut_file(path, path.stat().st_size // 2)):
            with pytest.raises(DataError) as raised:
                pairs_in(ranges)
            assert str(raised.value).startswith(f"{path}, line 21: {reason}")
            assert "\n" not in str(raised.value)
    table = tmp_path / "a.parquet"
    rows = [{"messages": CHAT}] * 9 + [{"messages": CHAT[:1]}]
    pq.write_table(pa.Table.from_pylist(rows), table, row_group_size=4)
    with pytest.raises(DataError, match=r"a\.parquet, row 10: has no message of the assistant"):
        pairs_in(cut_file(table))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.parquet", r"a\.parquet: has neither columns .*: text, prompt"),
        ("a.txt", r"a\.txt: is a text; data\.source\.pairs takes files of"),
    ],
)
def test_a_file_without_pairs_is_refused_before_it_is_divided(tmp_path, name, reason):
    pq.write_table(pa.table({"text": ["a"], "prompt": ["b"]}), tmp_path / name)
    with pytest.raises(DataError, match=reason):
        plan_partitions(cut_file(tmp_path / name), READING, 100, FactCache(tmp_path / "kept.json"))


@pytest.mark.parametrize(("name", "place"), [("a.jsonl", "line 2"), ("a.parquet", "row 2")])
def test_texts_that_are_not_utf8_are_treated_as_documents_are(tmp_path, name, place):
    path = tmp_path / name
    if name == "a.jsonl":
        path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "c"}\n')
    else:
        binary = pa.array([b"a", b"\xff"]).view(pa.string())
        pq.write_table(pa.table({"prompt": binary, "answer": ["b", "c"]}), path)
    with pytest.raises(DataError, match=f"{path}, {place}: is not UTF-8"):
        pairs_in(cut_file(path))
    skipping, replacing = (Reading(errors=e, template=TEMPLATE) for e in ("skip", "replace"))
    assert pairs_in(cut_file(path), skipping) == ([("a", "b")], 1)
    assert pairs_in(cut_file(path), replacing) == ([("a", "b"), ("�", "c")], 0)


def test_any_ranges_of_a_file_hold_each_pair_once(tmp_path):
    pairs = make_pairs(40)
    path = write_rows(tmp_path / "a.jsonl", as_rows(pairs))
    size = path.stat().st_size
    for cuts in ([size // 3], [1, 2, 3], range(100, size, 997)):
        assert pairs_in(cut_file(path, *cuts))[0] == pairs
    table = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(as_rows(pairs)), table, row_group_size=7)
    assert pairs_in(cut_file(table, 2, 3))[0] == pairs


@pytest.mark.parametrize("columns", ["prompt answer", "messages"])
def test_a_hub_dataset_of_pairs_may_have_any_form_and_a_limit(tmp_path, columns):
    folder = tmp_path / "hub"
    rows, pairs = rows_with(columns, make_pairs(9))
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")

    def read(**fields):
        source = HubSource(repository=str(folder), pairs=True, **fields)
        config = DataConfig(source=source)
        return pairs_in(download(config, tmp_path / "out").ranges, reading_of(config))[0]

    assert read() == pairs
    assert read(limit=4) == pairs[:4]
    (folder / "train.parquet").unlink()
    (folder / "train.json").write_text(json.dumps(rows))
    assert read() == pairs
