"""The model as the harness sees it: its interface, and the settings of its requests."""

from __future__ import annotations

from typing import Any

from infini_model.evaluation.harness.answering import Answerer, Likelihood, Question, Settings
from infini_model.runtime.errors import UserError


def read_settings(arguments: dict[str, Any]) -> Settings:
    """The settings of a request, `generation_kwargs` of a harness task.

    Raises `UserError` for one that is not supported.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    given: dict[str, Any] = dict(normalize_gen_kwargs(arguments))
    is_sampled = given.pop("do_sample")
    settings = Settings(
        until=tuple(stop for stop in given.pop("until") if stop),
        max_gen_toks=given.pop("max_gen_toks"),
        temperature=float(given.pop("temperature", 1.0 if is_sampled else 0.0)),
        top_k=given.pop("top_k", None) or None,
        top_p=given.pop("top_p", None),
    )
    if given:
        raise UserError(
            f"generation_kwargs: {next(iter(given))} is not supported; there are until, "
            "max_gen_toks, do_sample, temperature, top_k and top_p"
        )
    return settings


def harness_model(answerer: Answerer) -> Any:
    """The `lm_eval.api.model.LM` that answers by `answerer`."""
    from lm_eval.api.model import TemplateLM

    class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm_eval is not typed
        """Splits texts into contexts and continuations as the harness does for any model."""

        eot_token_id = answerer.prefix
        prefix_token_id = answerer.prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return answerer.encode(string, begin=add_special_tokens is not False)

        def loglikelihood(self, requests: list[Any], **_: Any) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(
            self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
        ) -> list[Likelihood]:
            return answerer.score([(context, ids) for _, context, ids in requests])

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            """Each text as a whole, after one token of prefix."""
            texts = (request.args[0] for request in requests)
            found = answerer.score([([], answerer.encode(text, begin=False)) for text in texts])
            return [each.log_probability for each in found]

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return answerer.continue_texts(
                [
                    Question(answerer.encode(context), read_settings(arguments))
                    for context, arguments in (request.args for request in requests)
                ]
            )

    return HarnessModel()
