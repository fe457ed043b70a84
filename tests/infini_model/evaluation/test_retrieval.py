"""Retrieval: what is drawn, what a model answers, and the task `passkey`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import draw_memory_parameters, tiny_config
from torch import Tensor
from trained_run import Made

from infini_model.data.tokenizers.bpe import train_tokenizer
from infini_model.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from infini_model.evaluation.task import TaskResult
from infini_model.evaluation.tasks.passkey import (
    RANDOM,
    Encode,
    Haystacks,
    ask,
    build,
    draw_trial,
    pass_key,
    random_sentences,
)
from infini_model.model.generate import PREFILL_TOKENS, generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import IGNORED
from infini_model.model.precision import PRECISIONS

LENGTH = 512


def bpe() -> Tokenizer:
    numbers = [f" The pass key is {number * 7919 % 100000}." for number in range(400)]
    return train_tokenizer([[*RANDOM, *numbers]], 400)


@pytest.fixture(scope="module", params=[ByteTokenizer, bpe], ids=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    make: Callable[[], Tokenizer] = request.param
    return make()


def encoding(tokenizer: Tokenizer) -> Encode:
    return lambda text: tokenizer.encode_batch([text]).ids.tolist()


def haystack(tokenizer: Tokenizer, keys: dict[str | None, int], *depths: float) -> Haystacks:
    """A haystack with the key of each owner, at these depths."""
    encode = encoding(tokenizer)
    needles = [pass_key(encode, key, owner) for owner, key in keys.items()]
    filler = random_sentences([*map(encode, RANDOM)], np.random.default_rng(0), LENGTH)
    return build([filler], [needles], [[*depths]], LENGTH)


def text(tokenizer: Tokenizer, ids: torch.Tensor) -> str:
    return tokenizer.decode(ids[ids >= 0].numpy())


def test_a_space_of_its_own_is_no_part_of_the_answer() -> None:
    made = haystack(ByteTokenizer(), {None: 71432}, 0.5)
    assert made.answers.tolist() == [[list(b"71432")]]


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_depth_is_the_share_of_filler_before_the_needle(
    tokenizer: Tokenizer, depth: float
) -> None:
    encode = encoding(tokenizer)
    body = haystack(tokenizer, {None: 71432}, depth).bodies[0].tolist()
    needle = encode(" The pass key is")
    at = next(i for i in range(len(body)) if body[i : i + len(needle)] == needle)
    statement = len(encode(" The pass key is 71432. Remember it."))
    assert at == pytest.approx(depth * (len(body) - statement), abs=2)


def test_several_needles_are_asked_for_by_their_owners(tokenizer: Tokenizer) -> None:
    keys: dict[str | None, int] = {"Anna": 71432, "Maximilian": 20202, "Bo": 55555}
    made = haystack(tokenizer, keys, 0.9, 0.1, 0.9)
    assert sum(tensor.size(-1) for tensor in made) == LENGTH
    body = text(tokenizer, made.bodies[0])
    assert body.index("Maximilian") < body.index("Anna") < body.index("of Bo")
    for (owner, key), *asked in zip(keys.items(), made.questions[0], made.answers[0], strict=True):
        assert f" The pass key of {owner} is {key}. Remember it." in body
        said = "".join(text(tokenizer, each) for each in asked)
        assert said.endswith(f"What is the pass key of {owner}? The pass key of {owner} is {key}")


ROWS, NEEDLES, ANSWER = 3, 2, 3


def small_model(**overrides: object) -> InfiniLlama:
    torch.manual_seed(0)
    model = InfiniLlama(tiny_config(initializer_range=0.4, **overrides)).eval()
    draw_memory_parameters(model)
    return model


def answered(model: InfiniLlama) -> Haystacks:
    """Haystacks whose answers are what the model generates, but for one wrong token in each row."""
    generator = torch.Generator().manual_seed(1)
    bodies = torch.randint(11, (ROWS, 61), generator=generator)
    questions = torch.randint(11, (ROWS, NEEDLES, 5), generator=generator)
    prompts = torch.cat((bodies.repeat_interleave(NEEDLES, 0), questions.flatten(0, 1)), 1)
    new = generate(model, prompts, max_new_tokens=ANSWER, temperature=0.0)
    answers = torch.tensor(new).view(ROWS, NEEDLES, ANSWER)
    answers[:, 0, 1] = (answers[:, 0, 1] + 1) % 11
    return Haystacks(bodies, questions, answers)


def whole(model: InfiniLlama, haystacks: Haystacks) -> Tensor:
    """Whether each answer token is the likeliest, by one pass over each whole sequence."""
    found = []
    for body, questions, answers in zip(*haystacks, strict=True):
        for question, each in zip(questions, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.cat((body, question, each))[None]).logits[0]
            found.append(logits[-ANSWER - 1 : -1].argmax(-1) == each)
    return torch.stack(found).view(haystacks.answers.shape)


@pytest.mark.parametrize(
    "changes",
    [{"memory": "linear"}, {"memory": "residual", "memory_query_shift": True}, {"memory": "none"}],
    ids=["linear", "residual", "none"],
)
def test_the_answers_are_those_of_whole_sequences(changes: dict[str, Any]) -> None:
    model = small_model(**changes)
    haystacks = answered(model)
    right = whole(model, haystacks)
    assert 0 < right.sum() < right.numel()
    for rows in (1, 2, 3):
        found, tokens = ask(model, haystacks, rows)
        assert torch.equal(found, right.sum(-1))
        assert (tokens == ANSWER).all()
    # What follows a short answer does not count, in any precision.
    haystacks.answers[:, :, -1] = IGNORED
    assert (ask(model, haystacks, ROWS)[0][:, 1] == ANSWER - 1).all()
    model.precision = PRECISIONS["bf16"]
    assert (ask(model, haystacks, ROWS)[1] == ANSWER - 1).all()


def test_a_haystack_is_read_once_for_all_its_needles_in_chunks() -> None:
    model, read = small_model(), list[int]()
    short = answered(model)
    model.model.embed_tokens.register_forward_hook(
        lambda module, arguments, output: read.append(arguments[0].numel())
    )
    bodies = torch.zeros(ROWS, 10_001, dtype=torch.int64)
    ask(model, short._replace(bodies=bodies), ROWS)
    asked = NEEDLES * (short.questions.size(-1) + ANSWER - 1)
    # The last chunk of a body is padded to a segment.
    assert sum(read) <= ROWS * (10_004 + asked)
    assert max(read) <= PREFILL_TOKENS < sum(read)


METRICS = ("exact_match", "token_accuracy")
SMALL = {
    "packing.context_length": 128,
    "model.segment_length": 32,
    "evaluation.passkey.depths": [0, 50, 100],
    "evaluation.passkey.trials": 2,
    "evaluation.passkey.lengths": [4, 2],
}
SEVERAL = {"evaluation.passkey.needles": 2, "evaluation.passkey.depths": [0, 25, 50, 75, 100]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("retrieval"), **SMALL)


def answers_of(result: TaskResult) -> dict[str, int]:
    """The number of answers by tokens of the sequence, as the table has them."""
    rows = re.findall(r"^\| (\d+) \(\d+ x\) \|.* (\d+) \|$", result.section, re.MULTILINE)
    return {tokens: int(answers) for tokens, answers in rows}


def test_the_report_has_a_grid_with_intervals_and_a_picture(made: Made) -> None:
    result, seen = made.evaluated(**{"evaluation.tasks": ["passkey"]})
    # Two lengths of two trials of three haystacks.
    assert seen[-1] == (12, 12)
    assert answers_of(result.tasks["passkey"]) == {"256": 6, "512": 6}
    metrics = {f"evaluation/passkey_{name}/{n}" for name in METRICS for n in (256, 512)}
    assert set(result.metrics) == set(result.intervals) == metrics
    for name, (low, high) in result.intervals.items():
        assert low <= result.metrics[name] <= high
    assert "![Pass keys found, by length and depth](plots/passkey.png)" in result.report.read_text()


def test_several_needles_are_at_all_depths(made: Made) -> None:
    result = made.result("passkey", **SEVERAL)
    assert result.section.startswith("2 numbers are hidden in random sentences")
    # Two trials of three haystacks, for five depths.
    assert answers_of(result) == {"256": 12, "512": 12}
    config = made.config(**SEVERAL)
    places = [draw_trial(config, ByteTokenizer(), 4, n)[1].flatten() for n in range(2)]
    assert np.bincount(np.concatenate(places)).min() == 2


def test_more_needles_than_depths_stand_side_by_side(made: Made) -> None:
    result = made.result("passkey", **SEVERAL | {"evaluation.passkey.depths": [50]})
    assert answers_of(result) == {"256": 4, "512": 4}


@pytest.mark.parametrize("changes", [{}, SEVERAL], ids=["one", "several"])
def test_one_more_length_costs_only_itself(made: Made, changes: dict[str, Any]) -> None:
    folder = made.run_dir / "evaluation"
    shutil.rmtree(folder, ignore_errors=True)  # what other tests have finished
    made.result("passkey", **changes)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("passkey-*/*.json")}
    made.result("passkey", **changes, **{"evaluation.passkey.lengths": [2, 3, 4, 9]})
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len([*folder.rglob("passkey-*/*.json")]) > len(kept)
    assert len({path.parent for path in folder.rglob("passkey-*/*.json")}) == 1


def test_the_seed_decides_what_is_asked(made: Made) -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        config = made.config(**{"run.seed": seed})
        return [x for n in range(2) for x in draw_trial(config, ByteTokenizer(), 2, n)[0]]

    once, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    assert not torch.equal(once[0], other[0])
    assert not torch.equal(once[0], once[3])
