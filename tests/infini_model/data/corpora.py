"""Small real corpora, in files and as datasets."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.config import DataConfig, FilesSource
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download

WORDS = ["the", "quick", "brown", "fox's", "naïve", "Größe", "42", "日本", "emoji", "🦊"]
WORDS += ["said:", "“hello”,", "don't!\n\t", ""]


def make_texts(count: int, seed: int = 0, longest: int = 400) -> list[str]:
    """Documents of all lengths, each different, not all of them ASCII."""
    rng = random.Random(seed)
    return [
        f"{number} " + " ".join(rng.choices(WORDS, k=rng.randrange(1, longest)))
        for number in range(count)
    ]


def write_files(folder: Path, texts: list[str]) -> Path:
    """One text file a document."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_bytes(text.encode())
    return folder


def write_parquet(path: Path, texts: list[str | None], **options: object) -> Path:
    """One Parquet file, one document a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts, "number": range(len(texts))}), path, **options)
    return path


def files_config(*patterns: object, **fields: object) -> DataConfig:
    """A configuration that reads these globs."""
    return DataConfig(source=FilesSource(paths=[str(p) for p in patterns]), **fields)


def build(config: DataConfig, output_dir: Path):
    """Download and build; returns the manifest and the folder."""
    manifest = build_dataset(download(config, output_dir), config, output_dir)
    return manifest, output_dir / "datasets" / manifest.folder_name
