"""`infini show` as users run it: counts, and the first batch of the training, as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import Environment, dataset_of, infini_here, tiny, write_settings, write_texts

from infini_model.config import PackingConfig, TrainingConfig
from infini_model.data.loading.loader import Loader, make_phases
from infini_model.data.loading.windows import open_windows

Show = Callable[..., str]
HOSTILE = "\x1b[31mred\r\u202e [bold]not[/bold]\ttabbed :smile:"
ALL = {"train": 1.0, "validation": 0.0, "test": 0.0}
ANSWERS = [[f"answer {n}.{turn} 🦊" for turn in range(n % 3 + 1)] for n in range(30)]


@pytest.fixture
def show(alone: Environment, tmp_path: Path) -> Show:
    """Runs `infini show`, which must succeed; returns its output, on a terminal or not."""

    def run(*arguments: str | Path, terminal: bool = False) -> str:
        env = alone | ({"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {})
        done = infini_here("show", "--config", tmp_path / "settings.yaml", *arguments, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def texts(tmp_path: Path, output: Path) -> list[str]:
    """The texts of a dataset, some of them equal."""
    folder = write_texts(tmp_path / "texts", 60)
    for number in range(7):
        (folder / f"again{number}.txt").write_bytes((folder / f"{number % 5:04d}.txt").read_bytes())
    sections = {"training": {"batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 20}}
    tree = tiny(folder, output, **sections)
    dataset_of(write_settings(tmp_path / "settings.yaml", tree))
    return [path.read_bytes().decode() for path in folder.iterdir()]


def windows_in(output: str) -> list[tuple[int, str]]:
    """The numbers of the windows in what `show` printed, and their texts."""
    parts = re.split(r"\n── window ([\d,]+) ──\n", output)
    return [
        (int(n.replace(",", "")), text) for n, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


@pytest.mark.parametrize(
    "packing",
    [
        {"mode": "packed"},
        {"mode": "aligned"},
        {"mode": "aligned", "context_schedule": {0: 2, 0.5: 4}},
        {"mode": "document", "remainder": "pad"},
    ],
    ids=str,
)
def test_the_first_batch_is_that_of_the_training(
    texts: list[str], show: Show, output: Path, packing: dict[str, object]
) -> None:
    settings = [f"packing.{key}={value}".replace("'", "") for key, value in packing.items()]
    shown = show("--all", "tiny", "launch.processes=2", "run.seed=5", *settings)
    assert f"Exact duplicates: {len(texts) - len(set(texts))} (" in shown
    (folder,) = (output / "datasets").glob("tiny-*")
    config = PackingConfig(context_length=64, **packing)
    whole = open_windows(folder, "train", config, 16)
    phases = make_phases(whole, config, 16, TrainingConfig(max_steps=20), global_batch=12)
    ranks = [
        Loader(
            whole,
            batch_size=3,
            gradient_accumulation_steps=2,
            rank=rank,
            world_size=2,
            seed=5,
            phases=phases,
        )
        for rank in (0, 1)
    ]
    numbers = [int(number) for rank in ranks for number in rank.numbers(0).reshape(-1)]
    windows = ranks[0].windows_at(0)
    for rank in ranks:
        rank.close()
    found = windows_in(shown)
    assert [number for number, _ in found] == numbers
    for number, text in found:
        rows = windows.packing.locate(np.array([number]))
        ranges = map(range, rows.starts.tolist(), (rows.starts + rows.valid + 1).tolist())
        # The last target of a row is also the first token of a row that continues it.
        positions = np.array(sorted(set().union(*ranges)))
        tokens = windows.stream.gather(positions, 1).tobytes()
        expected = tokens.replace(b"\xff", b"<|end_of_text|>").decode("utf-8", "replace")
        text, count = re.subn(r"\n── segment \d+ begins a document ──\n", "", text)
        assert text.rstrip("\n") == expected.rstrip("\n")
        assert count <= rows.first[1:].sum() if packing["mode"] == "aligned" else not count


def test_what_is_not_learned_of_a_conversation_is_dim(
    tmp_path: Path, output: Path, show: Show
) -> None:
    talks = [
        [each for answer in answers for each in (("human", f"🐦 say {answer}"), ("gpt", answer))]
        for answers in ANSWERS
    ]
    rows = [{"conversations": [{"from": a, "value": b} for a, b in talk]} for talk in talks]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"paths": [str(tmp_path / "talks.jsonl")], "pairs": True}
    tokenizer = {"spec": "train", "vocab_size": 300}
    tree = tiny(tmp_path, output, data={"source": source, "tokenizer": tokenizer, "splits": ALL})
    dataset_of(write_settings(tmp_path / "settings.yaml", tree))
    fit = ("packing.mode=document", "packing.remainder=pad", "packing.context_length=512")
    shown = show("--all", *fit, f"training.batch_size={len(ANSWERS)}", terminal=True)
    found = []
    for _, text in windows_in(shown.replace("\x1b[1m", "").replace("\x1b[0m", "\0")):
        runs = re.findall(r"\x1b\[2m([^\0]*)\0([^\0\x1b]*)", text)
        assert "".join(f"\x1b[2m{dim}\0{learned}" for dim, learned in runs) == text.lstrip("\0")
        assert not any("answer" in dim.replace("say answer", "") for dim, _ in runs)
        found.append([learned.strip() for _, learned in runs])
    spoken = [[*answers[:-1], f"{answers[-1]}<|end_of_text|>"] for answers in ANSWERS]
    assert sorted(found) == sorted(spoken)


def test_without_all_the_ends_of_four_windows_are_printed(texts: list[str], show: Show) -> None:
    short = show("packing.context_length=64")
    assert len(windows_in(short)) == 4
    assert short.endswith("\n2 more windows; --all prints them\n")
    long = ("packing.context_length=3200", "training.batch_size=1")
    long = (*long, "training.gradient_accumulation_steps=1", "packing.mode=packed")
    (_, cut), (_, whole) = windows_in(show(*long))[0], windows_in(show("--all", *long))[0]
    first, last = cut.rstrip("\n").split(f"\n── {len(whole) - 1 - 2500:,} characters more ──\n")
    assert (first, last) == (whole[:2000], whole.rstrip("\n")[-500:])


def test_nothing_in_a_document_commands_the_terminal(
    tmp_path: Path, output: Path, show: Show
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "0.txt").write_bytes((HOSTILE * 9).encode())
    tree = tiny(folder, output, data={"splits": ALL})
    dataset_of(write_settings(tmp_path / "settings.yaml", tree))
    for terminal in (False, True):
        shown = show("training.batch_size=1", "packing.context_length=256", terminal=terminal)
        shown = re.sub(r"\x1b\[[012]m", "", shown) if terminal else shown
        assert not set(shown) & {"\x1b", "\r", "\u202e"}
        assert r"\x1b[31mred\r\u202e [bold]not[/bold]" + "\ttabbed :smile:" in shown


MISTAKES = {
    "nothere": "nothere: is no dataset; ",
    "tiny other": "'other'",
    "tiny model.vocab_size=7": "model.vocab_size: 7 is less than the vocabulary size",
    "tiny training.batch_size=9999": "too few tokens for one batch: ",
    "tiny packing.context_length=999": "packing.context_length 999 is not a multiple",
}


@pytest.mark.usefixtures("texts")
def test_a_mistake_is_one_line(alone: Environment, tmp_path: Path) -> None:
    settings = ("--config", tmp_path / "settings.yaml")
    for words, named in MISTAKES.items():
        done = infini_here("show", *words.split(), *settings, env=alone)
        (line,) = done.stderr.splitlines()
        assert (done.returncode, named in line) == (2, True), line


def test_each_source_has_a_row_in_each_split(show: Show, tmp_path: Path, output: Path) -> None:
    folders = {name: write_texts(tmp_path / name, 20 * n) for n, name in enumerate(("b", "a"), 1)}
    tree = tiny(folders["a"], output)
    sources = {name: {"paths": [f"{folder}/*.txt"]} for name, folder in folders.items()}
    tree["data"] = {**tree["data"], "source": None, "sources": sources, "splits": ALL}
    dataset_of(write_settings(tmp_path / "settings.yaml", tree))
    rows = re.findall(r"│ ( *\w+) +│ +(\d+) │", show())
    assert rows[:3] == [("train", "60"), ("  a", "40"), ("  b", "20")]
    assert [count for _, count in rows[3:]] == ["0"] * 6
