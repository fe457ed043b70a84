"""A causal model as EleutherAI's lm-evaluation-harness sees it: likelihoods and continuations.

Up to rounding, no answer depends on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM  # noqa: TID253 - only the task lm_eval imports this file
from lm_eval.models.utils import Collator, normalize_gen_kwargs  # noqa: TID253

from infini_model.config import SampleConfig
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.generate import sampling, stream
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import UserError
from infini_model.serving.scoring import score


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
        """Score each continuation after its context, which may be empty, as `score` does."""
        begun = [(context or [self.eot_token_id], continuation) for context, continuation in pairs]
        return score(self._model, begun, self._batch_size, self._on_batch)

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
