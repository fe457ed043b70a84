"""Commands of this machine: its servers and deployments, the settings, the doctor."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from flows.cli.options import OutputDir, config_at, configured
from flows.presets import Invocation
from infini_model.config import Config
from infini_model.runtime.errors import UserError


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

    with prefect_api(config_at(output_dir)) as wait_until_up:
        from flows.serving import deploy as deployment

        wait_until_up()
        deployment.deploy(os.environ["PREFECT_API_URL"], reset=reset)
    typer.echo("Deployed.")


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
