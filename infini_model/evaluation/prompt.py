"""Text from a model, streamed as it is generated: a prompt continued, and a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from infini_model.config import Config, SampleConfig
from infini_model.data.sources.pairs import ASSISTANT, CONTENT, ROLE
from infini_model.data.tokenizers.load import load_dataset_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.model.generate import PREFILL_TOKENS, Sampling, stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import LowPrecisionWeights, resolve_precision
from infini_model.model.unmask import unmask
from infini_model.runtime.errors import CheckpointError, UserError
from infini_model.runtime.runs import CHECKPOINTS, MODEL, is_started, read_run, read_run_config
from infini_model.training.checkpoint import newest_checkpoint
from infini_model.training.export import load_model
from infini_model.training.launch.devices import first_device

USER = "user"
# Tokens that are decoded in front of new ones, since spaces may depend on them.
CONTEXT = 8
# What an incomplete UTF-8 sequence decodes to; the next token may complete it.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def run_of(model_dir: Path) -> Path | None:
    """The folder of the run that a model folder is part of."""
    return next(filter(is_started, model_dir.resolve().parents), None)


def load_checkpoint(config: Config, checkpoint: Path) -> tuple[Path, InfiniLlama, Tokenizer]:
    """The model folder, the model and the tokenizer of a run, a checkpoint or a model folder.

    Raises `CheckpointError` if there is no model or no tokenizer, `DeviceError` as `load_model`.
    """
    model_dir = checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint
    if (checkpoint / CHECKPOINTS).is_dir():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise CheckpointError(
                f"{checkpoint / CHECKPOINTS}: no checkpoint found; "
                "infini runs lists the runs, --checkpoint names one"
            )
        model_dir = newest / MODEL
    tokenizer = tokenizer_of(model_dir, str(model_dir))
    if tokenizer is None:
        run_dir = run_of(model_dir)
        if run_dir is None:
            raise CheckpointError(f"{model_dir}: has no tokenizer.json and is not part of a run")
        tokenizer = load_dataset_tokenizer(read_run(run_dir).dataset)
    device = torch.device(first_device(config.launch.gpus))
    model = load_model(
        model_dir,
        device=device,
        attention_backend=config.launch.attention_backend,
        precision=resolve_precision(config.training.precision, device),
    )
    return model_dir, model, tokenizer


def continue_text(config: Config, checkpoint: Path, prompt: str) -> Iterator[str]:
    """Load a model and stream its continuation of `prompt`, in constant memory.

    `config.evaluation.sample` sets the number of tokens and the sampling.

    Raises what `load_checkpoint` does, and `UserError` for an empty prompt if no beginning-of-text
    token begins it.
    """
    _, model, tokenizer = load_checkpoint(config, checkpoint)
    return continue_prompt(model, tokenizer, prompt, config.evaluation.sample, config.run.seed)


def continue_prompt(
    model: InfiniLlama, tokenizer: Tokenizer, prompt: str, settings: SampleConfig, seed: int
) -> Iterator[str]:
    """Stream the model's continuation of `prompt`, up to its end-of-text token.

    Errors are those of `new_tokens`.
    """
    ids = prompt_ids(tokenizer, prompt)
    new = new_tokens(model, ids, settings, seed, tokenizer.eos_token_id)
    return decode_pieces(tokenizer, ids, new)


def new_tokens(
    model: InfiniLlama, ids: list[int], settings: SampleConfig, seed: int, eos_token_id: int | None
) -> Iterator[int]:
    """Stream at most `settings.max_new_tokens` tokens that follow `ids`, without the end of text.

    One by one from a causal model, block by block from one of diffusion. Errors are those of
    `infini_model.model.generate.generate` and `infini_model.model.unmask.unmask`.
    """
    sampling = _sampling(settings, seed, eos_token_id)
    blocks: Iterable[Sequence[int | None]]
    if model.config.bidirectional:
        blocks = unmask(model, ids, sampling, settings.unmasking)
    else:
        blocks = stream(model, [ids], sampling)
    return (token for block in blocks for token in block if token not in (None, eos_token_id))


def _sampling(settings: SampleConfig, seed: int, eos_token_id: int | None) -> Sampling:
    return Sampling(
        settings.max_new_tokens,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        seed,
        eos_token_id,
    )


def decode_pieces(tokenizer: Tokenizer, before: list[int], new: Iterable[int]) -> Iterator[str]:
    """Yield the text of `new`, which follows `before`, as soon as its characters are complete.

    A token is decoded together with the few before it, since spaces may depend on them, so its cost
    does not grow with the text. An incomplete UTF-8 sequence at the end is dropped.
    """
    context, waiting = before[-CONTEXT:], list[int]()
    text = ""
    for token in new:
        waiting.append(token)
        text = tokenizer.decode(context + waiting)[len(tokenizer.decode(context)) :]
        if not text.endswith(REPLACEMENT):
            yield text
            context, waiting, text = (context + waiting)[-CONTEXT:], [], ""
    yield text.rstrip(REPLACEMENT)


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
        self._sampling = _sampling(sampling, seed, tokenizer.eos_token_id)
        self._model, self._tokenizer = model, tokenizer
        self._template = template
        self._rng = np.random.default_rng(seed)
        self._weights = LowPrecisionWeights(model, model.precision)
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
            token = int(sampling.draw(logits, drawn))
            if token == sampling.eos_token_id:
                return
            yield token
            logits = self._read([token])

    @torch.inference_mode()
    def _read(self, ids: list[int]) -> torch.Tensor:
        """Add tokens to the state; returns the logits after the last one, [1, vocab_size]."""
        model, device = self._model, self._model.lm_head.weight.device
        with self._weights, model.precision.autocast(device):
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
