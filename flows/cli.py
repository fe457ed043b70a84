"""The `infini` command.

Each subcommand reads one configuration (`flows.options`) and runs one flow. What a user did wrong
is one line on stderr and exit status 2; Ctrl-C is 130. Prefect and torch are imported only by the
commands that need them, after the configuration has been checked.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from flows.options import configured
from infini_model.config import Config, load_config
from infini_model.runtime.errors import StageError, UserError

MENDABLE = (UserError, ConnectionError)
FORESEEN = (*MENDABLE, StageError, TimeoutError)
# What Prefect says of a Ctrl-C.
INTERRUPTED = (
    "Crash detected! Execution was aborted by",
    "Finished in state Crashed('Execution was aborted by",
)

app = typer.Typer(
    name="infini",
    help="From text to a trained Infini-Llama: each stage retried, reused and resumed by itself.",
    pretty_exceptions_enable=False,
    add_completion=False,
)


class _LastLine(logging.Filter):
    """Leaves why the flow ended to the last line of the command.

    A filter of the loggers: Prefect replaces their handlers whenever it sets up logging.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not hasattr(record, "is_reason") and not record.getMessage().startswith(INTERRUPTED)


def _run_flow(name: str, config: Config) -> Any:
    from flows.serving.connection import prefect_api
    from infini_model.training.launch.devices import choose_gpus

    choose_gpus(config.launch.gpus)
    with prefect_api(config) as wait_until_up:
        from prefect.exceptions import Abort, Pause

        from flows.parameters import parameters_of

        flow = getattr(importlib.import_module(f"flows.{name}"), name)
        for logger in map(logging.getLogger, ("prefect.flow_runs", "prefect.task_runs")):
            logger.setLevel(config.run.log_level.upper())
            logger.addFilter(_LastLine())
        # That it still has events to send is said at the very end, after what matters.
        logging.getLogger("EventsWorker").setLevel(logging.ERROR)
        wait_until_up()
        try:
            return flow(**parameters_of(config, flow))
        except KeyboardInterrupt:
            with contextlib.suppress(OSError):  # The terminal may have been closed.
                typer.echo("interrupted; the same command resumes where this one stopped", err=True)
            raise
        except (Abort, Pause) as end:
            typer.echo("ended from the Prefect UI; the same command resumes", err=True)
            raise typer.Exit(1) from end


@app.command()
@configured
def run(config: Config) -> None:
    """Download, shard, train and evaluate; stages whose result stands are reused."""
    report = _run_flow("pipeline", config)
    typer.echo(f"Report: {report['report']}")


@app.command()
@configured
def preprocess(config: Config) -> None:
    """Download the documents and make the dataset folder, if it does not stand already."""
    typer.echo(f"Dataset: {_run_flow('preprocess', config)['folder']}")


@app.command()
@configured
def train(config: Config) -> None:
    """Train on a finished dataset (the newest, or --data-dir), or go on with a training."""
    typer.echo(f"Run: {_run_flow('train', config)['run_dir']}")


@app.command()
@configured
def evaluate(config: Config) -> None:
    """Score the run of run.name, or the newest one, and write its report."""
    report = _run_flow("evaluate", config)
    typer.echo(f"Report: {report['report']}")


OutputDir = Annotated[
    Path | None, typer.Option(help="Folder for datasets, runs and records. [outputs]")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")]


def _places(output_dir: Path | None) -> Config:
    """The configuration of a command that only needs to know where runs are."""
    places = {} if output_dir is None else {"run": {"output_dir": str(output_dir)}}
    return load_config(overrides=[places])


@app.command()
def runs(output_dir: OutputDir = None) -> None:
    """List the runs: step, state, losses, and their pages in Prefect and MLflow."""
    from flows import manage

    manage.show_runs(_places(output_dir))


@app.command()
def resume(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [KEY=VALUE]...",
            help="Name or folder of a run (the default is the newest interrupted one), and "
            "overrides that do not decide the weights, such as launch.gpus=0.",
        ),
    ] = None,
    output_dir: OutputDir = None,
) -> None:
    """Continue an interrupted run with its own settings, whoever started it; then evaluate it."""
    from flows import manage

    run_dir, config = manage.to_resume(_places(output_dir).run.output_dir, arguments or [])
    if config is None:
        typer.echo(f"{run_dir} is finished; nothing is left to do")
        return
    typer.echo(f"Resuming {run_dir}")
    report = _run_flow("pipeline", config)
    typer.echo(f"Report: {report['report']}")


