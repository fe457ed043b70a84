"""Sphinx's settings, by which the pages that are read in the repository become a site."""

import os
import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
# Pages of the repository that are not in docs/.
OUTSIDE = {"index": DOCS.parent / "README.md", "contributing": DOCS.parent / "CONTRIBUTING.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)]*)?\)")

project, release = "Infini-Llama", metadata.version("infini-llama")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = html_show_sourcelink = False
highlight_language = "none"
myst_heading_anchors = 4
nb_execution_mode = "off"  # a test runs it, and the outputs are in it
default_role = "code"  # docstrings quote names in single backticks
autoclass_content = "both"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True


def read_page(_app: Sphinx, name: str, text: list[str]) -> None:
    """Put README.md and CONTRIBUTING.md where the site has them, and make all links fit it."""
    page = OUTSIDE.get(name, DOCS / name)
    moved = {outside: DOCS / f"{inside}.md" for inside, outside in OUTSIDE.items()}

    def link(found: re.Match[str]) -> str:
        words, address, anchor = found.groups(default="")
        target = (page.parent / address).resolve()
        if target.is_dir():  # A file becomes a download; of a folder only the name is left.
            return words
        return f"[{words}]({os.path.relpath(moved.get(target, target), DOCS)}{anchor})"

    if name in OUTSIDE:
        text[0] = page.read_text(encoding="utf-8") + text[0]
    text[0] = LINK.sub(link, text[0])


def setup(app: Sphinx) -> None:
    """Connect `read_page`."""
    app.connect("source-read", read_page)
