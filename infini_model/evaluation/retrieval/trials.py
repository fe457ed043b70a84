"""The haystacks of a trial, drawn by seed: the needles at all depths of the settings, once each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch.nn import functional

from infini_model.config.evaluation import PasskeyConfig
from infini_model.data.loading.stream import open_split
from infini_model.data.tokenizers.load import load_dataset_tokenizer
from infini_model.evaluation.retrieval.filler import (
    Filler,
    documents,
    random_sentences,
    repeated_sentences,
)
from infini_model.evaluation.retrieval.haystack import (
    Encode,
    Haystacks,
    build,
    draw_key,
    pass_key,
)
from infini_model.evaluation.subject import Subject
from infini_model.runtime.errors import UserError

OWNERS = (
    *("Anna", "Omar", "Lena", "Ivan", "Rosa", "Hugo", "Mina", "Karl"),
    *("Yuki", "Noah", "Vera", "Liam", "Zara", "Paul", "Ines", "Otto"),
)


class Trial(NamedTuple):
    """Haystacks of K needles, and the number in `settings.depths` of each needle's depth, [N, K].

    If K does not divide the number of depths, some depths occur twice.
    """

    haystacks: Haystacks
    depths: np.ndarray


def haystacks_per_trial(settings: PasskeyConfig, needles: int) -> int:
    """As many as it takes for every depth to occur."""
    return -(-len(settings.depths) // needles)


class Trials:
    """Draws the trials of a task; all haystacks of a trial have the same filler."""

    def __init__(self, subject: Subject, task: str, settings: PasskeyConfig, needles: int) -> None:
        """Load the tokenizer.

        Raises `UserError` if the filler is the test split's documents and there are none.
        """
        self._task, self._settings, self._seed = task, settings, subject.config.run.seed
        self._context = subject.config.packing.context_length
        self._owners = [None] if needles == 1 else list(OWNERS[:needles])
        tokenizer = load_dataset_tokenizer(subject.dataset_dir)
        self._encode: Encode = lambda text: tokenizer.encode_batch([text]).ids.tolist()
        self._bos = tokenizer.bos_token_id
        self._filler = _filler(subject, task, settings, self._encode)

    def draw(self, multiple: int, number: int) -> Trial:
        """Trial `number` of the length that is `multiple` times the trained context.

        Raises `UserError` if the needles and the question are longer than that.
        """
        settings, needles = self._settings, len(self._owners)
        length = multiple * self._context
        rng = np.random.default_rng((self._seed, multiple, number))
        filler = self._filler(rng, length)
        order = rng.permutation(len(settings.depths))
        depths = np.resize(order, (haystacks_per_trial(settings, needles), needles))
        keys = [
            [
                pass_key(self._encode, draw_key(rng, settings.digits), owner)
                for owner in self._owners
            ]
            for _ in depths
        ]
        begins = 0 if self._bos is None else 1
        try:
            haystacks = build(
                [filler] * len(depths),
                keys,
                (np.array(settings.depths)[depths] / 100).tolist(),
                length - begins,
            )
        except ValueError as error:
            raise UserError(
                f"evaluation.{self._task}.lengths: {multiple} x packing.context_length is "
                f"{length:,} tokens, but {error}"
            ) from error
        if self._bos is not None:
            bodies = functional.pad(haystacks.bodies, (1, 0), value=self._bos)
            haystacks = haystacks._replace(bodies=bodies)
        return Trial(haystacks, depths)


def _filler(subject: Subject, task: str, settings: PasskeyConfig, encode: Encode) -> Filler:
    if settings.filler == "repeated":
        return repeated_sentences(encode)
    if settings.filler == "random":
        return random_sentences(encode)
    test = open_split(subject.dataset_dir, "test")
    if not test.documents:
        raise UserError(
            f"evaluation.{task}.filler: documents, but the test split of {subject.dataset_dir} "
            "has none; random and repeated need none"
        )
    return documents(test)
