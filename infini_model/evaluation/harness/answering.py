"""Answers to the requests of the harness: log-likelihoods of texts, and continuations.

A model with a memory has no longest text: it reads all of a request, segment by segment, in memory
that does not grow. A model without one reads what any Llama of context `segment_length` reads in
the harness: the last tokens before each scored one, and a long text in disjoint windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.generate import chunk_width, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import LOGITS_AT_ONCE
from infini_model.model.precision import PRECISIONS, Precision
from infini_model.runtime.errors import UserError

# More tokens than a stop string has bytes, since the text of a token may depend on those before it.
STOP_CONTEXT = 8


class Likelihood(NamedTuple):
    """The log-likelihood of a text in nats, and whether each token is the most likely one."""

    log_probability: float
    is_greedy: bool


class Settings(NamedTuple):
    """How a text is continued: up to a stop string, the end of text, or `max_gen_toks` tokens."""

    until: tuple[str, ...]
    max_gen_toks: int
    temperature: float
    top_k: int | None
    top_p: float | None


class Question(NamedTuple):
    """A text to continue."""

    prompt: list[int]
    settings: Settings


class Window(NamedTuple):
    """What the model reads at once of a request: the last `scored` tokens of `ids` are scored."""

    request: int
    ids: list[int]
    scored: int


class Answerer:
    """Answers requests in batches, sorted by length; no answer depends on its batch."""

    def __init__(
        self,
        model: InfiniLlama,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        precision: Precision = PRECISIONS["fp32"],
        seed: int = 0,
        on_share: Callable[[float], None] = lambda share: None,  # noqa: ARG005
    ) -> None:
        """Take a causal model.

        Args:
            model: Used on its own device.
            tokenizer: That of the model.
            batch_size: Requests per batch.
            precision: That of log-likelihoods; texts are generated in the model's.
            seed: Of what is sampled.
            on_share: Called after each batch with the share of the requests that are answered.
        """
        self._model, self._tokenizer = model, tokenizer
        self._batch_size, self._precision, self._seed = batch_size, precision, seed
        self._on_share = on_share
        bos = tokenizer.bos_token_id
        self.prefix = tokenizer.eos_token_id if bos is None else bos

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The ids of a text; to `begin` puts the beginning-of-text token in front, if any."""
        ids: list[int] = self._tokenizer.encode_batch([text]).ids.tolist()
        bos = self._tokenizer.bos_token_id
        return [bos, *ids] if begin and bos is not None and ids[:1] != [bos] else ids

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        """The likelihood of each continuation after its context, which may be empty."""
        windows = [
            window
            for number, (context, continuation) in enumerate(pairs)
            for window in self._windows(number, context or [self.prefix], continuation)
        ]
        windows.sort(key=lambda window: -len(window.ids))
        found = [Likelihood(0.0, True)] * len(pairs)
        for first in range(0, len(windows), self._batch_size):
            batch = windows[first : first + self._batch_size]
            for window, new in zip(batch, self._score_batch(batch), strict=True):
                old = found[window.request]
                found[window.request] = Likelihood(
                    old.log_probability + new.log_probability, old.is_greedy and new.is_greedy
                )
            self._on_share((first + len(batch)) / len(windows))
        return found

    def _windows(
        self, request: int, context: list[int], continuation: list[int]
    ) -> Iterator[Window]:
        """Windows that score each token of the continuation once, as far back as the model reads.

        Those of a model without a memory are the harness's own for a context of `segment_length`.
        """
        ids, config = context + continuation, self._model.config
        longest = config.segment_length if config.memory == "none" else len(ids)
        start = len(context)
        while start < len(ids):
            end = min(start + longest, len(ids))
            yield Window(request, ids[max(0, end - 1 - longest) : end], end - start)
            start = end

    @torch.inference_mode()
    def _score_batch(self, windows: Sequence[Window]) -> list[Likelihood]:
        """Score windows chunk by chunk, in memory that does not grow with their lengths."""
        model, device = self._model, self._model.lm_head.weight.device
        ids = pad_sequence([torch.tensor(window.ids) for window in windows], batch_first=True)
        ends = torch.tensor([[len(window.ids)] for window in windows])
        position = torch.arange(ids.size(1))
        is_scored = (position < ends) & (position >= ends - _column(windows))
        state = model.empty_state(len(windows))
        totals = torch.zeros(len(windows), dtype=torch.float64)
        is_greedy = torch.ones(len(windows), dtype=torch.bool)
        width = chunk_width(len(windows), model.config.segment_length)
        for start in range(0, ids.size(1) - 1, width):
            end = min(start + width, ids.size(1) - 1)
            with self._precision.autocast(device):
                hidden, state = model.extend(ids[:, start:end].to(device), state)
                row, column = is_scored[:, start + 1 : end + 1].nonzero(as_tuple=True)
                targets = ids[row, start + 1 + column].to(device)
                losses, is_best = self._judge(hidden[row.to(device), column.to(device)], targets)
            totals.index_add_(0, row, losses)
            is_greedy[row[~is_best]] = False
        return [Likelihood(*each) for each in zip(totals.tolist(), is_greedy.tolist(), strict=True)]

    def _judge(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of each target, [N] float64, and whether it is the most likely one.

        `hidden` is [N, H], `targets` [N]; the results are on the CPU.
        """
        rows = max(1, LOGITS_AT_ONCE // self._model.lm_head.out_features)
        found, best = [], []
        for some, wanted in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = self._model.lm_head(some).float()
            found.append(logits.log_softmax(-1).gather(1, wanted[:, None]).squeeze(1).double())
            best.append(logits.argmax(-1) == wanted)
        return torch.cat(found).cpu(), torch.cat(best).cpu()

    def continue_texts(self, questions: Sequence[Question]) -> list[str]:
        """The continuation of each prompt, without the stop string that ended it.

        What is sampled depends on the seed and on the number of the question.

        Raises `UserError` if a setting is out of its range, or a model without a memory has no room
        for the prompt besides `max_gen_toks`.
        """
        order = sorted(
            range(len(questions)),
            key=lambda number: (repr(questions[number].settings), -len(questions[number].prompt)),
        )
        texts, first = [""] * len(questions), 0
        while first < len(order):
            settings = questions[order[first]].settings
            batch = [
                number
                for number in order[first : first + self._batch_size]
                if questions[number].settings == settings
            ]
            prompts = [self._readable(questions[number]) for number in batch]
            for number, text in zip(batch, self._continue(prompts, batch, settings), strict=True):
                texts[number] = text
            first += len(batch)
            self._on_share(first / len(order))
        return texts

    def _readable(self, question: Question) -> list[int]:
        """The tokens of a prompt that the model reads: all, or without a memory the last ones."""
        prompt, config = question.prompt or [self.prefix], self._model.config
        if config.memory != "none":
            return prompt
        room = config.segment_length - question.settings.max_gen_toks
        if room < 1:
            raise UserError(
                f"max_gen_toks: got {question.settings.max_gen_toks}; the model has no memory, and "
                f"prompt and answer must fit its segment_length of {config.segment_length}"
            )
        return prompt[-room:]

    def _continue(
        self, prompts: list[list[int]], rows: Sequence[int], settings: Settings
    ) -> list[str]:
        eos = self._tokenizer.eos_token_id
        new: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for tokens in stream(
            self._model,
            prompts,
            max_new_tokens=settings.max_gen_toks,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=self._seed,
            eos_token_id=eos,
            rows=rows,
        ):
            for row in tuple(going):
                if (token := tokens[row]) is not None:
                    new[row].append(token)
                if token in (None, eos) or self._stops(new[row], settings.until):
                    going.remove(row)
            if not going:
                break
        texts = (self._tokenizer.decode(ids) for ids in new)  # without the end of text
        return [_before(text, settings.until) for text in texts]

    def _stops(self, ids: list[int], until: Sequence[str]) -> bool:
        """Whether the newest tokens complete a stop string, which may span several of them."""
        longest = max((len(stop.encode()) for stop in until), default=0)
        newest = self._tokenizer.decode(ids[-longest - STOP_CONTEXT :]) if longest else ""
        return any(stop in newest for stop in until)


def _column(windows: Sequence[Window]) -> Tensor:
    return torch.tensor([[window.scored] for window in windows])


def _before(text: str, until: Sequence[str]) -> str:
    """`text` up to the first of the stop strings."""
    for stop in until:
        text = text.partition(stop)[0]
    return text
