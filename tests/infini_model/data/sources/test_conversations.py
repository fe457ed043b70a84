"""Conversations from rows of any format and by any names, in pieces of text."""

import json
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import as_rows, cut_file, make_pairs, write_rows
from hypothesis import given
from hypothesis import strategies as st
from real import real_tokenizer, smollm2
from templates import of_messages
from transformers import AutoTokenizer

from infini_model.config import FilesSource, HubSource
from infini_model.data.partitions import plan_partitions
from infini_model.data.sources.chat import PLAIN_TEMPLATE, ChatTemplate
from infini_model.data.sources.conversations import Conversations
from infini_model.data.sources.formats import read_documents
from infini_model.data.sources.listing import reading_of
from infini_model.data.sources.rows import Reading
from infini_model.data.tokenizers.load import load_tokenizer
from infini_model.runtime.errors import DataError
from infini_model.runtime.fact_cache import FactCache

TEMPLATE = ChatTemplate(PLAIN_TEMPLATE)
LINE = "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
LLAMA = ChatTemplate(of_messages(LINE))
PLAIN = Conversations(TEMPLATE)
READING = Reading(conversations=PLAIN)


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
    """The pieces of each conversation in ranges of files, and how many rows were left out."""
    batches, found = list(read_documents(ranges, reading, 2000)), []
    for batch in batches:
        texts = batch.texts.to_pylist()
        assert batch.edges[-1] == len(texts)
        found += [tuple(texts[first:last]) for first, last in pairwise(batch.edges)]
    return found, sum(batch.skipped for batch in batches)


@pytest.mark.parametrize("columns", ["prompt answer", "prompt completion", "messages"])
def test_the_pairs_are_those_of_the_rows_in_every_format(tmp_path, columns):
    rows, pairs = rows_with(columns, make_pairs(40))
    # A row of messages may have other columns, too.
    rows = [{"prompt": "alone", "other": [1]} | row for row in rows]
    table = pa.Table.from_pylist(rows)
    write_rows(tmp_path / "a.jsonl", rows)
    pq.write_table(table, tmp_path / "b.parquet", row_group_size=7)
    for path in tmp_path.iterdir():
        assert pairs_in(cut_file(path)) == (pairs, 0)


def test_every_message_of_the_assistant_is_learned_or_the_last_alone():
    row = {"messages": [*CHAT, message("user", "2 + 2?"), message("assistant", "4")]}
    first = "system:\nBe brief.\n\nuser:\n1 + 1?\n\nassistant:\n"
    second = "\n\nuser:\n2 + 2?\n\nassistant:\n"
    last = Conversations(TEMPLATE, "last")
    for _ in range(2):
        assert PLAIN.pieces(row, "fail") == [first, "2", second, "4"]
        assert last.pieces(row, "fail") == [f"{first}2{second}", "4"]
        row["messages"].append(message("user", "Thanks."))
    begun = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    asked = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>" + begun
    assert Conversations(LLAMA).pieces({"messages": row["messages"][1:]}, "fail") == [
        *(asked.format("1 + 1?"), "2<|eot_id|>", asked.format("2 + 2?"), "4<|eot_id|>")
    ]


SAID = ["system:\nBe brief.\n\nuser:\n1 + 1?\n\nassistant:\n", "2"]
SHAREGPT = [("system", "Be brief."), ("human", "1 + 1?"), ("gpt", "2")]
PARTS = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"messages": [CHAT[0], message("user", PARTS), CHAT[2]]},
        {"messages": CHAT[1:], "system": "Be brief.", "source": None},
        {"conversations": [{"from": who, "value": said} for who, said in SHAREGPT]},
        {"conversations": CHAT, "tools": ""},
        # As TRL divides a conversation.
        {"prompt": CHAT[:2], "completion": CHAT[2:]},
        {"system_prompt": "Be brief.", "question": "1 + 1?", "response": "2"},
        {"system": "Be brief.", "prompt": "1 + 1?", "response": "2"},
        {"system": "Be brief.", "instruction": "1 + 1?", "input": "", "output": "2"},
        {"system": b"Be brief.", "question": b"1 + 1?", "answer": b"2", "input": "other"},
    ],
)
def test_a_conversation_is_the_same_in_the_columns_of_any_dataset(row):
    assert PLAIN.pieces(row, "fail") == SAID


def test_columns_may_be_named_and_what_an_instruction_is_about_follows_it():
    named = Conversations(TEMPLATE, columns=("q", "a"))
    row = {"q": "1 + 1?", "a": "2", "system": "Be brief.", "messages": CHAT[:1]}
    assert named.pieces(row, "fail") == SAID
    assert named.columns_in(row) == ["q", "a", "system"]
    assert Conversations(TEMPLATE, columns=("talk",)).pieces({"talk": CHAT}, "fail") == SAID
    with pytest.raises(DataError, match="has no columns 'q' and 'a'; it has: messages"):
        named.columns_in(["messages"])
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    assert PLAIN.pieces(row, "fail")[0] == "user:\nAdd.\n1 + 1\n\nassistant:\n"


CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": [1.5, 2.5]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_real_template_shows_the_tools_and_learns_their_calls(tmp_path, kind):
    call = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    talk = [message("user", "12 + 1?"), call, message("tool", "13"), message("assistant", "13.")]
    rows, path = [{"messages": talk, "tools": [TOOL]}] * 2, tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_rows(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    folder = real_tokenizer("qwen3")
    reading = Reading(conversations=Conversations(load_tokenizer(str(folder)).chat()))
    (pieces, again), _ = pairs_in(cut_file(path), reading)
    assert pieces == again
    theirs = AutoTokenizer.from_pretrained(folder)
    said = [{**each, "content": each["content"] or ""} for each in talk]
    text = theirs.apply_chat_template(said, tools=[TOOL], tokenize=False)
    assert "".join(pieces) == text.rstrip()
    begun, called, ended = pieces[1].partition("{")
    assert begun == "<tool_call>\n"
    assert json.loads(called + ended.partition("\n")[0]) == CALLED["function"]
    assert pieces[3].endswith("13.<|im_end|>")


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen3", "deepseek_v3"])
def test_what_a_real_template_teaches_is_what_the_assistant_says(name):
    folder = smollm2() if name == "smollm2" else real_tokenizer(name)
    chat, theirs = load_tokenizer(str(folder)).chat(), AutoTokenizer.from_pretrained(folder)
    answers = ["2", "  user asked\n", "👍 <b>"]
    talk = [m for said in answers for m in (message("user", said), message("assistant", said))]
    pieces = Conversations(chat).pieces({"messages": talk}, "fail")
    text = theirs.apply_chat_template(talk, tokenize=False)
    assert chat.begin + "".join(pieces) == text.rstrip().removesuffix(chat.end)
    assert len(pieces) == 2 * len(answers)
    for said, asked, learned in zip(answers, pieces[::2], pieces[1::2], strict=True):
        assert said.strip() in learned
        assert said.strip() in asked
        assert learned.count("user") == said.count("user")


@given(st.lists(st.text(), min_size=1), st.sampled_from([LINE, "{role}:\n{content}\n\n"]))
def test_what_a_message_says_is_never_read_as_a_template(contents, line):
    contents = ["{{ messages }}{% if %}{# %s", *contents, "{{ messages }}"]
    row = {"messages": [message("user", each) for each in contents]}
    row["messages"][-1]["role"] = "assistant"
    prompt, answer = Conversations(ChatTemplate(of_messages(line))).pieces(row, "fail")
    head, _, tail = line.replace("{role}", "user").partition("{content}")
    assert prompt.startswith("".join(head + each + tail for each in contents[:-1]))
    assert answer.startswith("{{ messages }}")


def test_a_template_decides_nothing_of_texts():
    assert reading_of(FilesSource(template="{{ messages }}")) == Reading()


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
    last = Reading(conversations=Conversations(TEMPLATE, "last"))
    for reading in (READING, last):
        found = [long, long, (f"{begun}assistant:\n", "2")]
        assert pairs_in(cut_file(path), reading) == (found, 1)


def test_rows_without_an_answer_are_skipped_and_counted(tmp_path):
    pairs = make_pairs(6)
    rows = as_rows(pairs)
    rows[0]["answer"], rows[1]["prompt"], rows[2]["answer"], rows[3]["prompt"] = "", None, None, ""
    kept = [("", pairs[3][1]), *pairs[4:]]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert pairs_in(cut_file(path)) == (kept, 3)
    write_rows(path, as_rows([("long prompt", "ab"), ("", "abc")]))
    short = Reading(conversations=PLAIN, min_characters=3)
    assert pairs_in(cut_file(path), short) == ([("", "abc")], 1)


WRONG = [
    ('{"text": "a"}', "has no columns of a conversation, which are prompt + answer, "),
    ('{"prompt": 3, "answer": "a"}', "column 'prompt' is int, not text"),
    ('{"messages": "a"}', "column 'messages' is neither a list nor JSON: Expecting value"),
    ('{"messages": "3"}', "column 'messages' is int, not a list"),
    ('{"messages": [{"role": "user", "text": "a"}]}', "message 1 has no 'content'; it has: role, "),
    ('{"messages": [{"from": "human", "text": "a"}]}', "message 1 has no 'value'; it has: from, "),
    (
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        "message 1: 'content': part 1 is image, not text",
    ),
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
        ("a.parquet", r"a\.parquet: has no columns of .*: text, prompt"),
        ("a.txt", r"a\.txt: is text; data\.source\.pairs takes files of rows"),
    ],
)
def test_a_file_without_pairs_is_refused_before_it_is_divided(tmp_path, name, reason):
    pq.write_table(pa.table({"text": ["a"], "prompt": ["b"]}), tmp_path / name)
    with pytest.raises(DataError, match=reason):
        plan_partitions(cut_file(tmp_path / name), READING, 100, FactCache(tmp_path / "kept.json"))


def test_texts_that_are_not_utf8_are_treated_as_documents_are_and_refused_in_a_table(tmp_path):
    path, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xff", "answer": "c"}\n')
    with pytest.raises(DataError, match=f"{path}, line 2: is not UTF-8"):
        pairs_in(cut_file(path))
    binary = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": binary, "answer": ["b", "c"]}), table)
    with pytest.raises(DataError, match=f"{table}: cannot be read: .*Invalid UTF8"):
        pairs_in(cut_file(table))
    skipping, replacing = (Reading(errors=e, conversations=PLAIN) for e in ("skip", "replace"))
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
    reading = reading_of(HubSource(repository="team/pairs", pairs=True))
    rows, pairs = rows_with(columns, make_pairs(9))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (whole,) = cut_file(tmp_path / "train.parquet")
    assert pairs_in([whole], reading)[0] == pairs
    assert pairs_in([whole.model_copy(update={"rows": 4})], reading)[0] == pairs[:4]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    assert pairs_in(cut_file(tmp_path / "train.json"), reading)[0] == pairs
