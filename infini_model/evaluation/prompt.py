"""Go on with a prompt from the command line, text out as it is drawn."""

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
    """The Hugging Face folder that `checkpoint` means: a run, one of its checkpoints, or itself."""
    if (checkpoint / "checkpoints").is_dir():
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise CheckpointError(f"{checkpoint / 'checkpoints'}: there is no checkpoint")
        return newest / "model"
    return checkpoint / "model" if (checkpoint / "model").is_dir() else checkpoint


def _tokenizer_of(model_dir: Path) -> Tokenizer:
    """The tokenizer beside the model, or that of the dataset that its run was trained on."""
    if (model_dir / "tokenizer.json").is_file():
        return load_tokenizer(str(model_dir / "tokenizer.json"))
    for folder in model_dir.resolve().parents:
        if (folder / "run.json").is_file():
            return load_dataset_tokenizer(dataset_of(folder))
    raise CheckpointError(f"{model_dir}: has no tokenizer.json and is not part of a run")


def continue_text(config: Config, checkpoint: Path | None, prompt: str) -> Iterator[str]:
    """Load a model, and give back what it adds to `prompt`, piece by piece, in constant memory.

    `checkpoint` is a run folder, a checkpoint or a Hugging Face folder; None is the newest run.
    `config.evaluation.sample` says how many tokens are generated and how.

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
    """Yield what the model adds to `prompt`, piece by piece, up to its end-of-text token.

    The settings are those of `infini_model.model.generation.generate`, which says what it raises.
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
    """Yield the text of `new`, which follows `before`, as soon as it is whole characters.

    A token is decoded beside the few before it, since spaces may depend on them; so it costs the
    same however long the text has become. A sequence that the end leaves incomplete is left out.
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
