"""Answers for many at once are those of each alone, from whatever is known already."""

import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import BYTES, Asked, model_that_writes_letters, running
from tiny_models import tiny_config

from infini_model.config import SampleConfig
from infini_model.model.generate import generate
from infini_model.model.llama import InfiniLlama
from infini_model.model.state import State
from infini_model.runtime.errors import UserError
from infini_model.serving.known_texts import KnownTexts, Text, borders
from infini_model.serving.requests import Answer, EngineError, Request, ScoredToken

MODELS = {
    "window": {},
    "sinks": {"window_sinks": 2},
    "no window": {"window_segments": 0},
    "delta": {"memory": "delta"},
    "no memory": {"memory": "none"},
}


def words(chance: random.Random, most: int) -> bytes:
    return bytes(chance.choices(b"abcdefgh ", k=chance.randint(1, most)))


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_answers_at_once_are_those_of_each_alone(changes: dict[str, object]) -> None:
    model, chance = model_that_writes_letters(**changes), random.Random(1)
    with running(model) as engine:
        asked = list[tuple[bytes, Asked]]()
        for _ in range(40):  # some begin as others do, and some come while others are answered
            prompt = words(chance, 60)
            if asked and chance.random() < 0.5:
                prompt = chance.choice(asked)[0][: chance.randint(1, 60)] + prompt
            asked.append((prompt, Asked(engine, prompt, max_tokens=chance.randint(1, 30))))
            if chance.random() < 0.2:
                asked[-1][1].answer()
        waiting = [(prompt, each) for prompt, each in asked if each.events.qsize()] or asked[-1:]
        assert len(waiting) > 1
        for prompt, each in waiting:
            most = each.request.max_tokens
            (ids,) = generate(model, [list(prompt)], max_new_tokens=most, temperature=0)
            assert each.answer().text.encode() == bytes(ids)


def test_a_draw_is_that_of_generate() -> None:
    model = model_that_writes_letters()
    settings = SampleConfig(max_new_tokens=20, temperature=0.9, top_k=5, top_p=0.9)
    with running(model) as engine:
        drawn = [
            Asked(engine, b"the stone", sampling=settings, max_tokens=20, seed=(seed, 0))
            for seed in range(8)
        ]
        texts = [each.answer().text for each in drawn]
    options = settings.model_dump(include={"max_new_tokens", "temperature", "top_k", "top_p"})
    alone = [generate(model, [list(b"the stone")], seed=seed, **options) for seed in range(8)]
    assert [text.encode() for text in texts] == [bytes(ids) for (ids,) in alone]
    assert len(set(texts)) > 1


def test_a_known_text_is_not_read_again() -> None:
    model, read = model_that_writes_letters(), list[int]()
    extend = model.extend

    def counted(ids, *arguments, **options):
        read.append(ids.size(1))
        return extend(ids, *arguments, **options)

    model.extend = counted
    document = words(random.Random(2), 1) * 40_000
    with running(model) as engine:
        for question in (b"first?", b"another?", b"a third one"):
            asked = Asked(engine, document + question)
            accepted = asked.accepted()
            assert accepted.prompt_tokens == len(document + question)
            answer, new = asked.answer(), accepted.prompt_tokens - accepted.known_tokens
            assert sum(read) == new
            assert question == b"first?" or new <= 2 * len(question) + 2 * 4
            (ids,) = generate(model, [list(document + question)], max_new_tokens=9, temperature=0)
            assert answer.text.encode() == bytes(ids)
            read.clear()


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.integers(1, 4096))
def test_a_text_that_ends_otherwise_finds_a_state_near_where_it_parts(end, new, length):
    places = borders(end, length)
    assert len(places) <= end.bit_length() + 1
    assert all(place % length == 0 and 0 < place < end for place in places)
    parted = max(end - new, 0)
    assert parted - max((p for p in places if p <= parted), default=0) <= new + 2 * length


def test_a_session_begins_where_an_answer_ended() -> None:
    model, chance = model_that_writes_letters(), random.Random(3)
    with running(model) as engine:
        text, session = b"", None
        for turn in range(6):
            said = words(chance, 30)
            text += said
            stop = ("ab",) if turn % 2 else ()
            asked = Asked(engine, said, session=session, name=f"turn {turn}", stop=stop)
            assert asked.accepted().prompt_tokens == len(text)
            piece = asked.answer()
            (ids,) = generate(model, [list(text)], max_new_tokens=9, temperature=0)
            assert piece.text == bytes(ids).decode().partition("ab" if stop else "?")[0]
            text += bytes(ids[: piece.generated])
            session = f"turn {turn}"
        # An earlier answer can be followed again.
        again = Asked(engine, b"x", session="turn 0").answer()
        assert again == Asked(engine, b"x", session="turn 0").answer()


