"""Small real corpora, in files and as datasets: texts, and prompts with their answers."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.config import DataConfig, FilesSource
from infini_model.data.build import build_dataset
from infini_model.data.sources.files import FileRange, SourceFile, local_version
from infini_model.data.sources.formats import read_range, whole_file
from infini_model.data.sources.listing import list_sources
from infini_model.data.sources.rows import Reading
from infini_model.runtime import storage

WORDS = ["the", "quick", "brown", "fox's", "naïve", "Größe", "42", "日本", "emoji", "🦊"]
WORDS += ["said:", "“hello”,", "don't!\n\t", ""]


def make_texts(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    """Documents of all lengths, each different, not all of them ASCII."""
    rng = random.Random(seed)
    drawn = (rng.choices(WORDS, k=rng.randrange(1, longest)) for _ in range(count))
    return [f"{number} {' '.join(words)}" for number, words in enumerate(drawn)]


def write_files(folder: Path, texts: list[str]) -> Path:
    """One text file a document."""
    storage.make_folder(folder)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_bytes(text.encode())
    return folder


def write_parquet(path: Path, texts: list[str | None], **options: object) -> Path:
    """One Parquet file, one document a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, "number": range(len(texts))}), path, **options)
    return path


def local_file(path: Path) -> SourceFile:
    """A file on this machine, as listing a source describes it."""
    stat = path.stat()
    return SourceFile(
        address=str(path),
        bytes=stat.st_size,
        fingerprint=f"sha256:{storage.sha256(path)}",
        version=local_version(stat),
    )


def cut_file(path: Path, *cuts: int, given: str | None = None) -> list[FileRange]:
    """A file in ranges that end at the cuts, the last at its end."""
    whole = whole_file(local_file(path), given)
    return [
        whole.model_copy(update={"start": start, "stop": stop})
        for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
    ]


def files_config(*patterns: object, **fields: object) -> DataConfig:
    """A configuration that reads these globs."""
    return DataConfig(source=FilesSource(paths=[str(p) for p in patterns]), **fields)


def build(config: DataConfig, output_dir: Path):
    """Download and build; returns the manifest and the folder."""
    manifest = build_dataset(list_sources(config, output_dir), config, output_dir / "datasets")
    return manifest, output_dir / "datasets" / manifest.folder_name


def shard_bytes(folder: Path) -> dict[str, bytes]:
    """All shards in a folder, by their paths in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*.arrow"))}


def rows_of(*ranges: FileRange, batch_bytes: int = 1 << 20, **reading: object) -> list:
    """The texts of all rows in these ranges."""
    parts = (read_range(part, Reading(**reading), batch_bytes) for part in ranges)
    return [text for arrays in parts for array in arrays for text in array.to_pylist()]


def make_pairs(count: int, seed: int = 0, longest: int = 60) -> list[tuple[str, str]]:
    """Prompts, each different, and answers of all lengths, not all of them ASCII."""
    rng = random.Random(seed)

    def words(least: int) -> str:
        drawn = ["naïve", "日本", "is", "the sum", "of", "🦊", "42", "\n"]
        return " ".join(rng.choices(drawn, k=rng.randrange(least, longest)))

    return [(f"{number}: {words(0)}", f"{words(1)}.") for number in range(count)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_rows(pairs: list[tuple[str, str]]) -> list[dict[str, object]]:
    """Pairs in the columns of prompts and answers."""
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def pair_dataset(folder: Path, pairs: list[tuple[str, str]], **fields) -> Path:
    """A dataset folder of these pairs."""
    path = write_rows(folder / "pairs.jsonl", as_rows(pairs))
    source = FilesSource(paths=[str(path)], pairs=True)
    return build(DataConfig(source=source, **fields), folder)[1]


# What the patterns of tokenizers distinguish: contractions in any case, ſ, digits of several
# scripts, blanks, line ends, marks.
PIECES = ["'", "'s", "'S", "ſ", "l", "L", "r", "v", "e", "E", "t", "d", "a", "É", "ß", "ǅ", "ª"]
PIECES += ["1", "22", "٣", "Ⅷ", "½", " ", "  ", "\n", "\r", "\t", "\v", "\u00a0", "\u0085"]
PIECES += ["\u2028", "\u3000", "\u200b", "\ufeff", ".", "!?", "…", "_", "日", "🦊", "\u0301"]
PIECES += ["\0", "\U0010ffff"]
# Of what long runs are made whose pieces depend on where they start or how they end.
RUNNING = ["1", "٣", " ", "\u3000", "\n", "\r\n", "\n ", "'s", "a", "!"]


def adversarial_texts(count: int, seed: int, longest: int = 90) -> list[str]:
    """Documents of a few of these pieces, of any characters, or of runs of up to `longest`.

    The interpreter takes milliseconds for each character of a run.
    """
    chance = random.Random(seed)

    def pieces(most: int) -> str:
        return "".join(chance.choices(PIECES, k=chance.randrange(most)))

    def characters() -> str:
        points = [chance.choice((0x80, 0x800, 0x3000, 0x110000)) for _ in range(12)]
        drawn = (chance.randrange(point) for point in points[: chance.randrange(12)])
        return "".join(chr(point) for point in drawn if not 0xD800 <= point < 0xE000)

    def run() -> str:
        return pieces(3) + chance.choice(RUNNING) * chance.randrange(1, longest)

    makers = [lambda: pieces(13)] * 2 + [lambda: pieces(40), characters, lambda: run() + run()]
    return [makers[number % len(makers)]() for number in range(count)]
