"""Continue a prompt, streaming the text as it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from infini_model.config import Config, UnmaskingConfig
from infini_model.data.tokenizers.load import load_dataset_tokenizer, tokenizer_of
from infini_model.data.tokenizers.tokenizer import Tokenizer, prompt_ids
from infini_model.model.generate import stream
from infini_model.model.llama import InfiniLlama
from infini_model.model.precision import resolve_precision
from infini_model.model.unmask import DEFAULT, unmask
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import CHECKPOINTS, MODEL, is_started, read_run
from infini_model.training.checkpoint import newest_checkpoint
from infini_model.training.export import load_model
from infini_model.training.launch.devices import first_device

CONTEXT = 8
# What an incomplete UTF-8 sequence decodes to; the next token may complete it.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _model_dir(checkpoint: Path) -> Path:
    """The model folder of `checkpoint`: a run, one of its checkpoints, or the folder itself."""
    if (checkpoint / CHECKPOINTS).is_dir():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise CheckpointError(
                f"{checkpoint / CHECKPOINTS}: no checkpoint found; "
                "infini runs lists the runs, --checkpoint names one"
            )
        return newest / MODEL
    return checkpoint / MODEL if (checkpoint / MODEL).is_dir() else checkpoint


def run_of(model_dir: Path) -> Path | None:
    """The folder of the run that a model folder is part of."""
    parents = model_dir.resolve().parents
    return next(filter(is_started, parents), None)


def _tokenizer_of(model_dir: Path) -> Tokenizer:
    """The tokenizer beside the model, or the one of its run's dataset."""
    if (own := tokenizer_of(model_dir, str(model_dir))) is not None:
        return own
    if (run_dir := run_of(model_dir)) is not None:
        return load_dataset_tokenizer(read_run(run_dir).dataset)
    raise CheckpointError(f"{model_dir}: has no tokenizer.json and is not part of a run")


def load_checkpoint(config: Config, checkpoint: Path) -> tuple[Path, InfiniLlama, Tokenizer]:
    """The model folder, the model and the tokenizer of a run, a checkpoint or a model folder.

    Raises `CheckpointError` if there is no model or no tokenizer, `DeviceError` as `load_model`.
    """
    model_dir = _model_dir(checkpoint)
    tokenizer = _tokenizer_of(model_dir)
    device = torch.device(first_device(config.launch.gpus))
    model = load_model(
        model_dir,
        device=device,
        attention_backend=config.launch.attention_backend,
        operands=resolve_precision(config.training.precision, device),
    )
    return model_dir, model, tokenizer


def continue_text(config: Config, checkpoint: Path, prompt: str) -> Iterator[str]:
    """Load a model and stream its continuation of `prompt`, in constant memory.

    `config.evaluation.sample` sets the number of tokens and the sampling.

    Raises what `load_checkpoint` does, and `UserError` for an empty prompt if no beginning-of-text
    token begins it.
    """
    _, model, tokenizer = load_checkpoint(config, checkpoint)
    settings = config.evaluation.sample
    return continue_prompt(
        model,
        tokenizer,
        prompt,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=config.run.seed,
        unmasking=settings.unmasking,
    )


def continue_prompt(
    model: InfiniLlama,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    unmasking: UnmaskingConfig = DEFAULT,
) -> Iterator[str]:
    """Stream the model's continuation of `prompt`, up to its end-of-text token.

    The settings and errors are those of `new_tokens`.
    """
    ids = prompt_ids(tokenizer, prompt)
    new = new_tokens(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
        unmasking=unmasking,
    )
    return decode_pieces(tokenizer, ids, new)


def new_tokens(
    model: InfiniLlama,
    ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eos_token_id: int | None,
    unmasking: UnmaskingConfig,
) -> Iterator[int]:
    """Stream the tokens that follow `ids`, without the end of text.

    One by one from a causal model, block by block from one of diffusion. The settings and
    errors are those of `infini_model.model.generate.generate` and
    `infini_model.model.unmask.unmask`.
    """
    if model.config.bidirectional:
        blocks: Iterable[Sequence[int | None]] = unmask(
            model,
            ids,
            max_new_tokens=max_new_tokens,
            settings=unmasking,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos_token_id=eos_token_id,
        )
    else:
        blocks = stream(
            model,
            [ids],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            eos_token_id=eos_token_id,
        )
    return (token for block in blocks for token in block if token not in (None, eos_token_id))


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
