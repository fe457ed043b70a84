"""Small real sets of prompts and answers, in files and as datasets."""

import json
import random
from pathlib import Path

from corpora import build

from infini_model.config import DataConfig, FilesSource


def make_pairs(count: int, seed: int = 0, longest: int = 60) -> list[tuple[str, str]]:
    """Prompts, each different, and answers of all lengths, not all of them ASCII."""
    rng = random.Random(seed)
    words = ["naïve", "日本", "is", "the sum", "of", "🦊", "42", "\n"]
    return [
        (
            f"{number}: " + " ".join(rng.choices(words, k=rng.randrange(longest))),
            " ".join(rng.choices(words, k=rng.randrange(1, longest))) + ".",
        )
        for number in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_rows(pairs: list[tuple[str, str]]) -> list[dict[str, object]]:
    """Rows with the columns that the issue names."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def pairs_config(*paths: Path, source: dict[str, object] | None = None, **fields) -> DataConfig:
    """A configuration that reads the pairs in these files."""
    settings = {"paths": [str(path) for path in paths], "pairs": True} | (source or {})
    return DataConfig(source=FilesSource(**settings), **fields)


def pair_dataset(folder: Path, pairs: list[tuple[str, str]], **fields) -> Path:
    """A dataset folder of these pairs."""
    path = write_rows(folder / "pairs.jsonl", as_rows(pairs))
    return build(pairs_config(path, **fields), folder)[1]
