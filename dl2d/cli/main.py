"""``dl2d``: the commands, one module each; this one puts them together and turns errors into exit statuses.

Exit status: 0 done, 1 failed, 2 used wrongly (a bad option, configuration or request).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dl2d import __version__
from dl2d.cli.logging import log_warnings_only
from dl2d.core.errors import ConfigError, Dl2dError, PluginError, RequestError, WorkloadError

_JOBS, _ADMIN, _RESEARCH = "Jobs", "Administration", "Research"
#: By command: its module in ``dl2d.cli``, the function or the ``typer.Typer`` in there, and its panel of the help.
_COMMANDS: Final = MappingProxyType(
    {
        "submit": ("submit", "submit", _JOBS),
        "cancel": ("submit", "cancel", _JOBS),
        "status": ("status", "status", _JOBS),
        "why": ("why", "why", _JOBS),
        "history": ("history", "history", _JOBS),
        "simulate": ("simulate", "simulate", _RESEARCH),
        "train": ("train", "app", _RESEARCH),
        "experiment": ("experiment", "app", _RESEARCH),
        "demo": ("demo.command", "demo", _ADMIN),
        "run": ("serve", "run", _ADMIN),
        "check": ("check", "check", _ADMIN),
        "config": ("configuration", "config", _ADMIN),
        "unit": ("unit", "unit", _ADMIN),
        "db": ("db", "app", _ADMIN),
        "policy": ("policy", "app", _ADMIN),
    }
)


class _Commands(TyperGroup):
    """Imports a command's module when the command is asked for: no command waits for what only others need."""

    def list_commands(self, ctx: object) -> list[str]:
        """See ``TyperGroup``."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | TyperGroup | None:
        """See ``TyperGroup``."""
        del ctx
        # For an unknown one all are loaded: near ones are looked for among those that are.
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.commands[name] = _load(name)
        found = self.commands.get(cmd_name)
        return found if isinstance(found, TyperCommand | TyperGroup) else None


def _load(name: str) -> TyperCommand | TyperGroup:
    module, attribute, panel = _COMMANDS[name]
    found = getattr(import_module(f"dl2d.cli.{module}"), attribute)
    holder = typer.Typer()
    holder.callback()(lambda: None)  # a group even of one command
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name, rich_help_panel=panel)
    else:
        holder.command(name, rich_help_panel=panel)(found)
    group = get_command(holder)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


app = typer.Typer(
    name="dl2d",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Sizes elastic deep-learning jobs on a cluster and resizes them while they train.",
)


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
