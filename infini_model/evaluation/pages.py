"""Pieces of Markdown, and a page of it for a browser.

The page is one HTML file that needs no network, in light and dark, and print. Raw HTML in it stays
text, and it forbids itself scripts and connections: parts of a report were written by a model.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from infini_model.runtime.storage import atomic_file

STYLE = Path(__file__).with_name("report.css")
# A report may quote anything: no scripts, nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with its first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def estimate(value: float, ends: Iterable[float] = (), digits: int = 4) -> str:
    """A number, such as `0.0512`, or `0.0512 (0.0398 to 0.0611)` with the ends of an interval."""
    shown, *interval = (f"{each:,.{digits}f}" for each in (value, *ends))
    return f"{shown} ({' to '.join(interval)})" if interval else shown


def fenced(text: str) -> str:
    """`text` as a Markdown code block whose fence is longer than any in the text.

    Control characters, which a terminal might interpret, become U+FFFD.
    """
    text = text.replace("\r\n", "\n")
    text = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def bullets(sentences: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {sentence}" for sentence in sentences)


def images(pictures: Mapping[str, Path], folder: Path) -> list[str]:
    """Pictures by caption as Markdown, with paths relative to the page in `folder`."""
    return [f"![{name}]({path.relative_to(folder).as_posix()})" for name, path in pictures.items()]


def write_pages(
    text: str, title: str, markdown: Path, page: Path, pictures: Sequence[Path]
) -> None:
    """Write `text` as Markdown and, in the same folder, as a page that holds its `pictures`.

    Raises `UserError` if the disk is full.
    """
    found = {path.relative_to(markdown.parent).as_posix(): path for path in pictures}
    for path, content in ((markdown, text), (page, to_html(text, title, found))):
        with atomic_file(path) as temporary:
            temporary.write_text(content, encoding="utf-8")


def to_html(text: str, title: str, pictures: Mapping[str, Path]) -> str:
    """The Markdown `text` as a page.

    `pictures` has the PNG file of each image by its address in `text`; other images are left out.
    """
    from markdown_it import MarkdownIt

    converter = MarkdownIt("commonmark", {"html": False}).enable("table")
    converter.add_render_rule("image", _image)
    body = converter.render(text, {"pictures": pictures})
    style = STYLE.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def _image(
    renderer: Any, tokens: Sequence[Any], index: int, options: Any, env: Mapping[str, Any]
) -> str:
    """An image with its content and its caption; a rule of markdown-it's renderer."""
    image = tokens[index]
    caption = escape(renderer.renderInlineAsText(image.children, options, env))
    path = env["pictures"].get(image.attrs["src"])
    if path is None:
        return caption
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        f'<span class="caption">{caption}</span>'
    )
