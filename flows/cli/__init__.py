"""The `infini` command.

Most subcommands read one configuration (`flows.cli.options`) and run one flow. A user's mistake is
reported in one line on stderr with exit status 2; Ctrl-C exits with 130. Prefect and torch are
imported only by the commands that need them, after the configuration has been checked.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer
from typer._click import Context, HelpFormatter
from typer._click.exceptions import NoSuchOption
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from flows.cli.machine import deploy, doctor, serve, settings
from flows.cli.models import api, chat, export, generate
from flows.cli.options import UNDERSCORES, unknown
from flows.cli.runs import branch, cancel, clean, logs, resume, runs, verify
from flows.cli.training import compare, evaluate, preprocess, run, show, train
from infini_model.runtime.errors import StageError, UserError, describe_error

# The commands, in the order of `infini --help`, by what they are for.
PARTS = {
    "Train": (run, preprocess, show, train, evaluate, compare),
    "Use a model": (generate, chat, api, export),
    "Runs and datasets": (runs, resume, branch, cancel, logs, verify, clean),
    "Servers": (serve, deploy),
    "Settings and checks": (settings, doctor),
}


class _Parts(TyperGroup):
    """The commands, listed in parts."""

    def format_commands(self, _ctx: Context, formatter: HelpFormatter) -> None:
        """Write a list for each part."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for title, commands in PARTS.items():
            names = [command.__name__ for command in commands]
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
for _commands in PARTS.values():
    for _command in _commands:
        app.command()(_command)


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
