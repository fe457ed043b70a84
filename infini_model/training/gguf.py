"""GGUF, the format of llama.cpp: a model without a memory, converted by the user's llama.cpp.

Its script knows tokenizers by the ids of a text, and so none that was trained here; and without a
`tokenizer.model` it gives all pieces of a SentencePiece vocabulary one score, with which llama.cpp
cuts most texts into other tokens. As a program, this module runs the script with both mended.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

from infini_model.data.tokenizers.bpe import BPETokenizer, train_tokenizer
from infini_model.data.tokenizers.stated import TOKENIZER_FILE
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.hf.adapter import is_adapter_folder
from infini_model.model.hf.config import model_type, read_config
from infini_model.runtime.errors import ConfigError, UserError
from infini_model.runtime.processes import run

OPTION = "--format gguf"
SCRIPT = "convert_hf_to_gguf"
# How llama.cpp names the pattern of `train_tokenizer`, if a word that is a token may be cut.
LLAMA3_PATTERN_NAME = "smaug-bpe"
# The score of a piece that no merge makes; llama.cpp joins those of the highest first.
NEVER = -1e6


def check_gguf(
    model: Path, tokenizer: Tokenizer, llama_cpp: Path | None, *, merge: bool = False
) -> None:
    """Raise `ConfigError` if llama.cpp is not there, or has no such model or tokenizer.

    Args:
        model: Folder of the model.
        llama_cpp: Folder with llama.cpp's sources.
        merge: Whether adapters are to be merged.
    """
    config = read_config(model, {})
    if config.bidirectional or model_type(config) == "infini_llama":
        raise ConfigError(
            f"{OPTION}: llama.cpp has no such model; it takes causal ones with model.memory=none "
            "and model.window_segments=0"
        )
    if is_adapter_folder(model) and not merge:
        raise ConfigError(f"{OPTION}: the run has adapters; add --merge")
    if not isinstance(tokenizer, BPETokenizer):
        raise ConfigError(f"{OPTION}: llama.cpp has no tokenizer of bytes; train one (spec: train)")
    if llama_cpp is None or not (llama_cpp / f"{SCRIPT}.py").is_file():
        raise ConfigError(
            f"{OPTION}: {llama_cpp or '--llama-cpp'}: has no {SCRIPT}.py; give --llama-cpp (or "
            "LLAMA_CPP) the folder of llama.cpp's sources"
        )


def write_gguf(folder: Path, file: Path, llama_cpp: Path) -> None:
    """Convert the exported model in `folder`, in 16 bits, to the temporary `file`.

    Raises `UserError` with the converter's last line if it fails.
    """
    said = deque[str](maxlen=1)
    status = run(
        [sys.executable, "-m", __name__, str(llama_cpp), str(folder), "--outfile", str(file)],
        on_line=lambda line: said.append(line) if line.strip() else None,
    )
    if status != 0:
        raise UserError(f"{llama_cpp / SCRIPT}.py: {(*said, f'exit status {status}')[0]}")


def _is_like_trained(folder: Path) -> bool:
    """Return True if the tokenizer in `folder` cuts texts into words as those trained here do."""

    def deciding(text: str) -> list[object]:
        tree = json.loads(text)
        return [tree["normalizer"], tree["pre_tokenizer"], tree["model"]["ignore_merges"]]

    given = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    return deciding(given) == deciding(train_tokenizer([], 257).text)


def main() -> None:
    """Run llama.cpp's script with the arguments that follow its folder, first that of a model."""
    llama_cpp, *arguments = sys.argv[1:]
    sys.path.insert(0, llama_cpp)
    converter: Any = importlib.import_module(SCRIPT)
    # Since 2026 its classes are in a package.
    model = vars(sys.modules.get("conversion.base", converter))["TextModel"]
    recognized = model.get_vocab_base_pre

    def pattern_of(self: Any, tokenizer: Any) -> str:
        try:
            return str(recognized(self, tokenizer))
        except NotImplementedError:
            if not _is_like_trained(Path(arguments[0])):
                raise
            return LLAMA3_PATTERN_NAME

    def no_tokenizer_model(_: Any) -> None:
        # Its own check imports sentencepiece first.
        raise FileNotFoundError("tokenizer.model")

    def score(self: Any, token: int) -> float:
        """Return a score as SentencePiece has them: a piece that is merged earlier has more."""
        if not hasattr(self, "ranks"):
            merges = json.loads(self.fname_tokenizer.read_bytes())["model"]["merges"]
            pairs = (each.split(" ") if isinstance(each, str) else each for each in merges)
            ranked = reversed([*enumerate(map("".join, pairs))])
            self.ranks = {piece: -float(rank) for rank, piece in ranked}
        return float(self.ranks.get(self.tokenizer.convert_ids_to_tokens(token), NEVER))

    model.get_vocab_base_pre = pattern_of
    model._set_vocab_sentencepiece = no_tokenizer_model
    converter.gguf.LlamaHfVocab.get_token_score = score
    sys.argv[1:] = arguments
    converter.main()


if __name__ == "__main__":
    main()
