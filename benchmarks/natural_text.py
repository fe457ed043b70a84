"""Natural text in long documents, from Debian's documentation packages: some 40 MB of English.

The manual of the Linux kernel, that of Python, and the Anarchist FAQ; a file of theirs is a
document. apt fetches the packages and dpkg-deb unpacks them, without root. Where there is no apt,
or it has other versions, fetch these from snapshot.debian.org into the folder that is named, under
the names that they have there.
"""

from __future__ import annotations

import gzip
import subprocess
import tempfile
from pathlib import Path

from infini_model.runtime.storage import atomic_folder

# Of each package its version and the files that are read.
PACKAGES = {
    "anarchism": ("15.3-3", "anarchism/markdown/*.md.gz"),
    "linux-doc-6.1": ("6.1.176-1", "linux-doc-6.1/html/_sources/**/*.rst.txt"),
    "python3.11-doc": ("3.11.2-6+deb12u8", "python3.11/html/_sources/**/*.rst.txt"),
}
# Shorter files and translations are left out.
LEAST_BYTES, OTHER_LANGUAGES = 4_000, "translations"


def natural_text(folder: Path) -> Path:
    """Write the documents to files in `folder`, unless they are there; returns their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = folder / "documents"
    if not documents.exists():
        with atomic_folder(documents) as written:
            for name, (version, pattern) in PACKAGES.items():
                for number, data in enumerate(_files(name, version, pattern, folder)):
                    (written / f"{name}-{number:05d}.txt").write_bytes(data)
    return documents.resolve() / "*.txt"


def _files(name: str, version: str, pattern: str, folder: Path) -> list[bytes]:
    """The long files of a package, which is fetched if it is not in the folder."""
    package = folder / f"{name}_{version}_all.deb"
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            if not package.exists():
                subprocess.run(["apt-get", "download", f"{name}={version}"], cwd=folder, check=True)
            subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            where = f"fetch {package.name} from snapshot.debian.org into {folder}"
            raise SystemExit(f"{error}; where apt does not have {version}, {where}") from error
        paths = sorted(Path(unpacked).glob(f"usr/share/doc/{pattern}"))
        paths = [path for path in paths if OTHER_LANGUAGES not in path.parts]
        contents = [path.read_bytes() for path in paths]
        contents = [
            gzip.decompress(data) if path.suffix == ".gz" else data
            for path, data in zip(paths, contents, strict=True)
        ]
    return [data for data in contents if len(data) >= LEAST_BYTES]
