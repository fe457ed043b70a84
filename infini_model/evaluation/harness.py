"""A causal model as EleutherAI's lm-evaluation-harness sees it: likelihoods and continuations.

A model with a memory has no longest text: it reads all of a request, segment by segment, in memory
that does not grow. One without reads what any Llama of context `segment_length` reads in the
harness: the last tokens before each scored one, and a long text in disjoint windows. No answer
depends on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM  # noqa: TID253 - only the task lm_eval imports this file
from lm_eval.models.utils import Collator, normalize_gen_kwargs  # noqa: TID253
from torch.nn.utils.rnn import pad_sequence

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.generate import chunk_width, sampling, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.loss import LOGITS_AT_ONCE
from infini_model.runtime.errors import UserError


def read_settings(arguments: dict[str, Any]) -> tuple[tuple[str, ...], SampleConfig]:
    """The stop strings and the sampling that a request's `generation_kwargs` ask for.

    Raises `UserError` for a setting that is not supported or out of its range.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(arguments))
    is_sampled, until = given.pop("do_sample"), given.pop("until")
    settings = sampling(
        max_new_tokens=given.pop("max_gen_toks"),
        temperature=float(given.pop("temperature", 1.0 if is_sampled else 0.0)),
        top_k=given.pop("top_k", None) or None,
        top_p=given.pop("top_p", None),
    )
    if given:
        raise UserError(
            f"generation_kwargs: {next(iter(given))} is not supported; there are until, "
            "max_gen_toks, do_sample, temperature, top_k and top_p"
        )
    return tuple(filter(None, until)), settings


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
    """A causal model as the harness sees it, which splits texts as it does for any model."""

    def __init__(
        self,
        model: InfiniLlama,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int = 0,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer in the model's precision; `seed` is that of the sampling.

        `on_batch` is called after each batch of requests.
        """
        super().__init__()
        self._on_batch = on_batch
        self._model, self._text = model, tokenizer
        self._batch_size, self._seed = batch_size, seed

    @property
    def eot_token_id(self) -> int:
        """The token in front of a text without a context."""
        bos = self._text.bos_token_id
        return self._text.eos_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text, with the beginning-of-text token in front unless it is forbidden."""
        ids: list[int] = self._text.encode_batch([string]).ids.tolist()
        bos = self._text.bos_token_id
        if bos is None or add_special_tokens is False or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
        """The log-likelihood of each text as a whole, after one token of prefix."""
        texts = [self.tok_encode(request.args[0], False) for request in requests]
        return [each for each, _ in self.score([([], text) for text in texts])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.score([(context, ids) for _, context, ids in requests])

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Score each continuation after its context, which may be empty.

        Returns:
            Its log-likelihood in nats, and whether each token of it is the most likely one.
        """
        windows = [
            (number, *window)
            for number, (context, continuation) in enumerate(pairs)
            for window in self._windows(context or [self.eot_token_id], continuation)
        ]
        windows.sort(key=lambda window: -len(window[1]))
        found = [(0.0, True)] * len(pairs)
        for first in range(0, len(windows), self._batch_size):
            batch = windows[first : first + self._batch_size]
            numbers, *read = zip(*batch, strict=True)
            for number, total, greedy in zip(numbers, *self._score_batch(*read), strict=True):
                before, was_greedy = found[number]
                found[number] = (before + total, was_greedy and greedy)
            self._on_batch()
        return found

    def _windows(
        self, context: list[int], continuation: list[int]
    ) -> Iterator[tuple[list[int], int]]:
        """Windows that score each token of the continuation once, as far back as the model reads.

        The ids that are read, and how many of them are scored, the last ones. Those of a model
        without a memory are the harness's own for a context of `segment_length`.
        """
        ids, config = context + continuation, self._model.config
        longest = len(ids) if config.has_past else config.segment_length
        for start in range(len(context), len(ids), longest):
            end = min(start + longest, len(ids))
            yield ids[max(0, end - 1 - longest) : end], end - start

    @torch.inference_mode()
    def _score_batch(
        self, texts: Sequence[list[int]], scored: Sequence[int]
    ) -> tuple[list[float], list[bool]]:
        """Score the last tokens chunk by chunk, in memory that does not grow with the texts."""
        model, device = self._model, self._model.lm_head.weight.device
        ids = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        ends, position = torch.tensor([[len(text)] for text in texts]), torch.arange(ids.size(1))
        is_scored = (position < ends) & (position >= ends - torch.tensor(scored)[:, None])
        state = model.empty_state(len(texts))
        totals = torch.zeros(len(texts), dtype=torch.float64)
        is_greedy = torch.ones(len(texts), dtype=torch.bool)
        width = chunk_width(len(texts), model.config.segment_length)
        most = max(1, LOGITS_AT_ONCE // model.lm_head.out_features)
        for start in range(0, ids.size(1) - 1, width):
            end = min(start + width, ids.size(1) - 1)
            with model.precision.autocast(device):
                hidden, state = model.extend(ids[:, start:end].to(device), state)
                asked = is_scored[:, start + 1 : end + 1].nonzero()
                for row, column in (some.unbind(1) for some in torch.split(asked, most)):
                    targets = ids[row, start + 1 + column].to(device)
                    logits = model.lm_head(hidden[row.to(device), column.to(device)]).float()
                    found = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
                    totals.index_add_(0, row, found.double().cpu())
                    is_greedy[row[(logits.argmax(-1) != targets).cpu()]] = False
        return totals.tolist(), is_greedy.tolist()

    def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
        """The continuation of each prompt, without the stop string that ended it.

        What is sampled depends on the seed and on the number of the request.

        Raises `UserError` if a setting is not supported or out of its range, or a model without a
        memory has no room for the prompt besides `max_gen_toks`.
        """
        asked = [
            (number, self.tok_encode(prompt) or [self.eot_token_id], *read_settings(kwargs))
            for number, (prompt, kwargs) in enumerate(request.args for request in requests)
        ]
        order = Collator(
            asked,
            sort_fn=lambda each: -len(each[1]),
            group_by="gen_kwargs",
            group_fn=lambda each: each[2:],
        )
        texts: list[str] = []
        for batch in order.get_batched(n=self._batch_size):
            numbers, prompts = zip(*(each[:2] for each in batch), strict=True)
            texts += self._continue(prompts, numbers, *batch[0][2:])
            self._on_batch()
        ordered: list[str] = order.get_original(texts)
        return ordered

    def _continue(
        self,
        prompts: Sequence[list[int]],
        rows: Sequence[int],
        until: Sequence[str],
        settings: SampleConfig,
    ) -> list[str]:
        config, ends = self._model.config, self._text.end_token_ids
        if not config.has_past:  # it reads the last tokens
            room = config.segment_length - settings.max_new_tokens
            if room < 1:
                raise UserError(
                    f"max_gen_toks: got {settings.max_new_tokens}; the model has no memory, and "
                    f"prompt and answer must fit its segment_length of {config.segment_length}"
                )
            prompts = [prompt[-room:] for prompt in prompts]
        new: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        for tokens in stream(self._model, prompts, settings, self._seed, ends, rows=rows):
            for row in tuple(going):
                is_end = (token := tokens[row]) is None or token in ends
                if token is not None and not is_end:
                    new[row].append(token)
                text = self._text.decode(new[row]) if until else ""
                if is_end or any(stop in text for stop in until):
                    going.remove(row)
            if not going:
                break
        texts = [self._text.decode(ids) for ids in new]
        for stop in until:
            texts = [text.partition(stop)[0] for text in texts]
        return texts
