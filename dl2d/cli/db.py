"""``dl2d db``: schema, readers and export of the database."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.output import console
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, load_settings
from dl2d.core.errors import SchemaOutdated
from dl2d.store import schema_version
from dl2d.store.connections_and_transactions import Database, StoreLocation
from dl2d.store.export import export as write_files

app = typer.Typer(no_args_is_help=True, help="Schema, readers and export of the database.")


@app.command()
def upgrade(config: ConfigOption = DEFAULT_PATH) -> None:
    """Bring the schema up to date."""
    url = load_settings(config).store_url
    before = schema_version.current(url)
    schema_version.upgrade(url)
    after = schema_version.current(url)
    was = f"upgraded from revision {before}" if before else "created"
    typer.echo(f"schema is up to date: revision {after}" if before == after else f"schema {was}: revision {after}")


@app.command()
def current(config: ConfigOption = DEFAULT_PATH, as_json: JsonOption = False) -> None:
    """Print the schema's revision and the one that this version needs."""
    now, head = schema_version.current(load_settings(config).store_url), schema_version.head()
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
    schema_version.grant_reading(load_settings(config).store_url, role)
    typer.echo(f"{role} may read the views and tables; jobs.launch (commands and environments) is left out")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder for the files: an empty one, or a new one, which is made.")],
    table: Annotated[list[str] | None, option("Only this table; may be given several times.")] = None,
    config: ConfigOption = DEFAULT_PATH,
    as_json: JsonOption = False,
) -> None:
    """Write the tables as CSV files, except the commands and environments of jobs; safe beside a running daemon."""
    place = StoreLocation.parse(load_settings(config).store_url)
    if place.is_missing():
        raise SchemaOutdated(f"there is no store at {place}")
    with closing(Database(place)) as database, console().status("exporting") as shown:
        rows = write_files(
            database, folder, table or (), done=lambda name, count: shown.update(f"{name}: {count} rows")
        )
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "rows": rows}))
    else:
        typer.echo(f"{sum(rows.values())} rows of {len(rows)} tables written to {folder}")
