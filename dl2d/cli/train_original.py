"""``dl2d train --design original``: DL2 as its paper has it (docs/dl2-original.md)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dl2d.cli.output import print_json
from dl2d.learning.original.settings import Settings
from dl2d.learning.original.trainer import Report
from dl2d.learning.original.trainer import train as learn
from dl2d.simulation.workload import Workload


def train_original(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    *,
    out: Path,
    iterations: int,
    seed: int,
    minutes: float | None,
    as_json: bool,
) -> None:
    """Train, showing how far it is, and write the best checkpoint by validation to ``out``/checkpoint."""
    began = time.monotonic()
    settings = replace(Settings(), iterations=iterations)
    folder = out / "checkpoint"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as display:
            bar = display.add_task("imitation", total=None, note="")

            def show(report: Report) -> None:
                note = f"JCT {report.score.best:.3f}, best {report.best:.3f}"
                display.update(bar, description=report.phase, completed=report.done, total=report.total, note=note)

            checkpoint = learn(
                workloads, validation, settings, seed=seed, out=folder, progress=show,
                stop=lambda: minutes is not None and time.monotonic() - began > 60 * minutes,
            )  # fmt: skip
    except KeyboardInterrupt:
        there = f"the best so far is in {folder}" if folder.is_dir() else "nothing was written yet"
        typer.echo(f"stopped: {there}", err=True)
        raise typer.Exit(130) from None
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        print_json({"checkpoint": str(folder), "digest": checkpoint.digest, "seconds": seconds, **checkpoint.training})
        return
    best = min((entry for entry in checkpoint.training["history"]), key=_of_entry)
    typer.echo(
        f"{folder}: {checkpoint.digest[:12]}, after {seconds:.0f} s; "
        f"mean completion time in validation {_of_entry(best):.3f} slots"
    )


def _of_entry(entry: dict[str, float]) -> float:
    return min(entry.get("greedy", float("inf")), entry.get("sampled", float("inf")))
