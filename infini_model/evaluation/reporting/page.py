"""The report as one HTML file that needs no network: for a browser, in light and dark, and print.

It is converted from the report's Markdown. Raw HTML in it stays text, and the page forbids itself
scripts and connections, since parts of a report were written by a model.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --page: #ffffff; --faint: #6b7280;
  --line: #d1d5db; --box: #f3f4f6; --link: #1d4ed8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --page: #111827; --faint: #9ca3af; --line: #374151; --box: #1f2937;
    --link: #93c5fd; } }
body { margin: 2.5rem auto; padding: 0 1.25rem; max-width: 60rem; color: var(--text);
  background: var(--page); font: 1rem/1.55 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; break-after: avoid; }
h2 { margin-top: 2.5rem; padding-bottom: 0.3rem; border-bottom: 1px solid var(--line); }
a { color: var(--link); }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: 0.9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.75rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
th { vertical-align: bottom; }
th:empty { padding: 0; }
td[style] { white-space: nowrap; }
@media (min-width: 50rem) { td:has(+ td[style]) { white-space: nowrap; } }
code { padding: 0.1em 0.3em; border-radius: 0.25rem; background: var(--box); font-size: 0.88em;
  overflow-wrap: anywhere; }
pre { padding: 0.75rem 1rem; border-radius: 0.5rem; background: var(--box);
  white-space: pre-wrap; }
pre code { padding: 0; background: none; }
img { display: block; box-sizing: border-box; width: 100%; padding: 0.5rem;
  border: 1px solid var(--line); border-radius: 0.5rem; background: #ffffff; }
.caption { display: block; margin-top: 0.4rem; color: var(--faint); font-size: 0.9rem; }
@media print {
  :root { --text: #000000; --page: #ffffff; --faint: #4b5563; --line: #9ca3af; --box: #f3f4f6;
    --link: #000000; }
  @page { margin: 16mm; }
  body { margin: 0; padding: 0; max-width: none; font-size: 10pt; }
  table { display: table; width: 100%; font-size: 7.5pt; }
  th, td { padding: 0.2rem 0.4rem; }
  p, tr, img { break-inside: avoid; } }
"""
# A report may quote anything: no scripts, nothing from elsewhere.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_html(text: str, title: str, pictures: Mapping[str, Path]) -> str:
    """The Markdown `text` as a page.

    `pictures` has the PNG file of each image by its address in `text`; other images are left out.
    """
    from markdown_it import MarkdownIt

    converter = MarkdownIt("commonmark", {"html": False}).enable("table")
    converter.add_render_rule("image", _image)
    body = converter.render(text, {"pictures": pictures})
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
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
