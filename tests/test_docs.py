"""The documentation: its commands parse, its site is built, and what needs no network runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from commands import Environment, Running, infini, succeed, tiny, write_settings, write_texts
from llamas import write_llama
from ports import free_port
from real import llama_cpp

import infini_model
from flows.cli import app
from flows.cli.options import read
from flows.presets import preset_names
from infini_model.config import Config, load_config
from infini_model.config.explaining import all_keys, reference
from infini_model.training.mlflow_record import read_mlflow_record

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
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
    for folder in ("texts", "chats"):  # What is at /texts for a reader is in a folder of the test.
        (tmp_path / folder).mkdir()
        for kind in ("txt", "jsonl"):
            (tmp_path / folder / f"0.{kind}").write_text("{}")
    here = [re.sub(r"/(?=(texts|chats)/)", f"{tmp_path}/", each) for each in arguments]
    name, given = _parse(here)
    if "config" not in given:  # It has settings of its own, or none.
        typed = given.get("arguments") or given.get("overrides") or ()
        load_config(overrides=[word for word in typed if "=" in word])
        return
    if given["config"]:
        given["config"] = Path(given["config"])
        given["config"].write_text("data: {source: {paths: [/texts/*.txt]}}")
    assert read(given, name)


def test_there_are_commands_of_every_kind() -> None:
    named = {parameter.values[0][0] for parameter in COMMANDS}
    assert named == {each.name or each.callback.__name__ for each in app.registered_commands}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_settings_load(page: Path) -> None:
    for text in filter(SETTING.fullmatch, INLINE.findall(_prose(page))):
        load_config(overrides=[text])


def test_the_site_has_every_public_name_and_no_broken_link(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "sphinx", "-M", "html", ROOT / "docs", tmp_path]
    subprocess.run([*build, "--fail-on-warning", "--keep-going", "--quiet"], check=True)
    page = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    assert [name for name in infini_model.__all__ if f'id="infini_model.{name}"' not in page] == []


def test_the_pages_stay_few_and_short() -> None:
    lines = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert lines.pop("README.md") <= 150
    for name in ("settings.md", "index.md", "api.md", "contributing.md"):
        del lines[name]
    assert len(lines) <= 14
    assert sum(lines.values()) <= 2091, lines


def test_the_reference_is_that_of_the_settings() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == reference() + "\n", "infini settings > docs/settings.md"
    assert set(re.findall(r"^- `([\w.]+)`", page, re.MULTILINE)) >= set(all_keys())


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


RUN = Path("outputs", "runs", "first")
# Commands on runs and datasets that are there. The others parse, and those of the README's
# list run in e2e/test_newcomer.py.
READERS = re.compile(r"infini (evaluate|generate|export|verify|clean|logs|runs)\b")
# Of an object store, the hub, a task of the reader's own, a run of LoRA.
ELSEWHERE = re.compile(r"s3://|--push|lm_eval|--merge|quickstart-3")


@dataclass(frozen=True)
class Reader:
    """Someone who has the run `first`, and types into a shell what a page says."""

    folder: Path
    env: Environment

    @property
    def dataset(self) -> Path:
        (found,) = (self.folder / "outputs" / "datasets").glob("mine-*")
        return found

    def type(self, line: str) -> None:
        succeed(["bash", "-ec", line], self.env, cwd=self.folder)


@pytest.fixture(scope="module")
def reader(
    tmp_path_factory: pytest.TempPathFactory, session_environment: Environment, server: str
) -> Reader:
    """A folder with `mine.yaml`, the run of it, a Llama, an `infini` and a home."""
    folder = tmp_path_factory.mktemp("reader")
    tree = tiny(write_texts(folder / "texts", 120), Path("outputs"), run={"name": "first"})
    tree["tracking"]["mlflow"] = True
    # What opens in transformers, and is long enough for every task of the evaluation.
    tree["model"]["memory"] = "none"
    tree["data"] |= {"name": "mine", "tokenizer": {"spec": "train", "vocab_size": 300}}
    tree["packing"]["context_length"] = 256
    few = {"trials": 1, "depths": [0.0, 30.0, 60.0, 90.0]}
    tree["evaluation"] |= {"max_windows": 2, "passkey": few}
    write_settings(folder / "mine.yaml", tree)
    write_llama(folder / "llama")
    (folder / "book.txt").write_text("river stone light")
    env = {
        **session_environment,
        "HOME": str(folder),
        "PREFECT_API_URL": server,
        "PATH": f"{Path(sys.executable).parent}:{session_environment['PATH']}",
    }
    made = Reader(folder, env)
    made.type("infini run --config mine.yaml")
    return made


def _lines(page: Path) -> list[str]:
    """The commands of a page on what is there, without their comments."""
    shell = "".join(_blocks(page, "sh"))
    found = [line.partition("  #")[0].rstrip() for line in shell.splitlines()]
    return [line for line in found if READERS.match(line) and not ELSEWHERE.search(line)]


README, *OTHERS = PAGES
LINES = {line for page in OTHERS for line in _lines(page)}


@pytest.mark.story
@pytest.mark.parametrize("line", sorted(LINES - {*_lines(README)}))
def test_a_command_of_the_pages_succeeds(line: str, reader: Reader) -> None:
    if "~/llama.cpp" in line:
        (reader.folder / "llama.cpp").symlink_to(llama_cpp())
    reader.type(line.replace("mine-0123456789abcdef", reader.dataset.name))


@pytest.mark.story
def test_the_stages_run_without_prefect(reader: Reader) -> None:
    (block,) = [each for each in _blocks(ROOT / "docs" / "train.md", "sh") if "torchrun" in each]
    for number, line in enumerate(block.splitlines()):
        # The second training is a new one, too; it is what is evaluated.
        run_dir = f"outputs/runs/direct-{min(number, 2)}"
        reader.type(line.replace("DATASET", str(reader.dataset)).replace("RUN", run_dir))
    assert (reader.folder / "outputs/runs/direct-2/evaluation.json").is_file()


@pytest.fixture(scope="module")
def debug(reader: Reader) -> Path:
    """What a training that diverged left to look at."""
    diverging = "run.name=diverged training.learning_rate=1e30 stages.retries=0"
    reader.type(f"! infini train --config mine.yaml --debug {diverging}")
    (folder,) = (reader.folder / "outputs" / "runs" / "diverged" / "debug").iterdir()
    return folder


@pytest.mark.story
@pytest.mark.parametrize(
    "page", [page for page in PAGES if _blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs(page: Path, reader: Reader, debug: Path) -> None:
    record = read_mlflow_record(reader.folder / RUN)
    here = {
        "runs/latest": "runs/first",
        '"latest"': '"first"',
        '"bytes"': f'"{RUN / "model"}"',
        '"cuda"': '"cpu"',
        "path/to/Llama-3.2-1B": "llama",
        "path/to/folder": "saved",
        "models/first": str(RUN / "model"),
        "debug/step-12": str(debug),
        "http://127.0.0.1:5000": record["tracking_uri"],
        "<run id>/quickstart-1": f"{record['run_id']}/{RUN.name}",
        "http://127.0.0.1:8000": f"http://127.0.0.1:{(port := free_port())}",
    }
    code = "\n".join(_blocks(page, "python"))
    for word, replacement in here.items():
        code = code.replace(word, replacement)
    (reader.folder / "snippet.py").write_text(code)
    if "OpenAI(" not in code:
        reader.type("python snippet.py")
        return
    command = infini("api", reader.folder / RUN, "--port", str(port))
    api = Running(command, reader.folder / "api.log", reader.env, cwd=reader.folder)
    try:
        api.wait_for("Ready.")
        reader.type("python snippet.py")
    finally:
        api.end()
