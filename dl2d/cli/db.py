"""``dl2d db``: the database's schema."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dl2d.cli.options import ConfigOption, JsonOption
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.store import schema

app = typer.Typer(no_args_is_help=True, help="The database's schema.")


@app.command()
def upgrade(config: ConfigOption = DEFAULT_PATH) -> None:
    """Bring the schema up to date."""
    url = load_settings(config).store_url
    before = schema.current(url)
    schema.upgrade(url)
    after = schema.current(url)
    was = f"upgraded from revision {before}" if before else "created"
    typer.echo(f"schema is up to date: revision {after}" if before == after else f"schema {was}: revision {after}")


@app.command()
def current(config: ConfigOption = DEFAULT_PATH, as_json: JsonOption = False) -> None:
    """Print the schema's revision and the one that this version needs."""
    now, head = schema.current(load_settings(config).store_url), schema.head()
    if as_json:
        typer.echo(json.dumps({"current": now, "head": head}))
    else:
        found = f"the database's schema is at revision {now}" if now else "the database has no schema"
        typer.echo(f"{found}; this dl2d needs {head}" + ("" if now == head else ": run `dl2d db upgrade`"))


@app.command()
def grant(
    role: Annotated[str, typer.Argument(help="Role of PostgreSQL.")], config: ConfigOption = DEFAULT_PATH
) -> None:
    """Let a role of PostgreSQL read all views and tables, except the commands and environments of jobs."""
    schema.grant_reading(load_settings(config).store_url, role)
    typer.echo(f"{role} may read the views and tables; jobs.launch (commands and environments) is left out")
