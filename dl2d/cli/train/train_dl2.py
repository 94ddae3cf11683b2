"""``dl2d train --design dl2``: weights of policy dl2 from simulated workloads."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import typer

from dl2d import __version__
from dl2d.cli.output import print_json, print_tables, table
from dl2d.cli.policy_trials.check_trained_policy import check_on_workloads, replay_line
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.train.options_of_train_commands import TrainOptions, training_workloads
from dl2d.learning.dl2.training import State, Trainer, TrainingSettings, load_state, save_state
from dl2d.learning.training_report import baselines, write_report
from dl2d.policies.common.checkpoint import write_checkpoint

#: Mean completion times on the validation workloads, in slots: by policy, one for each part of the nodes.
Times = Mapping[str, tuple[float, ...]]


def train_dl2(options: TrainOptions) -> None:
    """Train, showing how far it is; write state after each iteration, and checkpoint and report at the end."""
    began = time.monotonic()
    settings = TrainingSettings(seed=options.seed, iterations=options.iterations, hidden=options.hidden)
    train_on, validation = training_workloads(options.workload, options.validate, options.seed, options.draws)
    trainer = Trainer(train_on, validation, settings)
    inputs = hashlib.sha256(repr((train_on, validation)).encode()).hexdigest()
    left = f"to continue from the state in {options.out}, run the same command with --resume"
    with interruptible(lambda: left), shown_progress() as tell:
        times = baselines(trainer.validation, partial(tell, "baselines")) if options.compare else {}
        if options.resume:
            state = load_state(settings, inputs, options.out)
        else:
            state = trainer.explore(partial(tell, "measuring speeds"))
        save_state(state, settings, inputs, options.out)
        tell("searching", state.search.iteration, options.iterations, _note(state, times))
        for reached in trainer.search(state):
            state = reached
            save_state(state, settings, inputs, options.out)
            tell("searching", state.search.iteration, options.iterations, _note(state, times))
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                break
    seconds = time.monotonic() - began
    record = _record(options, settings, state, times, seconds)
    checkpoint = trainer.checkpoint(state, record)
    with interruptible(lambda: left), shown_progress() as tell:
        replays = check_on_workloads(checkpoint, validation, tell=tell)
    write_checkpoint(checkpoint, options.checkpoint)
    write_report(options.out, state, settings, times, inputs=options.workload, seconds=seconds)
    if state.search.iteration < options.iterations:
        when = f"after {options.minutes:g} minutes at iteration {state.search.iteration} of {options.iterations}"
        typer.echo(f"stopped {when}; to continue, run the same command with --resume", err=True)
    if options.as_json:
        head = {"checkpoint": str(options.checkpoint), "digest": checkpoint.digest, "replayed": replays.as_json}
        print_json({**head, **record})
        return
    print_tables(_results(settings, state, times))
    typer.echo(replay_line(replays))
    report = options.out / "report.md"
    typer.echo(f"{options.checkpoint}: {checkpoint.digest[:12]}, after {seconds:.0f} s; report in {report}")


def _note(state: State, times: Times) -> str:
    """Validation results next to those of others, mean over the parts, in slots."""
    own = f"JCT {_mean(state.best_look.jct):.3f}"
    return ", ".join((own, *(f"{name} {_mean(values):.2f}" for name, values in times.items())))


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _record(
    options: TrainOptions, settings: TrainingSettings, state: State, times: Times, seconds: float
) -> dict[str, Any]:
    best = state.best_look
    return {
        "dl2d": __version__, "workloads": list(options.workload), "validation": list(options.validate),
        "draws": options.draws, "seed": options.seed, "iterations": state.search.iteration,
        "best_iteration": best.iteration, "seconds": round(seconds, 1), "parts": list(settings.parts),
        "validation_jct_slots": list(best.jct),
        "baselines_jct_slots": {name: list(values) for name, values in times.items()},
        "curve": [asdict(look) for look in state.looks],
    }  # fmt: skip


def _results(settings: TrainingSettings, state: State, times: Times) -> Any:
    rows = [
        (f"{part:.3g}", f"{own:.3f}", *(f"{own / values[number] - 1:+.1%}" for values in times.values()))
        for number, (part, own) in enumerate(zip(settings.parts, state.best_look.jct, strict=True))
    ]
    return table((">NODES", ">JCT", *(f">vs {name}" for name in times)), rows)
