"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
