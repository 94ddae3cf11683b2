"""``dl2d train``: the command's options, and which of its three ways they apply to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.optional_packages import require_extra
from dl2d.cli.shared_options import JsonOption, option, options_given
from dl2d.cli.train.options_of_train_commands import (
    Design,
    TrainOptions,
    read_design,
    refuse_inapplicable,
    site_settings,
)
from dl2d.cli.train.train_supervised import supervised
from dl2d.learning.dl2_paper.settings import Teacher
from dl2d.learning.interrupted_training import DEFAULT_ITERATIONS
from dl2d.simulation.workload.workload_source_by_name import is_drawn, source_forms

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
        option(f"To train on; may be repeated: {source_forms()}, or a pattern of files.", "--workload", "-w"),
    ] = None,
    validate: Annotated[
        list[str] | None,
        option("To choose the best weights by. Default: a fifth of the files, other draws of generators."),
    ] = None,
    out: Annotated[Path, option("Folder of checkpoint, report and state.", "--out", "-o")] = Path("dl2-out"),
    design: Annotated[Design, option("The policy that is trained.", parser=read_design)] = Design.DL2,
    iterations: Annotated[int, option("Iterations of the search.", min=0)] = DEFAULT_ITERATIONS,
    seed: Annotated[int, option("Seed; the same seed gives the same weights.", min=0)] = 0,
    hidden: Annotated[
        int, option("With --design dl2: hidden units of the scorer; 0: it is linear.", min=0, max=256)
    ] = 0,
    draws: Annotated[int, option("Workloads drawn from each generator.", min=2)] = 32,
    teacher: Annotated[
        Teacher | None, option("With --design dl2-original: the policy to imitate first; drf by default.")
    ] = None,
    start: Annotated[
        Path | None,
        option(
            "With --design dl2-original: a checkpoint to begin with, such as one that `dl2d train supervised` wrote."
        ),
    ] = None,
    offline: Annotated[
        bool,
        option(
            "With --design dl2-original: learn on an analytical model of speeds (the paper's OfflineRL).", "--offline"
        ),
    ] = False,
    minutes: Annotated[float | None, option("Stop early after so many minutes.", min=0)] = None,
    compare: Annotated[
        bool,
        option("Also show the baselines' completion times on the validation workloads.", "--compare/--no-compare"),
    ] = True,
    resume: Annotated[bool, option("Go on with what is in the folder.", "--resume")] = False,
    twin: Annotated[
        bool,
        option("Train the policy of --design further, on a simulator of this site.", "--twin"),
    ] = False,
    days: Annotated[int | None, option("With --twin: how many of the last days count.", min=2)] = None,
    gate: Annotated[bool, option("With --twin: have it go live if it is surely better.", "--gate")] = False,
    store: Annotated[str | None, option("With --twin: URL of the store, instead of the configuration's.")] = None,
    config: Annotated[
        Path | None,
        option("With --twin: configuration; not needed with --store.", "--config", "-c", envvar="DL2D_CONFIG"),
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
