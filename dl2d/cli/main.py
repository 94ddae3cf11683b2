"""``dl2d``: the commands, one module each; this one puts them together and turns errors into exit statuses.

Exit status: 0 done, 1 failed, 2 used wrongly (a bad option, configuration or request).
"""

from __future__ import annotations

import sys

import typer

from dl2d.cli import db, serve
from dl2d.core.errors import ConfigError, Dl2dError, PluginError, RequestError

app = typer.Typer(
    name="dl2d",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Sizes elastic deep-learning jobs on a cluster and resizes them while they train.",
)
app.command("run")(serve.run)
app.add_typer(db.app, name="db")


def run() -> None:
    """Entry point of the console script."""
    try:
        app()
    except (ConfigError, RequestError, PluginError) as error:
        print(f"dl2d: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Dl2dError as error:
        print(f"dl2d: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
