"""The `infini` command.

Most subcommands read one configuration (`flows.options`) and run one flow. A user's mistake is
reported in one line on stderr with exit status 2; Ctrl-C exits with 130. Prefect and torch are
imported only by the commands that need them, after the configuration has been checked.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import typer
from typer._click import Context, HelpFormatter
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from flows.options import ANY_SETTINGS, OPTIONS, UNDERSCORES, configured, unknown
from flows.presets import Invocation
from infini_model.config import Config, load_config
from infini_model.config.locations import expanded
from infini_model.runtime.errors import StageError, UserError, describe_error
from infini_model.runtime.runs import latest_run

# The commands of `infini --help`, by what they are for.
PARTS = {
    "Train": ("run", "preprocess", "show", "train", "evaluate", "compare"),
    "Use a model": ("generate", "chat", "api", "export"),
    "Runs and datasets": ("runs", "resume", "branch", "cancel", "logs", "verify", "clean"),
    "Servers": ("serve", "deploy"),
    "Settings and checks": ("settings", "doctor"),
}


class _Parts(TyperGroup):
    """The commands, listed in parts."""

    def format_commands(self, _ctx: Context, formatter: HelpFormatter) -> None:
        """Write a list for each part."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, names in PARTS.items():
            short = [self.commands[name].get_short_help_str(limit) for name in names]
            with formatter.section(title):
                formatter.write_dl(list(zip(names, short, strict=True)))


