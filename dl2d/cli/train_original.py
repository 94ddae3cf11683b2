"""``dl2d train --design original``: DL2 as its paper has it (docs/dl2-original.md)."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dl2d.cli.output import print_json
from dl2d.core.errors import CheckpointError
from dl2d.learning.baselines import baselines
from dl2d.learning.original.offline import analytical
from dl2d.learning.original.settings import NetworkKind, Settings
from dl2d.learning.original.trainer import Report
from dl2d.learning.original.trainer import train as learn
from dl2d.policies.checkpoint import Checkpoint, checkpoint_in, read_checkpoint
from dl2d.simulation.workload import Workload

_STATE: Final = "state.npz"
_STOPPED: Final = 130  # as a shell has it for Ctrl-C


def train_original(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    *,
    out: Path,
    iterations: int,
    seed: int,
    minutes: float | None,
    teacher: str | None,
    start: Path | None,
    offline: bool,
    compare: bool,
    resume: bool,
    as_json: bool,
) -> None:
    """Train, showing how far it is, and write the best checkpoint by validation to ``out``/checkpoint."""
    if teacher is not None and start is not None:
        raise typer.BadParameter("give one of --teacher and --start: either is what training begins with")
    began = time.monotonic()
    begun = None if start is None else read_checkpoint(checkpoint_in(start), policy="dl2-original")
    settings = _settings(iterations, teacher, begun)
    if offline:
        workloads, validation = ([analytical(one) for one in list_] for list_ in (workloads, validation))
    folder = out / "checkpoint"
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    others: dict[str, tuple[float, ...]] = {}
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as display:
            if compare:
                measuring = display.add_task("baselines", total=None, note="")
                others = baselines(
                    [validation], lambda done, all_: display.update(measuring, completed=done, total=all_)
                )
            rest = "".join(f", {name} {values[0]:.2f}" for name, values in others.items())
            bar = display.add_task("teacher", total=None, note="")

            def show(report: Report) -> None:
                display.update(bar, note=f"JCT {report.score.best:.3f}, best {report.best:.3f}{rest}")

            checkpoint = learn(
                workloads, validation, settings, seed=seed, out=folder, progress=show, start=begun,
                told=lambda phase, done, total: display.update(bar, description=phase, completed=done, total=total),
                stop=lambda: minutes is not None and time.monotonic() - began > 60 * minutes,
                state=out / _STATE, resume=resume,
            )  # fmt: skip
    except KeyboardInterrupt:
        what = "the same command with --resume goes on with the last state saved in"
        there = f"{what} {out}" if (out / _STATE).is_file() else "nothing was saved yet"
        typer.echo(f"stopped: {there}", err=True)
        raise typer.Exit(_STOPPED) from None
    seconds = round(time.monotonic() - began, 1)
    _write_report(out, checkpoint, others, offline=offline)
    if as_json:
        print_json({"checkpoint": str(folder), "digest": checkpoint.digest, "seconds": seconds, "offline": offline,
                    "baselines_jct_slots": {name: values[0] for name, values in others.items()},
                    **checkpoint.training})  # fmt: skip
        return
    best = min(_of_entry(entry) for entry in checkpoint.training["history"])
    against = "".join(f", {best / values[0] - 1:+.1%} against {name}" for name, values in others.items())
    typer.echo(
        f"{folder}: {checkpoint.digest[:12]}, after {seconds:.0f} s; "
        f"mean completion time in validation {best:.3f} slots{against}; report in {out / 'report.md'}"
    )


def _settings(iterations: int, teacher: str | None, start: Checkpoint | None) -> Settings:
    settings = replace(Settings(), iterations=iterations)
    if teacher is not None:
        settings = replace(settings, teacher=str(teacher))
    if start is None:
        return settings
    try:
        network = NetworkKind(start.settings["network"])
        hidden = int(start.weights["policy.1.weight"].shape[0])
        window = int(start.settings["window"]) if network is NetworkKind.DENSE else settings.window
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"--start: the checkpoint lacks what a training needs to know: {error!r}") from None
    return replace(settings, teacher="", network=network, hidden=hidden, window=window)


def _write_report(out: Path, checkpoint: Checkpoint, others: Mapping[str, Sequence[float]], *, offline: bool) -> None:
    """``report.md``: validation by round, next to what others do."""
    training = checkpoint.training
    lines = ["# Training of dl2-original", ""]
    if offline:
        lines += ["Learned on an analytical model of speeds; so are all numbers here.", ""]
    lines += ["Mean completion times on the validation workloads, in slots.", "", "| policy | slots |", "|---|---|"]
    lines += [f"| {name} | {values[0]:.3f} |" for name, values in others.items()]
    lines += ["", "| phase | round | best actions | actions drawn | decisions |", "|---|---|---|---|---|"]
    lines += [
        f"| {entry['phase']} | {entry['round']} | {_shown(entry, 'greedy')} | {_shown(entry, 'sampled')} | "
        f"{entry['decisions']} |"
        for entry in training["history"]
    ]
    lines += ["", f"Seed {training['seed']}; {training['workloads']} workloads.", ""]
    lines += [f"- {key}: {value}" for key, value in training["settings"].items()]
    try:
        (out / "report.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from error


def _shown(entry: Mapping[str, Any], way: str) -> str:
    return f"{entry[way]:.3f}" if way in entry else "no end"


def _of_entry(entry: Mapping[str, float]) -> float:
    return min(entry.get("greedy", float("inf")), entry.get("sampled", float("inf")))
