"""``dl2d train --twin``: train a policy on what this site recorded; with ``--gate`` it goes live if it is better."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.output import print_json, print_tables, table
from dl2d.cli.policy import what_live_means
from dl2d.cli.policy_trials.check_trained_policy import replay_line
from dl2d.cli.policy_trials.train_on_site_records import (
    DL2,
    DL2_PAPER,
    Learned,
    TwinSettings,
    checked,
    judged,
    learn,
)
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.train.options_of_train_commands import TrainOptions
from dl2d.config.settings import Settings
from dl2d.core.errors import GateRefused
from dl2d.core.policy_registry import Trial
from dl2d.daemon.policy_versions.candidate_files import enter
from dl2d.learning.training_report import write_report
from dl2d.policies.common.checkpoint import DIGITS, write_checkpoint, writing


def train_twin(settings: Settings, options: TrainOptions, *, paper: bool) -> None:
    """Train on the site's twin, and have the gate judge what comes of it if that is asked for."""
    chosen = TwinSettings(
        iterations=options.iterations, days=options.days, minutes=options.minutes, seed=options.seed, gate=options.gate
    )  # fmt: skip
    policy = DL2_PAPER if paper else DL2
    trial: Trial | None = None
    with interruptible(lambda: "nothing was registered"), shown_progress() as tell, open_store(settings) as store:
        learned = learn(settings, store, policy, chosen, tell=tell, now=time.time())
        replays = checked(settings, store, learned, tell=tell)
        if replays.problem and not options.gate:
            raise GateRefused(f"the trained policy {replays.problem}; nothing was written; record more days first")
        is_written = not replays.problem
        if is_written:
            write_checkpoint(learned.checkpoint, options.checkpoint)
            _write_report(learned, options.out)
        if options.gate:
            candidate = judged(settings, store, learned, replays, tell=tell)
            trial = enter(candidate, store.registry, settings.mode, at=time.time())
            if is_written:
                _append_trial(trial, options.out)
    if options.as_json:
        written = str(options.checkpoint) if is_written else None
        done = {
            "checkpoint": written, "digest": learned.checkpoint.digest, **learned.record,
            "replayed": replays.as_json,
        }  # fmt: skip
        print_json(done if trial is None else {**done, "trial": trial})
        return
    digest, seconds = learned.checkpoint.digest[:DIGITS], learned.record["seconds"]
    if is_written:
        typer.echo(replay_line(replays) if learned.is_new else "nothing better was found than what decides now")
        typer.echo(f"{options.checkpoint}: {digest}, after {seconds:.0f} s; report in {options.out}")
    else:
        typer.echo(f"{digest}, after {seconds:.0f} s; nothing was written to {options.out}")
    if trial is not None:
        _print_trial(trial, settings)


def _print_trial(trial: Trial, settings: Settings) -> None:
    rows = [
        (case.name, f"{case.candidate:.3f}", f"{case.current:.3f}", f"{case.candidate / case.current - 1:+.1%}")
        for case in trial.cases
    ]
    print_tables(table(("WORKLOAD", ">JCT", ">CURRENT", ">CHANGE"), rows))
    if not trial.passed:
        outcome = "rejected"
    elif settings.policy.name == trial.policy:
        outcome = what_live_means(settings.mode)
    else:
        outcome = (
            f"is the live version of {trial.policy}, but {settings.policy.name} decides (set policy.name to "
            f"{trial.policy} to use it)"
        )
    typer.echo(f"{outcome}: {trial.reason}")


def _write_report(learned: Learned, out: Path) -> None:
    if learned.state is None or learned.settings is None:
        from dl2d.cli.train.train_dl2_paper import write_paper_report  # noqa: PLC0415 - PyTorch takes seconds to import

        write_paper_report(out, learned.checkpoint, {}, offline=False)
        return
    days = learned.record["days"]
    where = [f"this site's {len(days)} days, {days[0]} to {days[-1]}, and days drawn from them"]
    write_report(out, learned.state, learned.settings, {}, inputs=where, seconds=learned.record["seconds"])


def _append_trial(trial: Trial, out: Path) -> None:
    """Add the gate's page to the report."""
    rows = [f"| {case.name} | {case.candidate:.3f} | {case.current:.3f} |" for case in trial.cases]
    lines = ["", "## The gate", "", f"{'Passed' if trial.passed else 'Rejected'}: {trial.reason}.", ""]
    lines += ["| workload | candidate | current |", "|---|---|---|", *rows, ""]
    with writing(out), (out / "report.md").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))