app = typer.Typer(
    name="infini",
    cls=_Parts,
    help="Train an Infini-Llama from text; stages retry, resume and reuse finished work.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=UNDERSCORES,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"infini-llama {version('infini-llama')}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Take the options of `infini` itself."""


def _run_flow(name: str, asked: Invocation) -> Any:
    from flows.terminal import run_flow

    return run_flow(name, asked)


def _show_report(result: Mapping[str, Any]) -> None:
    if "report" not in result:  # The first of several machines writes it.
        typer.echo(f"Run: {result['run_dir']}")
        return
    typer.echo(f"Report: {result['report']}")
    typer.echo(f"Report for a browser: {result['html']}")


@app.command()
@configured
def run(asked: Invocation) -> None:
    """Download, shard, train and evaluate. Finished stages are reused."""
    _show_report(_run_flow("pipeline", asked))


@app.command()
@configured
def preprocess(asked: Invocation) -> None:
    """Build the dataset of the documents, or reuse an existing one."""
    dataset = _run_flow("preprocess", asked)
    typer.echo(f"Dataset: {dataset['address'] or dataset['folder']}")


@app.command()
@configured
def train(asked: Invocation) -> None:
    """Train on a finished dataset, or resume an interrupted run.

    The dataset is that of --data-dir, or the newest.
    """
    typer.echo(f"Run: {_run_flow('train', asked)['run_dir']}")


@app.command()
@configured
def evaluate(asked: Invocation) -> None:
    """Evaluate a run and write its report.

    It is run.name=NAME, or the newest.
    """
    _show_report(_run_flow("evaluate", asked))


@app.command()
@configured
def show(
    asked: Invocation,
    every: Annotated[
        bool, typer.Option("--all", help="Print all windows of the batch, from end to end.")
    ] = False,
) -> None:
    """Show what a training will see: its data and its first batch."""
    from flows.show import show

    show(asked.config, every=every)


@app.command()
@configured
def compare(asked: Invocation) -> None:
    """Compare runs: settings and results. --sweep runs them first."""
    from flows import runs

    named = runs.named_runs(asked)  # Tells a mistake before anything slow is imported.
    if asked.config.comparison.sweep:
        _run_flow("compare", asked)
        return
    from flows.print_comparison import print_comparison
    from infini_model.evaluation.compare import compare

    print_comparison(compare(named))


OutputDir = Annotated[str | None, typer.Option(help=OPTIONS["output_dir"].help)]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir", "-d", help="Folder or address of datasets (default: in the output folder)."
    ),
]
RunOrNewest = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Name or folder of a run (default: the newest)."),
]


def _places(output_dir: str | None, data_dir: str | None = None) -> Config:
    """The configuration of a command that only needs the output folder, or that of datasets."""
    given = {"output_dir": output_dir, "data_dir": data_dir}
    places = {key: folder for key, folder in given.items() if folder is not None}
    return load_config(overrides=[{"run": places}])


@app.command()
def runs(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    output_dir: OutputDir = None,
) -> None:
    """List all runs: step, state and losses."""
    from flows import runs

    show = runs.show_runs_as_json if as_json else runs.show_runs
    show(_places(output_dir).run)


@app.command()
def resume(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] KEY=VALUE",
            help="Name or folder of a run (default: the newest interrupted one), and overrides of "
            "settings that do not affect the weights, such as launch.gpus=0.",
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Resume an interrupted run, then evaluate it.

    It keeps its own settings, however it was started.
    """
    from flows import runs

    run_dir, asked = runs.to_resume(_places(output_dir).run, arguments or [])
    if asked is None:
        typer.echo(f"{run_dir} is already finished; nothing to do")
        return
    typer.echo(f"Resuming {run_dir}")
    _show_report(_run_flow("pipeline", asked))


@app.command()
def branch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of the run.")],
    overrides: Annotated[list[str] | None, ANY_SETTINGS] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint (default: the newest).", min=1)
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Train a new run from a checkpoint of another.

    It has the settings and the dataset of the other run, but for those given, and is evaluated.
    """
    from flows import runs

    asked = runs.to_branch(_places(output_dir).run, run, step, overrides or [])
    typer.echo(f"Branching from {asked.config.training.branch_of}")
    _show_report(_run_flow("pipeline", asked))


@app.command()
def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")],
    output_dir: OutputDir = None,
) -> None:
    """Stop a run, however it was started. It saves a checkpoint first."""
    from flows import runs

    places = _places(output_dir).run
    run_dir = runs.find_run_folder(places, run)
    typer.echo(f"Cancelled {run_dir.name}; {runs.cancel(run_dir, places.store)}")


@app.command()
def logs(
    run: RunOrNewest = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Print the logs of a run's processes."""
    from flows import runs

    places = _places(output_dir).run
    run_dir = runs.find_run_folder(places, run)
    try:
        runs.print_logs(run_dir, places.store, follow=follow)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe: discard what Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
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
        raise UserError("--license and --private: are of --push")
    if push is not None and license_id is None:
        if not sys.stdin.isatty():
            raise UserError("--push: needs a --license, such as apache-2.0")
        license_id = typer.prompt("Licence of the model, such as apache-2.0")
    from flows import export as exporting

    places, form = _places(output_dir).run, exporting.Form(file_format, merge, llama_cpp)
    if push is None:
        lines = exporting.export_run(places, run, to or "", form)
    else:
        lines = exporting.push_run(
            places, run, push, form, license_id=license_id or "", private=private
        )
    typer.echo("\n".join(lines))


@app.command()
def verify(
    dataset: Annotated[
        str | None,
        typer.Argument(
            metavar="DATASET",
            help="Name, folder or address of a dataset (default: the newest).",
        ),
    ] = None,
    output_dir: OutputDir = None,
    data_dir: DataDir = None,
) -> None:
    """Compare every checksum of a dataset.

    Of one in a store, it compares the sizes of its objects there. Exits with status 2 if a file is
    missing or damaged.
    """
    from flows import dataset_commands

    dataset_commands.verify(_places(output_dir, data_dir), dataset)


@app.command()
def clean(
    keep: Annotated[
        int, typer.Option(help="Datasets of each name to keep, those used last.", min=1)
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    output_dir: OutputDir = None,
    data_dir: DataDir = None,
) -> None:
    """Remove datasets, downloads and checkpoints that are unused.

    That is what nothing refers to; of checkpoints, only those of finished runs.
    """
    from flows import dataset_commands

    config = _places(output_dir, data_dir)
    dataset_commands.clean(config, keep, dry_run=dry_run)


@app.command()
@configured
def serve(
    asked: Invocation,
    port: Annotated[
        int, typer.Option(help="Port of Prefect's API and UI.", min=1, max=65535)
    ] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's UI.", min=1, max=65535)] = 5000,
    auth: Annotated[
        bool | None,
        typer.Option(
            "--auth/--no-auth",
            help="Require a generated secret on both servers (default: as last time).",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="Prefect's database, postgresql+asyncpg://USER@HOST:PORT/NAME (default: a SQLite "
            "file in the output folder). Keep a password in INFINI_DATABASE or ~/.pgpass.",
            envvar="INFINI_DATABASE",
            show_envvar=False,
        ),
    ] = None,
) -> None:
    """Run Prefect's and MLflow's UI, a worker and the deployments.

    They end with Ctrl-C.
    """
    from flows.serving import serve as serving

    serving.serve(asked.config, port=port, mlflow_port=mlflow_port, auth=auth, database=database)


@app.command()
def deploy(
    reset: Annotated[
        bool, typer.Option("--reset", help="Discard edits that were made on the server.")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Create or update the deployments on the Prefect server.

    With them, the work pool and automations.
    """
    from flows.serving.connection import prefect_api

    with prefect_api(_places(output_dir)) as wait_until_up:
        from flows.serving import deploy as deployment

        wait_until_up()
        deployment.deploy(os.environ["PREFECT_API_URL"], reset=reset)
    typer.echo("Deployed.")


Checkpoint = Annotated[
    Path | None,
    typer.Option(
        help="Run, checkpoint or Hugging Face folder (default: the newest run).",
        parser=expanded,
        metavar="PATH",
    ),
]


@app.command()
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


@app.command()
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


@app.command()
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
    from flows import runs

    name, overrides = runs.split_run(arguments or [])
    places = {} if output_dir is None else {"output_dir": output_dir}
    config = load_config(overrides=[{"run": places}, *overrides])
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


@app.command()
def settings(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="A section or key (default: all).")
    ] = "",
    *,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the JSON schema of all, for an editor.")
    ] = False,
) -> None:
    """List the settings: values, default, and what each decides."""
    from infini_model.config.explaining import reference

    if json_schema:
        if prefix:
            raise UserError("--json-schema: takes no PREFIX; the schema is of all settings")
        typer.echo(json.dumps(Config.model_json_schema(), ensure_ascii=False))
        return
    try:
        typer.echo(reference(prefix))
    except LookupError as error:
        raise UserError(str(error)) from error


@app.command()
@configured
def doctor(asked: Invocation) -> None:
    """Check this machine and suggest fixes.

    Exits with status 1 if there is a problem.
    """
    from rich.console import Console
    from rich.table import Column, Table

    from flows.doctor import examine

    findings = examine(asked.config)
    titles = ("Check", "Found", "What to do")
    table = Table(*(Column(title, overflow="fold") for title in titles))
    for finding in findings:
        table.add_row(finding.subject, finding.found, finding.remedy)
    Console().print(table)
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)


def _interrupt(_signal: int, _frame: object) -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C: children end first, training saves a checkpoint."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; every expected error is reported in one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal need not know every letter
            stream.reconfigure(errors="replace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except NoSuchOption as error:
        parameters = error.ctx.command.params if error.ctx else []
        options = [each for each in parameters if isinstance(each, TyperOption)]
        listed = [name for each in options if not each.hidden for name in each.opts]
        with_settings = any("KEY=VALUE" in (each.metavar or "") for each in parameters)
        line = unknown(error.option_name, listed, with_settings=with_settings)
        typer.echo(f"error: {line}", err=True)
        sys.exit(2)
    except TyperException as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except (UserError, ConnectionError, StageError, TimeoutError) as error:
        typer.echo(f"error: {describe_error(error)}", err=True)
        sys.exit(2 if isinstance(error, UserError | ConnectionError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
