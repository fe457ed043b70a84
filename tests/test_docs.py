"""The documentation: its commands parse, its settings load, its links resolve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from flows.cli import app
from flows.options import read
from flows.presets import preset_names
from infini_model.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
BENCHMARK = re.compile(r"\bbenchmarks\.(\w+)")
TEST_FILE = re.compile(r"\btests/[\w/]+\.py")
TARGET = re.compile(r"(?:^|`)make (\w+)", re.MULTILINE)
SETTING = re.compile(rf"(?:{'|'.join(Config.model_fields)})(?:\.\w+)+=\S+")


def _blocks(page: Path, language: str) -> list[str]:
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for name, text in found if name == language]


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _simple_commands(line: str) -> Iterator[list[str]]:
    """The commands of a shell line, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = iter(lexer)
    for token in tokens:
        if set(token) <= set("|&;"):
            yield words
            words = []
        elif set(token) <= set("<>&"):
            next(tokens)
            if words and words[-1] == "2":  # as in 2>&1
                words.pop()
        else:
            words.append(token)
    yield words


def _commands(page: Path) -> list[str]:
    """The `infini` commands of a page: lines of its sh blocks, and those quoted in its prose."""
    lines = [
        line
        for block in _blocks(page, "sh")
        for line in block.replace("\\\n", " ").splitlines()
        if re.search(r"(^|\s)infini\s", line)
    ]
    quoted = [text.replace(r"\|", "|") for text in INLINE.findall(_prose(page))]
    return [*lines, *(text for text in quoted if re.match(r"infini [a-z]", text))]


COMMANDS = [
    pytest.param(words[1:], id=f"{page.name}: {' '.join(words)}")
    for page in PAGES
    for line in _commands(page)
    for words in _simple_commands(line)
    if words[:1] == ["infini"]
]


def _parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of a command line, by the real parser; nothing is run."""
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    return name, group.commands[name].make_context(name, rest).params


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_parses_and_its_settings_load(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, given = _parse(arguments)
    if "overrides" not in given:
        words = [word for word in given.get("arguments") or () if "=" in word]
        load_config(overrides=words)
        return
    for key in ("config", "data_dir", "output_dir", "tensorboard_dir"):
        given[key] = given[key] and Path(given[key])
    if given["config"]:
        given["config"].write_text("")
    assert read(given, name)


def test_there_are_commands_of_every_kind() -> None:
    named = {parameter.values[0][0] for parameter in COMMANDS}
    assert named == {
        command.name or command.callback.__name__ for command in app.registered_commands
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_settings_load(page: Path) -> None:
    for text in filter(SETTING.fullmatch, INLINE.findall(_prose(page))):
        load_config(overrides=[text])


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(_prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_readme_lists_every_preset() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| preset \|.*?\n\n", text, re.DOTALL)
    assert set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == set(preset_names())


def test_the_benchmarks_make_targets_and_tests_that_are_named_exist() -> None:
    pages = [page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CONTRIBUTING.md"]]
    benchmarks = {name for page in pages for name in BENCHMARK.findall(page)} - {"NAME"}
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert {"recall", "memory_estimate"} <= benchmarks <= modules
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {name for page in pages for name in TARGET.findall(page)}
    assert {"run", "test"} <= targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    (run_by_bench,) = re.findall(r"^BENCHMARKS \?= (.*)$", makefile, re.MULTILINE)
    assert set(run_by_bench.split()) <= modules
    files = {name for page in pages for name in TEST_FILE.findall(page)}
    assert [name for name in files if not (ROOT / name).exists()] == []
