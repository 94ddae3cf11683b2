"""``dl2d``: the commands, one module each; this one puts them together and turns errors into exit statuses.

Exit status: 0 done, 1 failed, 2 used wrongly (a bad option, configuration or request).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dl2d import __version__
from dl2d.cli import check as checking
from dl2d.cli import configuration, db, history, policy, serve, simulate, status, submit, unit, why
from dl2d.cli.demo.command import demo
from dl2d.cli.logging import log_warnings_only
from dl2d.core.errors import ConfigError, Dl2dError, PluginError, RequestError, WorkloadError

app = typer.Typer(
    name="dl2d",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Sizes elastic deep-learning jobs on a cluster and resizes them while they train.",
)
_JOBS, _ADMIN, _RESEARCH = "Jobs", "Administration", "Research"
app.command("submit", rich_help_panel=_JOBS)(submit.submit)
app.command("cancel", rich_help_panel=_JOBS)(submit.cancel)
app.command("status", rich_help_panel=_JOBS)(status.status)
app.command("why", rich_help_panel=_JOBS)(why.why)
app.command("history", rich_help_panel=_JOBS)(history.history)
app.command("simulate", rich_help_panel=_RESEARCH)(simulate.simulate)
app.command("demo", rich_help_panel=_ADMIN)(demo)
app.command("run", rich_help_panel=_ADMIN)(serve.run)
app.command("check", rich_help_panel=_ADMIN)(checking.check)
app.command("config", rich_help_panel=_ADMIN)(configuration.config)
app.command("unit", rich_help_panel=_ADMIN)(unit.unit)
app.add_typer(db.app, name="db", rich_help_panel=_ADMIN)
app.add_typer(policy.app, name="policy", rich_help_panel=_ADMIN)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        typer.echo(f"dl2d {__version__}")
        raise typer.Exit


@app.callback()
def dl2d(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Sizes elastic deep-learning jobs on a cluster and resizes them while they train."""
    del version
    log_warnings_only()


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ``arguments`` default to the process's own."""
    try:
        app(arguments, prog_name="dl2d")
    except (ConfigError, RequestError, PluginError, WorkloadError) as error:
        print(f"dl2d: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Dl2dError as error:
        print(f"dl2d: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
