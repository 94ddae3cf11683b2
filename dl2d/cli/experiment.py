"""``dl2d experiment``: comparisons of policies over workloads and seeds, in parallel, with a report."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.output import print_json, print_tables, table
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.shared_options import JsonOption, option
from dl2d.core.errors import RequestError
from dl2d.experiments.definition import (
    Experiment,
    builtin_names,
    describe_experiment,
    digest,
    find_experiment,
    parse_seeds,
    write_experiment,
)
from dl2d.experiments.local_and_ray_executors import Executor, LocalProcesses, Ray
from dl2d.experiments.report import summary_json, write_report
from dl2d.experiments.run_experiment import Run, begin_run, check_experiment, read_run, run_cells
from dl2d.experiments.run_simulation import Finished
from dl2d.experiments.tables_of_results import summarise
from dl2d.experiments.variants_of_definition import Scale, at_scale, changed, names_kinds, on_files, on_kinds
from dl2d.simulation.workload.workload_source_by_name import matching_files

app = typer.Typer(no_args_is_help=True, help="Compares policies over workloads and seeds, and writes a report.")

_SHORT_DIGEST = 12
ExperimentArgument = Annotated[
    str, typer.Argument(metavar="NAME|FILE", help="A built-in experiment (see `list`), or a definition in YAML.")
]


class ExecutorName(enum.StrEnum):
    """Where simulations are run."""

    LOCAL = "local"
    RAY = "ray"


@app.command("run")
def run(
    name: ExperimentArgument,
    out: Annotated[Path | None, option("Folder of the results. Default: experiment-out/NAME.", "--out", "-o")] = None,
    jobs: Annotated[int | None, option("Processes. Default: one per CPU.", "--jobs", "-j", min=1, max=1024)] = None,
    seeds: Annotated[str | None, option("Other seeds: how many (5 means 0 to 4), or a list such as 0,3,7.")] = None,
    policy: Annotated[list[str] | None, option("Other policies; may be repeated.", "--policy", "-p")] = None,
    workload: Annotated[
        list[str] | None,
        option(
            "Other workloads than the definition's: files or patterns of files; may be repeated. Some are tested "
            "on, others learned from and chosen by.",
            "--workload",
            "-w",
        ),
    ] = None,
    kinds: Annotated[
        Path | None,
        option(
            "A workload file with your speeds and one job of each kind, for experiments that draw from it.",
            "--kinds",
            "-k",
            metavar="FILE",
        ),
    ] = None,
    scale: Annotated[
        Scale, option("quick: a shorter version that takes some minutes; not every experiment has one.")
    ] = Scale.FULL,
    executor: Annotated[
        ExecutorName, option("local: processes here; ray: a Ray cluster (RAY_ADDRESS).")
    ] = ExecutorName.LOCAL,
    resume: Annotated[bool, option("Go on with the folder's run: only what is missing.", "--resume")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment and write its report.

    Exit status 1 if a simulation failed, 130 after Ctrl-C; what is finished is kept either way.
    """
    if jobs is not None and executor is ExecutorName.RAY:
        raise typer.BadParameter("--jobs cannot be used with --executor ray: Ray has its own processes")
    found = at_scale(find_experiment(name), scale)
    if workload:
        found = on_files(found, _files(workload))
    if kinds is not None:
        found = on_kinds(found, str(kinds.resolve()))
    elif not names_kinds(found):
        problem = f"{found.name} draws jobs from a workload file of yours; give it with --kinds FILE"
        raise RequestError("--kinds", problem)
    experiment = changed(found, policies=policy or (), seeds=_seeds(seeds))
    folder = out or Path("experiment-out") / experiment.name
    runs_on: Executor = Ray() if executor is ExecutorName.RAY else LocalProcesses(jobs or os.cpu_count() or 1)
    for note in check_experiment(experiment):
        typer.echo(note, err=True)
    begun = begin_run(experiment, folder, resume=resume)
    with interruptible(lambda: _left(folder)):
        done = _run_watched(begun, runs_on)
    _tell(done, as_json=as_json)


