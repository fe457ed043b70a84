"""Go on with a prompt from the command line, text out as it is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from infini_model.config import Config
from infini_model.data.tokenizers import Tokenizer, load_dataset_tokenizer, load_tokenizer
from infini_model.errors import CheckpointError
from infini_model.generation import stream
from infini_model.llama import InfiniLlama
from infini_model.runs import dataset_of, latest_run
from infini_model.training.checkpoint import newest_checkpoint

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
    """Yield what the model adds to `prompt`, piece by piece, in constant memory.

    `checkpoint` is a run folder, a checkpoint or a Hugging Face folder; None is the newest run.
    `config.evaluation` says how many tokens are drawn and how.

    Raises `CheckpointError` if there is no model or no tokenizer, `UserError` for an empty prompt.
    """
    model_dir = _model_dir(checkpoint or latest_run(config))
    tokenizer = _tokenizer_of(model_dir)
    model = InfiniLlama.from_pretrained(model_dir).eval()
    new: list[int] = []
    shown = ""
    for (token,) in stream(
        model,
        [tokenizer.encode_batch([prompt]).ids.tolist()],
        max_new_tokens=config.evaluation.max_new_tokens,
        temperature=config.evaluation.temperature,
        top_k=config.evaluation.top_k,
        seed=config.run.seed,
        eos_token_id=tokenizer.eos_token_id,
    ):
        if token is None or token == tokenizer.eos_token_id:
            break
        new.append(token)
        text = tokenizer.decode(new).rstrip(REPLACEMENT)
        yield text[len(shown) :]
        shown = text