@app.command()
def cancel(run: RunArgument, output_dir: OutputDir = None) -> None:
    """End a run after a checkpoint, whoever started it; infini resume continues it."""
    from flows import manage

    run_dir = manage.find_run_folder(_places(output_dir).run.output_dir, run)
    typer.echo(f"Cancelled {run_dir.name}; {manage.cancel(run_dir)}")


@app.command()
def logs(
    run: Annotated[
        str | None, typer.Argument(help="Name or folder of a run; the default is the newest.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Print the logs of a run's processes."""
    from flows import manage

    run_dir = manage.find_run_folder(_places(output_dir).run.output_dir, run)
    try:
        manage.print_logs(run_dir, follow=follow)
    except BrokenPipeError:
        # As `| head` leaves it; what Python flushes at exit goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
@configured
def serve(
    config: Config,
    port: Annotated[
        int, typer.Option(help="Port of Prefect's API and UI.", min=1, max=65535)
    ] = 4200,
    mlflow_port: Annotated[
        int, typer.Option(help="Port of MLflow's page.", min=1, max=65535)
    ] = 5000,
    auth: Annotated[
        bool | None,
        typer.Option(
            "--auth/--no-auth",
            help="Whether both servers ask for a generated secret. [as the last time]",
        ),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(
            help="Prefect's database, postgresql+asyncpg://USER@HOST:PORT/NAME; a password is "
            "better kept in INFINI_DATABASE or ~/.pgpass. [a SQLite file in the output folder]",
            envvar="INFINI_DATABASE",
            show_envvar=False,
        ),
    ] = None,
) -> None:
    """Keep the Prefect UI, MLflow, a worker and the deployments up until Ctrl-C."""
    from flows.serving import serve as serving

    serving.serve(config, serving.Options(port, mlflow_port, auth, database))


@app.command()
def deploy(
    reset: Annotated[
        bool, typer.Option("--reset", help="Undo what was edited on the server.")
    ] = False,
    output_dir: OutputDir = None,
) -> None:
    """Create or update the work pool, deployments and automations on the Prefect server."""
    from flows.serving import deploy as deployment
    from flows.serving.connection import prefect_api

    with prefect_api(_places(output_dir)) as wait_until_up:
        wait_until_up()
        deployment.deploy(os.environ["PREFECT_API_URL"], reset=reset)
    typer.echo("Deployed.")


@app.command()
@configured
def generate(
    config: Config,
    prompt: Annotated[str | None, typer.Option(help="Text to go on with.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File that holds it, - is stdin; only what is new is printed."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Run, checkpoint or Hugging Face folder; the default is the newest run."),
    ] = None,
) -> None:
    """Continue a prompt of any length, printed as it is drawn."""
    text = _read_prompt(prompt, prompt_file)

    from infini_model.evaluation.prompt import continue_text

    pieces = continue_text(config, checkpoint, text)
    typer.echo(prompt or "", nl=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The text of `--prompt` or `--prompt-file`. Raises `UserError` in one line."""
    if (prompt is None) == (file is None):
        raise UserError("give --prompt or --prompt-file, one of the two")
    try:
        if file is None:
            # What the shell passes on need not be UTF-8.
            data = os.fsencode(prompt or "")
        else:
            data = sys.stdin.buffer.read() if file == Path("-") else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file or '--prompt'}: is not UTF-8 text") from error


@app.command()
@configured
def doctor(config: Config) -> None:
    """Tell what this machine has, and what to do about each thing wrong; status 1 if one is."""
    from rich.console import Console
    from rich.table import Table

    from flows.doctor import examine

    findings = examine(config)
    table = Table("", "Found", "What to do")
    for finding in findings:
        table.add_row(finding.subject, finding.found, finding.remedy)
    Console().print(table)
    if any(finding.remedy for finding in findings):
        raise typer.Exit(1)


def _interrupt(_signal: int, _frame: object) -> None:
    """End on SIGTERM and SIGHUP as on Ctrl-C: children first, a training with a checkpoint."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; every foreseeable mistake ends in one line and status 2."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except TyperException as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except MENDABLE as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except FORESEEN as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