@app.command("report")
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, finished or not.")],
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run once more, from what is finished."""
    _tell(read_run(folder), as_json=as_json)


@app.command("list")
def list_experiments(as_json: JsonOption = False) -> None:
    """List the built-in experiments."""
    found = [find_experiment(name) for name in builtin_names()]
    if as_json:
        print_json([{**_head(each), "description": each.description} for each in found])
        return
    rows = [
        (
            each.name, each.version, digest(each)[:_SHORT_DIGEST], str(len(each.cases)), str(len(each.policies)),
            str(len(each.seeds)), _minutes(each), each.description,
        )
        for each in found
    ]  # fmt: skip
    headings = ("NAME", ">VERSION", "DIGEST", ">WORKLOADS", ">POLICIES", ">SEEDS", ">MINUTES", "DESCRIPTION")
    print_tables(table(headings, rows))


@app.command("show")
def show(name: ExperimentArgument, as_json: JsonOption = False) -> None:
    """Print a definition in full, defaults included: a file of one's own may start from it."""
    experiment = find_experiment(name)
    if as_json:
        print_json({**_head(experiment), **describe_experiment(experiment)})
        return
    typer.echo(f"# digest {digest(experiment)}\n{write_experiment(experiment)}", nl=False)


def _minutes(experiment: Experiment) -> str:
    """Expected on two idle cores: at scale quick, where there is one, and full."""
    quick = experiment.quick.minutes if experiment.quick is not None else None
    return " / ".join(f"{minutes:g}" for minutes in (quick, experiment.minutes) if minutes is not None) or "-"


def _head(experiment: Experiment) -> dict[str, object]:
    return {"name": experiment.name, "version": experiment.version, "digest": digest(experiment)}


def _files(given: Sequence[str]) -> list[str]:
    files = [str(Path(file).resolve()) for pattern in given for file in matching_files(pattern)]
    return list(dict.fromkeys(files))


def _seeds(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    # More than 19 digits are beyond any seed, and thousands of them beyond what may be turned into a number.
    parts = [part.strip() for part in text.split(",")]
    plain = all(part.isascii() and part.isdecimal() and len(part) < 20 for part in parts)
    value: object = text if not plain else int(parts[0]) if len(parts) == 1 else [int(part) for part in parts]
    return parse_seeds(value, lambda problem: RequestError("--seeds", problem))


def _left(folder: Path) -> str:
    """What a run that was stopped leaves."""
    left = read_run(folder)
    finished = f"{len(left.cells) - len(left.missing)} of {len(left.cells)} simulations are finished"
    return f"{finished} and kept in {folder}; to continue, run the same command with --resume"


def _run_watched(begun: Run, runs_on: Executor) -> Run:
    missing = len(begun.missing) + len(begun.unprepared)
    finished: list[Finished] = []
    with shown_progress() as tell:

        def show_progress(done: Finished) -> None:
            finished.append(done)
            failed = sum(bool(each.error) for each in finished)
            tell(begun.experiment.name, len(finished), missing, f"{failed} failed" if failed else "")

        return run_cells(begun, runs_on, progress=show_progress)


def _tell(run: Run, *, as_json: bool) -> None:
    markdown, html = write_report(run)
    if as_json:
        print_json(summary_json(run))
    else:
        rows = [
            (
                case.case.name if place == 0 else "", each.policy, f"{each.jct.mean:.3f}",
                "-" if each.jct.half_width is None else f"{each.jct.half_width:.3f}",
                "-" if each.change is None else f"{each.change.mean:+.1%}",
                f"{each.above_bound.mean:.1%}", f"{each.makespan.mean:.2f}", str(each.jct.count),
            )
            for case in summarise(run)
            for place, each in enumerate(case.policies)
        ]  # fmt: skip
        change = f">VS {run.experiment.baseline.upper()}"
        headings = ("WORKLOAD", "POLICY", ">AVG JCT", ">95% +-", change, ">ABOVE BOUND", ">MAKESPAN", ">SEEDS")
        print_tables(table(headings, rows))
        typer.echo(f"\n{markdown}\n{html}")
    for done in run.failures:
        typer.echo(f"failed: {done.case}, {done.policy}, seed {done.seed}: {done.error}", err=True)
    if run.missing:
        typer.echo(f"{len(run.missing)} of {len(run.cells)} simulations have no result", err=True)
        raise typer.Exit(1)
