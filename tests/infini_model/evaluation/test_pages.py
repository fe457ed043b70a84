"""Generated text is untrusted: it stays text in the report, in Markdown and as a page."""

import base64
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infini_model.evaluation.reporting.markdown import fenced, table
from infini_model.evaluation.reporting.page import to_html

ANY = st.text(st.sampled_from("`~\n\r\t\x00\x1b[0m#<é\u202e a"), max_size=40) | st.text()


@given(ANY)
def test_nothing_closes_the_block_and_no_control_character_is_in_it(text):
    block = fenced(text)
    fence, *body, last = block.split("\n")
    marks = fence.removesuffix("text")
    assert set(marks) == {"`"}
    assert last == marks
    assert not any(re.fullmatch(rf" *{marks}`* *", line) for line in body)
    assert all(c.isprintable() or c in "\n\t" for c in block)


# What a page of plain Markdown consists of, and the attributes that it may have.
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "ol", "li"),
    *("pre", "code", "table", "thead", "tbody", "tr", "th", "td", "img", "span", "em", "strong"),
    *("a", "hr", "br", "blockquote", "h4", "h5", "h6"),
}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)></code></pre>"


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def check(page):
    """Nothing runs, and nothing is fetched."""
    parsed = Parsed(page)
    for name, attributes in parsed.elements:
        assert name in ELEMENTS
        assert not [key for key in attributes if key.startswith("on")]
        if name == "img":
            assert attributes["src"].startswith("data:image/png;base64,")
    return parsed


@pytest.mark.parametrize("quote", [fenced, str, lambda text: table(("a", "b"), [(text, text)])])
def test_a_script_in_a_sample_stays_text(quote):
    parsed = check(to_html(quote(HOSTILE), HOSTILE, {}))
    assert parsed.text.count("<script>alert(1)</script>") >= 2  # the title and the body
    assert [name for name, _ in parsed.elements].count("title") == 1


def test_pictures_are_in_the_page_and_others_are_not(tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG picture")
    text = "![One <b>](plots/a.png)\n\n![Other](https://example.com/b.png)\n\n![x](plots/c.png)"
    parsed = check(to_html(text, "run", {"plots/a.png": picture}))
    ((_, image),) = [each for each in parsed.elements if each[0] == "img"]
    assert base64.b64decode(image["src"].partition(",")[2]) == picture.read_bytes()
    assert image["alt"] == "One <b>"
    assert "example.com" not in to_html(text, "run", {})
    for caption in ("One <b>", "Other", "x"):
        assert caption in parsed.text


def test_the_page_forbids_itself_scripts_and_connections():
    policy = next(a for n, a in check(to_html("", "run", {})).elements if "http-equiv" in a)
    assert policy["content"].split(";")[0] == "default-src 'none'"
    assert "script-src" not in policy["content"]
