"""Small real corpora, in files and as datasets."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infini_model.config import DataConfig, FilesSource
from infini_model.data.shards.dataset import build_dataset
from infini_model.data.sources.download import download
from infini_model.data.sources.files import FileRange, SourceFile, local_version
from infini_model.runtime import storage

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


def local_file(path: Path) -> SourceFile:
    """A file on this machine, as listing a source describes it."""
    stat = path.stat()
    return SourceFile(
        address=str(path),
        bytes=stat.st_size,
        fingerprint=f"sha256:{storage.sha256(path)}",
        version=local_version(stat),
    )


def cut_file(path: Path, *cuts: int) -> list[FileRange]:
    """A file in ranges that end at the cuts, the last at its end."""
    file = local_file(path)
    return [
        FileRange(file=file, start=start, stop=stop)
        for start, stop in zip([0, *cuts], [*cuts, None], strict=True)
    ]


def files_config(*patterns: object, **fields: object) -> DataConfig:
    """A configuration that reads these globs."""
    return DataConfig(source=FilesSource(paths=[str(p) for p in patterns]), **fields)


def build(config: DataConfig, output_dir: Path):
    """Download and build; returns the manifest and the folder."""
    manifest = build_dataset(download(config, output_dir), config, output_dir)
    return manifest, output_dir / "datasets" / manifest.folder_name


def listed(paths: list[Path]) -> list[FileRange]:
    """These local files, whole, as a listing has them."""
    return [FileRange(file=local_file(path)) for path in paths]
