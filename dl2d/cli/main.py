"""Entry point ``dl2d``: the table of commands, each imported when it is run, and exit statuses from errors.

Exit status: 0 done, 1 failed, 2 used wrongly (a bad option, configuration or request).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dl2d import __version__
from dl2d.cli.optional_packages import missing_extra
from dl2d.core.errors import ConfigError, Dl2dError, PluginError, RequestError, WorkloadError

_LINE_ENDS = "\n\t"
_JOBS, _ADMIN, _RESEARCH = "Jobs", "Administration", "Research"
#: By command: its module in ``dl2d.cli``, the function or ``typer.Typer`` in there, and its heading and line of
#: the help. The line stands here, so that ``dl2d --help`` need not import numpy, SQL or HTTP for the commands.
COMMANDS = {
    "submit": ("jobs.submit", "submit", _JOBS, "Submit a job to the daemon, or with sbatch on a Slurm cluster."),
    "pack": ("jobs.pack_environment", "pack", _JOBS, "Pack a virtual environment for the containers of a job on YARN."),
    "cancel": ("jobs.submit", "cancel", _JOBS, "End a job and everything that runs for it."),
    "status": ("jobs.status", "status", _JOBS, "Show jobs: allocation, progress, and what each one waits for."),
    "why": ("jobs.why", "why", _JOBS, "Say why a job has what it has, and what limits it."),
    "history": ("jobs.history", "history", _JOBS, "Show what was done: slots, resizes and their steps, modes, plans."),
    "report": ("jobs.usage_report", "report", _JOBS, "Say what a job used: CPU-hours and GPU-hours of all its tasks."),
    "simulate": ("simulate", "simulate", _RESEARCH, "Replay a workload under several policies and compare them."),
    "train": ("train.train", "app", _RESEARCH, "Train a learned policy and write a checkpoint."),
    "experiment": ("experiment", "app", _RESEARCH, "Compare policies over workloads and seeds in a report."),
    "demo": ("demo.demo", "demo", _ADMIN, "Train three real jobs on this machine and resize them meanwhile."),
    "run": ("run_daemon", "run", _ADMIN, "Run the daemon until SIGTERM; SIGHUP reads the configuration again."),
    "check": ("check.check", "check", _ADMIN, "Check the configuration, what it names, and job files."),
    "config": (
        "config_and_systemd_unit", "config", _ADMIN, "Print the sample configuration with every key explained."
    ),
    "unit": ("config_and_systemd_unit", "unit", _ADMIN, "Print the systemd unit of this installation."),
    "db": ("db", "app", _ADMIN, "Upgrade the database's schema, let others read it, or export it."),
    "shadow": ("shadow", "shadow", _ADMIN, "Compare decisions of mode shadow with what the scheduler gave."),
    "sql": ("sql", "sql", _ADMIN, "Query the database, read-only."),
    "policy": ("policy", "app", _ADMIN, "List policies; promote a version of a learned one, or roll it back."),
}  # fmt: skip


class _Commands(TyperGroup):
    """Imports a command's module when the command is run or its own help is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """See ``TyperGroup``."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        """The line of the help; ``resolve_command`` loads the command itself."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][-1])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Commands under the heading of who needs them."""
        del ctx
        for heading in (_JOBS, _ADMIN, _RESEARCH):
            with formatter.section(heading):
                formatter.write_dl([(name, line) for name, (*_, under, line) in COMMANDS.items() if under == heading])

    def resolve_command(
        self, ctx: Any, args: list[str]
    ) -> tuple[str | None, TyperCommand | TyperGroup | None, list[str]]:
        """See ``TyperGroup``."""
        self.commands = {name: TyperCommand(name) for name in COMMANDS}  # what a mistyped name is compared with
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load(name), rest


def load(name: str) -> TyperCommand | TyperGroup:
    """Import a command."""
    module, attribute, *_ = COMMANDS[name]
    found = getattr(import_module(f"dl2d.cli.{module}"), attribute)
    holder = typer.Typer(rich_markup_mode=None)
    holder.callback()(lambda: None)  # a group even of one command
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    group = get_command(holder)
    assert isinstance(group, TyperGroup)
    command = group.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


app = typer.Typer(
    name="dl2d",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: importing rich would take two thirds of the time of `dl2d --help`
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
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
    from dl2d.cli.logging import log_warnings_only  # noqa: PLC0415 - structlog takes longer than all of the help

    del version
    log_warnings_only()


def run(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; ``arguments`` default to the process's own."""
    try:
        app(arguments, prog_name="dl2d")
    except (ConfigError, RequestError, PluginError, WorkloadError) as error:
        _fail(error, 2)
    except Dl2dError as error:
        _fail(error, 1)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _fail(missing, 1)


def _fail(error: Dl2dError, status: int) -> None:
    from pslite.job.printable_text import printable  # noqa: PLC0415 - only an error needs it

    print(f"dl2d: {printable(str(error), keep=_LINE_ENDS)}", file=sys.stderr)  # noqa: T201
    sys.exit(status)
