"""Generated text is untrusted: it must not break out of its code block."""

import re

from hypothesis import given
from hypothesis import strategies as st

from infini_model.evaluation.reporting.markdown import fenced, table

ANY = st.text(st.sampled_from("`~\n\r\t\x00\x1b[0m#<é\u202e a"), max_size=40) | st.text()


@given(ANY)
def test_nothing_closes_the_block(text):
    fence, *body, last = fenced(text).split("\n")
    marks = fence.removesuffix("text")
    assert set(marks) == {"`"}
    assert last == marks
    assert not any(re.fullmatch(rf" *{marks}`* *", line) for line in body)


@given(ANY)
def test_control_characters_are_replaced(text):
    assert all(c.isprintable() or c in "\n\t" for c in fenced(text))


def test_plain_text_is_unchanged():
    assert fenced("a\n\tb ``` c") == "````text\na\n\tb ``` c\n````"


def test_table():
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"
