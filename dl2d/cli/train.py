"""``dl2d train``: weights for the learned policy, from simulated workloads."""

from __future__ import annotations

import enum
import glob
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dl2d import __version__
from dl2d.cli.extras import require_extra
from dl2d.cli.options import ConfigOption, JsonOption
from dl2d.cli.output import print_json, print_tables, table
from dl2d.cli.train_supervised import Teacher, supervised
from dl2d.config.settings import DEFAULT_PATH
from dl2d.core.errors import WorkloadError
from dl2d.learning.baselines import baselines
from dl2d.learning.report import write_report
from dl2d.learning.training import State, Trainer, TrainingSettings, load_state, save_state
from dl2d.policies.checkpoint import write_checkpoint
from dl2d.simulation.sources import is_drawn, load_source, source_forms
from dl2d.simulation.workload import Workload

_STOPPED: Final = 130  # as a shell has it for Ctrl-C
#: Seeds of what is drawn for validation begin here.
_HELD_OUT: Final = 1_000_000


class Design(enum.StrEnum):
    """What is trained."""

    JUMPS = "jumps"
    #: The DL2 paper's own (docs/dl2-original.md).
    ORIGINAL = "original"


app = typer.Typer(invoke_without_command=True)
app.command()(supervised)


@app.callback()
def train(
    context: typer.Context,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload", "-w", help=f"To train on; may be repeated. {source_forms()}, or a pattern of files."
        ),
    ] = None,
    validate: Annotated[
        list[str] | None,
        typer.Option(help="To choose the best weights by. Default: a fifth of the files, other draws of generators."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of checkpoint, report and state.")] = Path("dl2-out"),
    design: Annotated[Design, typer.Option(help="What is trained.")] = Design.JUMPS,
    iterations: Annotated[int, typer.Option(min=0, help="Iterations of the search.")] = 150,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same weights.")] = 0,
    hidden: Annotated[int, typer.Option(min=0, max=256, help="Hidden units of the scorer; 0: it is linear.")] = 0,
    draws: Annotated[int, typer.Option(min=2, help="Workloads drawn from each generator.")] = 32,
    teacher: Annotated[
        Teacher | None, typer.Option(help="Of --design original: the policy to imitate first; drf by default.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Of --design original: a checkpoint to begin with instead, as of dl2d train supervised."),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Of --design original: learn on an analytical model of speeds (the paper's OfflineRL)."
        ),
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop early after so many minutes.")] = None,
    compare: Annotated[bool, typer.Option(help="Replay baselines on the validation workloads, too.")] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")] = False,
    twin: Annotated[bool, typer.Option("--twin", help="Train on a simulator of this site.")] = False,
    days: Annotated[int | None, typer.Option(min=2, help="With --twin: how many of the last days count.")] = None,
    gate: Annotated[bool, typer.Option("--gate", help="With --twin: have it go live if it is surely better.")] = False,
    store: Annotated[str, typer.Option(help="With --twin: URL of a store, instead of a configuration.")] = "",
    config: ConfigOption = DEFAULT_PATH,
    as_json: JsonOption = False,
) -> None:
    """Train the policy dl2 from simulated workloads and write a checkpoint, or do what a command says.

    With --twin, the weights that decide now are trained further on what this site's store recorded. Exit status 130
    after Ctrl-C; what was reached is kept and --resume goes on with it.
    """
    if context.invoked_subcommand is not None:
        return
    require_extra("train")
    if twin:
        if workload:
            raise typer.BadParameter("the twin's workloads are made from the store; leave this out", param_hint="-w")
        from dl2d.cli.train_twin import site_of, train_twin  # noqa: PLC0415 - what reads stores takes half a second

        train_twin(
            site_of(config, store), out=out, iterations=iterations, days=days, minutes=minutes, seed=seed, gate=gate,
            as_json=as_json,
        )  # fmt: skip
        return
    if not workload:
        raise typer.BadParameter("name one or more workloads to train on", param_hint="--workload")
    began = time.monotonic()
    settings = TrainingSettings(seed=seed, iterations=iterations, hidden=hidden)
    train_on, look_at = inputs_of(workload, validate or [], seed, draws)
    if design is Design.ORIGINAL:
        from dl2d.cli.train_original import train_original  # noqa: PLC0415 - torch takes seconds, and is for this alone

        train_original(
            train_on, look_at, out=out, iterations=iterations, seed=seed, minutes=minutes, teacher=teacher,
            start=start, offline=offline, compare=compare, resume=resume, as_json=as_json,
        )  # fmt: skip
        return
    if teacher is not None or start is not None or offline:
        raise typer.BadParameter("--teacher, --start and --offline are of --design original")
    trainer = Trainer(train_on, look_at, settings)
    inputs = hashlib.sha256(repr((train_on, look_at)).encode()).hexdigest()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    others: dict[str, tuple[float, ...]] = {}
    stopped = ""
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as display:
            if compare:
                bar = display.add_task("baselines", total=None, note="")
                others = baselines(
                    trainer.validation, lambda done, all_: display.update(bar, completed=done, total=all_)
                )
            if resume:
                state = load_state(settings, inputs, out)
            else:
                exploring = display.add_task("measuring speeds", total=settings.rounds, note="")
                state = trainer.explore(lambda done, _: display.update(exploring, completed=done))
                display.update(exploring, completed=settings.rounds)
                save_state(state, settings, inputs, out)
            searching = display.add_task("searching", total=iterations, note=_note(state, others))
            display.update(searching, completed=state.search.iteration)
            for reached in trainer.search(state):
                state = reached
                save_state(state, settings, inputs, out)
                display.update(searching, completed=state.search.iteration, note=_note(state, others))
                if minutes is not None and time.monotonic() - began > 60 * minutes:
                    stopped = f"stopped early after {minutes:g} minutes, at iteration {state.search.iteration}"
                    break
    except KeyboardInterrupt:
        typer.echo(f"stopped: the same command with --resume goes on with the last state saved in {out}", err=True)
        raise typer.Exit(_STOPPED) from None
    seconds = time.monotonic() - began
    best = state.best_look
    record = {
        "dl2d": __version__, "workloads": workload, "validation": validate or [], "draws": draws, "seed": seed,
        "iterations": state.search.iteration, "best_iteration": best.iteration, "seconds": round(seconds, 1),
        "parts": list(settings.parts), "validation_jct_slots": list(best.jct),
        "baselines_jct_slots": {name: list(values) for name, values in others.items()},
        "curve": [asdict(look) for look in state.looks],
    }  # fmt: skip
    checkpoint = trainer.checkpoint(state, record)
    write_checkpoint(checkpoint, out / "checkpoint")
    write_report(out, state, settings, others, inputs=workload, seconds=seconds)
    if stopped:
        typer.echo(f"{stopped}; --resume goes on", err=True)
    if as_json:
        print_json({"checkpoint": str(out / "checkpoint"), "digest": checkpoint.digest, **record})
        return
    rows = [
        (f"{part:.3g}", f"{own:.3f}", *(f"{own / values[number] - 1:+.1%}" for values in others.values()))
        for number, (part, own) in enumerate(zip(settings.parts, best.jct, strict=True))
    ]
    print_tables(table((">NODES", ">JCT", *(f">vs {name}" for name in others)), rows))
    typer.echo(f"{out / 'checkpoint'}: {checkpoint.digest[:12]}, after {seconds:.0f} s; report in {out / 'report.md'}")


def inputs_of(
    given: Sequence[str], validate: Sequence[str], seed: int, draws: int
) -> tuple[list[Workload], list[Workload]]:
    """What to train on and what to look at, from what the user named."""
    held_out = max(draws // 4, 1)
    train_on: list[Workload] = []
    from_files: list[Workload] = []
    look_at = [one for source in validate for one in _load(source, seed + _HELD_OUT, held_out)]
    for source in given:
        generated = is_drawn(source)
        (train_on if generated else from_files).extend(_load(source, seed * 10_000, draws))
        if generated and not validate:
            look_at += _load(source, seed + _HELD_OUT, held_out)
    if validate:
        return train_on + from_files, look_at
    if len(from_files) == 1 and not train_on:
        return from_files, from_files
    kept = len(from_files) - len(from_files) // 5
    return train_on + from_files[:kept], look_at + from_files[kept:]


def _load(source: str, seed: int, draws: int) -> list[Workload]:
    if is_drawn(source):
        return [load_source(source, seed=seed + number).workload for number in range(draws)]
    files = sorted(glob.glob(source)) if glob.has_magic(source) else [source]  # noqa: PTH207 - patterns may be absolute
    if not files:
        raise WorkloadError("", "no file has such a name", where=source)
    return [load_source(file, seed=seed).workload for file in files]


def _note(state: State, others: dict[str, tuple[float, ...]]) -> str:
    """Validation results next to those of others, mean over the parts, in slots."""
    mean = sum(state.best_look.jct) / len(state.best_look.jct)
    rest = (f"{name} {sum(values) / len(values):.2f}" for name, values in others.items())
    return ", ".join((f"JCT {mean:.3f}", *rest))
