"""``dl2d train``: the command's options, and which of its three ways they apply to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.optional_packages import require_extra
from dl2d.cli.shared_options import JsonOption, options_given
from dl2d.cli.train.train_options import Design, TrainOptions, read_design, refuse_inapplicable, site_settings
from dl2d.cli.train.train_supervised import supervised
from dl2d.learning.dl2_paper.settings import Teacher
from dl2d.learning.interrupted_training import DEFAULT_ITERATIONS
from dl2d.simulation.workload.sources import is_drawn, source_forms

_PAPERS_OPTIONS = ("teacher", "start", "offline")
_TWINS_OPTIONS = ("days", "gate", "store", "config")
#: Options that have no meaning, by what is trained.
_INAPPLICABLE = {
    "--design dl2": (*_PAPERS_OPTIONS, *_TWINS_OPTIONS),
    "--design dl2-original": ("hidden", *_TWINS_OPTIONS),
    "--twin": (
        *("workload", "validate", "hidden", "draws", "compare", "resume"),
        *_PAPERS_OPTIONS,
    ),
}

app = typer.Typer(invoke_without_command=True)
app.command()(supervised)


@app.callback()
def train(
    context: typer.Context,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", "-w", help=f"To train on; may be repeated: {source_forms()}, or a pattern of files."
        ),
    ] = None,
    validate: Annotated[
        list[str] | None,
        typer.Option(help="To choose the best weights by. Default: a fifth of the files, other draws of generators."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of checkpoint, report and state.")] = Path("dl2-out"),
    design: Annotated[Design, typer.Option(parser=read_design, help="The policy that is trained.")] = Design.DL2,
    iterations: Annotated[int, typer.Option(min=0, help="Iterations of the search.")] = DEFAULT_ITERATIONS,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same weights.")] = 0,
    hidden: Annotated[
        int, typer.Option(min=0, max=256, help="With --design dl2: hidden units of the scorer; 0: it is linear.")
    ] = 0,
    draws: Annotated[int, typer.Option(min=2, help="Workloads drawn from each generator.")] = 32,
    teacher: Annotated[
        Teacher | None, typer.Option(help="With --design dl2-original: the policy to imitate first; drf by default.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="With --design dl2-original: a checkpoint to begin with, such as one that `dl2d train "
            "supervised` wrote."
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="With --design dl2-original: learn on an analytical model of speeds (the paper's OfflineRL).",
        ),
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop early after so many minutes.")] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Also show the baselines' completion times on the validation workloads."
        ),
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    twin: Annotated[
        bool,
        typer.Option("--twin", help="Train the policy of --design further, on a simulator of this site."),
    ] = False,
    days: Annotated[int | None, typer.Option(min=2, help="With --twin: how many of the last days count.")] = None,
    gate: Annotated[bool, typer.Option("--gate", help="With --twin: have it go live if it is surely better.")] = False,
    store: Annotated[
        str | None, typer.Option(help="With --twin: URL of the store, instead of the configuration's.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="With --twin: configuration; not needed with --store.", envvar="DL2D_CONFIG"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a policy from simulated workloads and write a checkpoint, or run one of the commands below.

    With --twin, the weights that decide now are trained further on what this site's store recorded; the paper's also on
    the slots that they decided. A policy that leaves jobs waiting on an idle cluster in replays is not written.
    Exit status 130 after Ctrl-C; what was reached is kept and --resume goes on with it.
    """
    given = options_given(context)
    if (command := context.invoked_subcommand) is not None:
        if given:
            problem = f"{', '.join(given.values())} before {command!r} would be ignored"
            raise typer.BadParameter(f"{problem}: write options after the command, `dl2d train {command} ...`")
        return
    way = "--twin" if twin else f"--design {design}"
    refuse_inapplicable(context, _INAPPLICABLE[way], way)
    if not twin and not workload:
        raise typer.BadParameter("give one or more workloads to train on", param_hint="--workload")
    if teacher is not None and start is not None:
        raise typer.BadParameter("--teacher and --start cannot be used together: training begins with one of them")
    if "draws" in given and not any(map(is_drawn, (*(workload or ()), *(validate or ())))):
        raise typer.BadParameter("--draws needs a generator: --workload or --validate generator:NAME")
    require_extra("train")
    options = TrainOptions(
        workload=tuple(workload or ()), validate=tuple(validate or ()), out=out, iterations=iterations, seed=seed,
        hidden=hidden, draws=draws, teacher=teacher, start=start, offline=offline, minutes=minutes, compare=compare,
        resume=resume, days=days, gate=gate, as_json=as_json,
    )  # fmt: skip
    # Imported where they are run: PyTorch takes seconds, what reads a store half a second.
    if twin:
        from dl2d.cli.train.train_in_digital_twin import train_twin  # noqa: PLC0415

        train_twin(site_settings(config, store), options, paper=design is Design.DL2_PAPER)
    elif design is Design.DL2_PAPER:
        from dl2d.cli.train.train_dl2_paper import train_dl2_paper  # noqa: PLC0415

        train_dl2_paper(options)
    else:
        from dl2d.cli.train.train_dl2 import train_dl2  # noqa: PLC0415

        train_dl2(options)