def test_a_prompt_can_be_read_alone() -> None:
    with running(model_that_writes_letters()) as engine:
        read = Asked(engine, b"the stone under the river", max_tokens=0, name="read").answer()
        assert (read.text, read.generated, read.finish_reason) == ("", 0, "length")
        asked = Asked(engine, b" is", session="read")
        assert asked.accepted().known_tokens == 25
        assert asked.answer() == Asked(engine, b"the stone under the river is").answer()


def state_of(model: InfiniLlama, ids: bytes) -> tuple[Text, State]:
    text = Text().followed_by(list(ids))
    return text, model.extend(torch.tensor([list(ids)]), None)[1]


def test_the_states_that_were_used_last_stay_within_the_bytes() -> None:
    model = model_that_writes_letters()
    size = state_of(model, b"some")[1].nbytes
    known = KnownTexts(3 * size)
    for prompt in (b"some", b"many", b"lots"):
        known.keep(*state_of(model, prompt), prompt.decode())
    assert known.longest(list(b"some more")).text.length == 4
    known.keep(*state_of(model, b"more"), "more")
    assert known.named("some").text.length == 4
    assert known.longest(list(b"many more")) is None
    with pytest.raises(UserError, match=r"^session: 'many' is not the id of a response of this"):
        known.named("many")
    assert known.longest(list(b"some")) is None, "a text that is wholly known has no next logits"


LETTERS = st.text("ab", min_size=1, max_size=3)


@given(st.text("abc", max_size=40), st.lists(LETTERS, max_size=3))
def test_no_stop_string_is_shown_and_all_before_it_is(text, stops):
    shown = list[str]()
    request = Request([1], SampleConfig(), len(text) or 1, (255,), (0, 0), lambda _: None)
    request.stop, request.emit = tuple(stops), lambda piece: shown.append(piece.text)
    answer = Answer(request, BYTES)
    for token in text.encode() or [255]:
        if answer.add(token, None):
            break
    # The shortest beginning of the text that has a stop string, without that.
    ends = [len(text[:end]) for end in range(len(text) + 1) if any(s in text[:end] for s in stops)]
    whole = text[: ends[0]] if ends else text
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(shown) == (whole[: min(cuts)] if cuts else whole)


def test_scores_are_log_probabilities_of_the_model() -> None:
    model = model_that_writes_letters()
    with running(model) as engine:
        piece = Asked(engine, b"the stone", likeliest=3).answer()
    ids = torch.tensor([list(b"the stone" + piece.text.encode())])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    for place, scored in enumerate(piece.tokens, start=len(b"the stone") - 1):
        best = logprobs[place].topk(3)
        assert scored.token == scored.likeliest[0][0] == int(ids[0, place + 1])
        assert [token for token, _ in scored.likeliest] == best.indices.tolist()
        found = [scored.logprob, *(each for _, each in scored.likeliest)]
        assert found == pytest.approx([float(best.values[0]), *best.values.tolist()], abs=1e-5)
    assert ScoredToken(*piece.tokens[0]) == piece.tokens[0]


def test_a_cancelled_request_makes_room_and_a_failure_reaches_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_that_writes_letters()
    with running(model) as engine:
        endless = [Asked(engine, b"a", max_tokens=10**9) for _ in range(64)]
        for asked in endless:
            asked.accepted()
        waits = Asked(engine, b"b")
        assert waits.events.empty()
        endless[0].request.is_cancelled = True
        assert waits.answer().generated == 9
        failing = threading.Event()
        advance = model.advance

        def out_of_memory(*arguments, **options):
            if failing.is_set():
                raise MemoryError("there is none left")
            return advance(*arguments, **options)

        monkeypatch.setattr(model, "advance", out_of_memory)
        failing.set()
        for asked in endless[1:]:
            with pytest.raises(EngineError, match="there is none left"):
                asked.pieces()
        failing.clear()
        assert Asked(engine, b"b").answer().generated == 9


@pytest.mark.parametrize(
    ("prompt", "message"), [(b"", "prompt: is empty"), (b"\xf0", "prompt: token 240 is outside")]
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: bytes, message: str) -> None:
    model = InfiniLlama(tiny_config(vocab_size=200))
    with running(model) as engine, pytest.raises(UserError, match=f"^{message}"):
        Asked(engine, prompt)
