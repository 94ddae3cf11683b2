"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(line: str, *names: str, **more: Any) -> Any:
    """An option with its line of the help; see ``typer.Option``."""
    return typer.Option(*names, help=line, **more)


ConfigOption = Annotated[
    Path,
    # Not checked to be readable: some commands do without, and decide what to say.
    option("Configuration file.", "--config", "-c", envvar="DL2D_CONFIG", readable=False),
]
JsonOption = Annotated[bool, option("Print JSON instead of text.", "--json")]
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
