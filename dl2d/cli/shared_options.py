"""Options that several commands share, and the store that they name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dl2d.config.settings import Settings

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        help="Configuration file.",
        envvar="DL2D_CONFIG",
        readable=False,  # some commands do without: they decide what to say
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id, name or cluster.id.submitted of a job.")]


def options_given(context: typer.Context) -> dict[str, str]:
    """The options of a command line, by parameter: their names, as ``--min-jobs`` of ``min_jobs``."""
    given: dict[str, str] = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given[name] = parameter.opts[0]
    return given


@contextlib.contextmanager
def reading(settings: Settings) -> Iterator[SqlStore]:
    """The store, opened without the lease and without a change of its schema, as beside a running daemon."""
    from dl2d.store.sql_store import SqlStore  # noqa: PLC0415 - half a second that commands without a store do not wait for

    with contextlib.closing(SqlStore(settings.store_url)) as store:
        yield store
