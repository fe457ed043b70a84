"""The files beside a tokenizer.json: which tokens end a text, and the form of a chat.

Nothing is guessed from the names of ordinary pieces of a vocabulary. What came in goes out: these
files lie beside every copy of the tokenizer, in a dataset and in an export.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from infini_model.runtime.errors import DataError
from infini_model.runtime.storage import dump_json

TOKENIZER_FILE, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, CONFIG, CHAT_TEMPLATE = "generation_config.json", "config.json", "chat_template.jinja"
# Everything that a tokenizer is read from.
TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG, GENERATION, CONFIG, CHAT_TEMPLATE)
# Special tokens that end a text, where no file says which one does.
END_OF_TEXT = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")


@dataclass(frozen=True)
class StatedTokens:
    """The statements of the files beside a tokenizer.json; empty where there are none.

    Attributes:
        config: tokenizer_config.json, without the chat template and without code to import.
        generation: generation_config.json.
        model: config.json, of the model that the tokenizer belongs to.
        chat_template: The program that makes text of messages.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files of a folder. Raises `DataError` that names a damaged one."""
        config, generation, model = (
            _read_tree(folder / name) for name in (TOKENIZER_CONFIG, GENERATION, CONFIG)
        )
        template = config.pop("chat_template", None)
        if isinstance(template, list):  # several, by name
            template = {each.get("name"): each.get("template") for each in template}
        if isinstance(template, dict):
            template = template.get("default")
        config.pop("auto_map", None)
        return cls(config, generation, model, read_text(folder / CHAT_TEMPLATE) or template)

    def special_tokens(self) -> dict[str, str]:
        """The texts of the named tokens, such as `bos_token`."""
        texts = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in self.config.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def end_ids(self, vocabulary: Mapping[str, int], added: Container[int]) -> Iterator[int]:
        """The tokens that end a text or a turn, the one that the tokenizer names first.

        Of ids only those of `added` tokens are taken: many a config.json has the ids that
        `transformers` fills in by default, of ordinary pieces. Raises `DataError` if the
        tokenizer's own is not in the `vocabulary`.
        """
        name = self.special_tokens().get("eos_token")
        if name is not None:
            if name not in vocabulary:
                raise DataError(f"{TOKENIZER_CONFIG}: eos_token {name!r} is not in the vocabulary")
            yield vocabulary[name]
        for tree in (self.generation, self.model):
            yield from (each for each in _ids(tree) if each in added)

    def closes_turns(self, token: str) -> bool:
        """Return True if the form of a chat has the token in it, maybe as `eos_token`."""
        template = self.chat_template or ""
        return token in template or "eos_token" in template

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that `write` writes."""
        return (TOKENIZER_CONFIG, GENERATION, *([CHAT_TEMPLATE] if self.chat_template else []))

    def write(
        self, folder: Path, begin: int | None, ends: Sequence[int], defaults: Mapping[str, object]
    ) -> None:
        """Write the files to a temporary folder, the model's own config.json not among them.

        `begin` is the token that begins a text, if one does, and `ends` are those that end one;
        `defaults` is what tokenizer_config.json has beside what is stated.
        """
        dump_json(folder / TOKENIZER_CONFIG, {**defaults, **self.config})
        generation = dict(self.generation)
        if not generation and begin is not None:
            generation["bos_token_id"] = begin
        if {*ends} != {*_ids(generation)}:
            generation["eos_token_id"] = list(ends) if len(ends) > 1 else ends[0]
        dump_json(folder / GENERATION, generation)
        if self.chat_template:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")


NOTHING_STATED = StatedTokens()


def _ids(tree: Mapping[str, Any]) -> list[int]:
    """The tokens that a file says end a text: one, several, or none."""
    stated = tree.get("eos_token_id")
    return stated if isinstance(stated, list) else [] if stated is None else [stated]


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(read_text(path) or "{}")
    except ValueError as error:
        raise DataError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path}: holds {type(tree).__name__}, needs a mapping")
    return tree


def read_text(path: Path) -> str | None:
    """The text of a file, None if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8") from error
