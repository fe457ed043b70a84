"""Commands that use a trained model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import typer

from flows import runs
from flows.cli.options import OutputDir, RunOrNewest, config_at, configured
from flows.presets import Invocation
from infini_model.config.locations import expanded
from infini_model.runtime.errors import UserError
from infini_model.runtime.runs import latest_run

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Run, checkpoint or Hugging Face folder (default: the newest run).",
        parser=expanded,
        metavar="PATH",
    ),
]


@configured
def generate(
    asked: Invocation,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue (default: asks for one on a terminal).")
    ] = None,
    prompt_file: Annotated[
        typer.FileBinaryRead | None,
        typer.Option(
            help="File with the text to continue, or - for stdin; it is not repeated.",
            metavar="PATH",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Continue a prompt of any length, printing text as it comes."""
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        prompt = typer.prompt("Prompt")
    text = _read_prompt(prompt, prompt_file)
    config = asked.config
    folder = checkpoint or latest_run(config)

    from infini_model.serving.model import Model

    model = Model.from_checkpoint(config, folder, cache_gigabytes=0)  # for a single text
    pieces = model.stream(text, seed=config.run.seed)
    typer.echo(prompt or "", nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def _read_prompt(prompt: str | None, file: BinaryIO | None) -> str:
    """The text of `--prompt` or `--prompt-file`. Raises `UserError` in one line."""
    if (prompt is None) == (file is None):
        raise UserError("give either --prompt or --prompt-file")
    # An argument of the shell need not be UTF-8.
    data = os.fsencode(prompt or "") if file is None else file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        option = "--prompt" if file is None else "--prompt-file"
        raise UserError(f"{option}: is not UTF-8 text") from error


@configured
def chat(asked: Invocation, checkpoint: Checkpoint = None) -> None:
    """Talk to a model that was trained on conversations.

    Its memory holds all turns, at a cost that does not grow. Ctrl-D ends the talk.
    """
    from infini_model.serving.model import Conversation, Model

    model = Model.from_checkpoint(asked.config, checkpoint or latest_run(asked.config))
    talk = Conversation(model, asked.config.run.seed)
    while True:
        try:
            # As in `_read_prompt`, what is typed need not be UTF-8.
            text = os.fsencode(input("> ")).decode("utf-8")
        except EOFError:
            typer.echo()
            return
        except UnicodeDecodeError as error:
            raise UserError("stdin: is not UTF-8 text") from error
        for piece in talk.reply(text):
            typer.echo(piece, nl=False)
        typer.echo()


def api(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] KEY=VALUE",
            help="Name or folder of a run, or a Hugging Face folder (default: the newest run), and "
            "settings, such as evaluation.sample.temperature=0 for requests that give none.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send. Keep it in INFINI_API_KEY, as command lines are "
            "visible.",
            envvar="INFINI_API_KEY",
            show_envvar=False,
        ),
    ] = None,
    cache_gigabytes: Annotated[
        float,
        typer.Option(help="Memory for the states of texts that were read, in GB.", min=0.0),
    ] = 1.0,
    output_dir: OutputDir = None,
) -> None:
    """Serve a model to OpenAI's clients: completions and chats.

    A conversation costs the same however long it is. Ctrl-C ends it.
    """
    name, overrides = runs.split_run(arguments or [])
    config = config_at(output_dir, overrides=overrides)
    folder = runs.find_run_folder(config.run, name)

    from flows.serving.api import serve_model

    serve_model(
        config,
        folder,
        host=host,
        port=port,
        key=api_key or None,
        cache_gigabytes=cache_gigabytes,
    )


def export(
    run: RunOrNewest = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Folder (or GGUF file) to write; an export is replaced."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Repository on the Hugging Face Hub; its model card is made from the report.",
        ),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option(
            "--license", metavar="ID", help="Licence of a pushed model, such as apache-2.0."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Merge the adapters of a LoRA run into its initial weights."),
    ] = False,
    file_format: Annotated[
        Literal["huggingface", "remote-code", "gguf"],
        typer.Option(
            "--format",
            help="huggingface, which transformers opens after import infini_model.hf; remote-code, "
            "which it opens without this package; or gguf, for llama.cpp, if there is no memory.",
        ),
    ] = "huggingface",
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            help="Folder of llama.cpp's sources, whose converter writes GGUF (or LLAMA_CPP).",
            parser=expanded,
            metavar="PATH",
            envvar="LLAMA_CPP",
            show_envvar=False,
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face folder, or push it to the hub.

    The tokenizer goes with it.
    """
    if (to is None) == (push is None):
        raise UserError("give either --to or --push")
    if push is None and (private or license_id):
        raise UserError("--license and --private: only apply to --push")
    if push is not None and license_id is None:
        if not sys.stdin.isatty():
            raise UserError("--push: needs a --license, such as apache-2.0")
        license_id = typer.prompt("Licence of the model, such as apache-2.0")
    from flows import export as exporting

    places, form = config_at(output_dir).run, exporting.Form(file_format, merge, llama_cpp)
    if push is None:
        lines = exporting.export_run(places, run, to or "", form)
    else:
        lines = exporting.push_run(
            places, run, push, form, license_id=license_id or "", private=private
        )
    typer.echo("\n".join(lines))
