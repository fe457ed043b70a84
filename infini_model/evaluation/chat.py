"""A conversation whose cost does not grow: what was said before is in the model's state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from infini_model.config import Config, SampleConfig
from infini_model.data.sources.pairs import ASSISTANT, CONTENT, ROLE
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.evaluation.prompt import decode_pieces, load_checkpoint, run_of
from infini_model.model.generate import PREFILL_TOKENS, check_sampling, sample_tokens
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import LowPrecisionWeights
from infini_model.runtime.errors import UserError
from infini_model.runtime.runs import read_run_config

USER = "user"


class Conversation:
    """Turns of a user and a model, in the form that conversations had in its training.

    The state is that of all turns so far, exact in the open segment and compressed before it; a
    model without a memory knows the open segment alone.
    """

    def __init__(
        self,
        model: InfiniLlama,
        tokenizer: Tokenizer,
        template: str,
        sampling: SampleConfig,
        seed: int = 0,
    ) -> None:
        """`template` is `data.source.template`; equal seeds and turns give equal answers.

        Raises `UserError` if the model is not causal, or a setting is out of its range.
        """
        if model.config.bidirectional:
            raise UserError("chat needs a causal model; this one generates by diffusion")
        check_sampling(
            sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.top_p, seed
        )
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._template = template
        self._rng = np.random.default_rng(seed)
        self._operands = LowPrecisionWeights(model, model.precision)
        self._state = model.empty_state(1)
        self._after_answer = ""

    def reply(self, text: str) -> Iterator[str]:
        """Stream the model's answer to `text`, up to its end of text."""
        head, _, tail = self._template.replace(ROLE, USER).partition(CONTENT)
        answer_head, _, answer_tail = self._template.replace(ROLE, ASSISTANT).partition(CONTENT)
        turn = f"{self._after_answer}{head}{text}{tail}{answer_head}"
        if self._state.position.any():
            ids: list[int] = self._tokenizer.encode_batch([turn]).ids.tolist()
        else:
            ids = prompt_ids(self._tokenizer, turn)
        self._after_answer = answer_tail
        return decode_pieces(self._tokenizer, ids, self._answer(ids))

    def _answer(self, ids: list[int]) -> Iterator[int]:
        sampling, logits = self._sampling, self._read(ids)
        for _ in range(sampling.max_new_tokens):
            drawn = torch.tensor([self._rng.random()], dtype=torch.float64)
            token = int(
                sample_tokens(logits, sampling.temperature, sampling.top_k, sampling.top_p, drawn)
            )
            if token == self._tokenizer.eos_token_id:
                return
            yield token
            logits = self._read([token])

    @torch.inference_mode()
    def _read(self, ids: list[int]) -> torch.Tensor:
        """Add tokens to the state; returns the logits after the last one, [1, vocab_size]."""
        model, device = self._model, self._model.lm_head.weight.device
        with self._operands, model.precision.autocast(device):
            for start in range(0, len(ids), PREFILL_TOKENS):
                chunk = torch.tensor([ids[start : start + PREFILL_TOKENS]], device=device)
                hidden, self._state = model.extend(chunk, self._state)
            logits: torch.Tensor = model.lm_head(hidden[:, -1])
        return logits


def begin_conversation(config: Config, checkpoint: Path) -> Conversation:
    """A conversation with a model: a run folder, a checkpoint or a Hugging Face folder.

    Its form is that of the run's data, or `data.source.template` where there is no run. Errors are
    those of `Conversation` and `load_checkpoint`.
    """
    model_dir, model, tokenizer = load_checkpoint(config, checkpoint)
    run_dir = run_of(model_dir)
    data = config.data if run_dir is None else read_run_config(run_dir).data
    return Conversation(
        model, tokenizer, data.source.template, config.evaluation.sample, config.run.seed
    )
