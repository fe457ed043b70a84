"""Continue a prompt, streaming the text as it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from infini_model.config import Config
from infini_model.data.tokenizers.load import load_dataset_tokenizer, load_tokenizer
from infini_model.data.tokenizers.tokenizer import Tokenizer
from infini_model.model.generation import stream
from infini_model.model.llama import InfiniLlama
from infini_model.runtime.errors import CheckpointError
from infini_model.runtime.runs import dataset_of, latest_run
from infini_model.training.checkpoints.checkpoint import newest_checkpoint
from infini_model.training.launch.devices import first_device

CONTEXT = 8
# What an incomplete UTF-8 sequence decodes to; the next token may complete it.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _model_dir(checkpoint: Path) -> Path:
    """The model folder of `checkpoint`: a run, one of its checkpoints, or the folder itself."""
    if (checkpoint / "checkpoints").is_dir():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise CheckpointError(f"{checkpoint / 'checkpoints'}: no checkpoint found")
        return newest / "model"
    return checkpoint / "model" if (checkpoint / "model").is_dir() else checkpoint


def _tokenizer_of(model_dir: Path) -> Tokenizer:
    """The tokenizer beside the model, or the one of its run's dataset."""
    if (model_dir / "tokenizer.json").is_file():
        return load_tokenizer(str(model_dir / "tokenizer.json"))
    for folder in model_dir.resolve().parents:
        if (folder / "run.json").is_file():
            return load_dataset_tokenizer(dataset_of(folder))
    raise CheckpointError(f"{model_dir}: has no tokenizer.json and is not part of a run")


def continue_text(config: Config, checkpoint: Path | None, prompt: str) -> Iterator[str]:
    """Load a model and stream its continuation of `prompt`, in constant memory.

    `checkpoint` is a run folder, a checkpoint or a Hugging Face folder; None is the newest run.
    `config.evaluation.sample` sets the number of tokens and the sampling.

    Raises `CheckpointError` if there is no model or no tokenizer, `UserError` for an empty prompt.
    """
    model_dir = _model_dir(checkpoint or latest_run(config))
    tokenizer = _tokenizer_of(model_dir)
    model = InfiniLlama.from_pretrained(
        model_dir,
        device=first_device(config.launch.gpus),
        attention_backend=config.launch.attention_backend,
    ).eval()
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
) -> Iterator[str]:
    """Stream the model's continuation of `prompt`, up to its end-of-text token.

    The settings and errors are those of `infini_model.model.generation.generate`.
    """
    ids = tokenizer.encode_batch([prompt]).ids.tolist()
    steps = stream(
        model,
        [ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
    )
    new = (token for (token,) in steps if token not in (None, tokenizer.eos_token_id))
    return decode_pieces(tokenizer, ids, new)


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
