"""``dl2d train --design dl2-original``: DL2 as its paper has it (docs/internals/dl2-paper.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from dl2d.cli.output import print_json
from dl2d.cli.policy_trials.check_trained_policy import check_on_workloads, replay_line
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.train.options_of_train_commands import TrainOptions, training_workloads
from dl2d.learning.dl2_paper.analytical_speed_model import analytical
from dl2d.learning.dl2_paper.settings import DEFAULTS, Settings
from dl2d.learning.dl2_paper.training_loop import Report, continuing
from dl2d.learning.dl2_paper.training_loop import train as learn
from dl2d.learning.training_report import baselines
from dl2d.policies.common.checkpoint import Checkpoint, read_checkpoint, write_checkpoint, writing

_STATE = "state.npz"


def train_dl2_paper(options: TrainOptions) -> None:
    """Train, showing how far it is, and write the best checkpoint by validation, and a report."""
    began = time.monotonic()
    workloads, validation = training_workloads(options.workload, options.validate, options.seed, options.draws)
    start = None if options.start is None else read_checkpoint(options.start, policy="dl2-original")
    settings = _settings(options.iterations, options.teacher, start)
    if options.offline:
        workloads, validation = ([analytical(one) for one in list_] for list_ in (workloads, validation))
    state = options.out / _STATE
    with interruptible(lambda: _left(state)), shown_progress() as tell:
        times: dict[str, tuple[float, ...]] = {}
        if options.compare:
            times = baselines([validation], partial(tell, "baselines"))
        others = "".join(f", {name} {values[0]:.2f}" for name, values in times.items())
        note = ""

        def look(report: Report) -> None:
            nonlocal note
            note = f"JCT {report.score.best:.3f}, best {report.best:.3f}{others}"

        checkpoint = learn(
            workloads, validation, settings, seed=options.seed, start=start, state=state, resume=options.resume,
            on_validation=look, on_step=lambda phase, done, total: tell(phase, done, total, note),
            should_stop=lambda: options.minutes is not None and time.monotonic() - began > 60 * options.minutes,
        )  # fmt: skip
        replays = check_on_workloads(checkpoint, validation, tell=tell)
    write_checkpoint(checkpoint, options.checkpoint)
    write_paper_report(options.out, checkpoint, times, offline=options.offline)
    seconds = round(time.monotonic() - began, 1)
    if options.as_json:
        print_json(
            {
                "checkpoint": str(options.checkpoint), "digest": checkpoint.digest, "seconds": seconds,
                "offline": options.offline, "replayed": replays.as_json,
                "baselines_jct_slots": {name: values[0] for name, values in times.items()},
                **checkpoint.training,
            }
        )  # fmt: skip
        return
    best = min(_of_entry(entry) for entry in checkpoint.training["history"])
    against = "".join(f", {best / values[0] - 1:+.1%} against {name}" for name, values in times.items())
    typer.echo(replay_line(replays))
    typer.echo(
        f"{options.checkpoint}: {checkpoint.digest[:12]}, after {seconds:.0f} s; mean completion time in validation "
        f"{best:.3f} slots{against}; report in {options.out / 'report.md'}"
    )


def _left(state: Path) -> str:
    if not state.is_file():
        return "no state is saved yet"
    return f"to continue from the state in {state.parent}, run the same command with --resume"


def _settings(iterations: int, teacher: str | None, start: Checkpoint | None) -> Settings:
    settings = replace(DEFAULTS, iterations=iterations)
    if teacher is not None:
        settings = replace(settings, teacher=str(teacher))
    return settings if start is None else continuing(settings, start)


def write_paper_report(
    out: Path, checkpoint: Checkpoint, others: Mapping[str, Sequence[float]], *, offline: bool
) -> None:
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
    with writing(out):
        (out / "report.md").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _shown(entry: Mapping[str, Any], way: str) -> str:
    return f"{entry[way]:.3f}" if way in entry else "no end"


def _of_entry(entry: Mapping[str, float]) -> float:
    return min(entry.get("greedy", float("inf")), entry.get("sampled", float("inf")))
