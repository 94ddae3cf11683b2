"""``dl2d train --twin``: weights for the learned policy from what this site recorded, and the gate before they decide.

The daemon's learner does the same (``dl2d.cli.learner``).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dl2d import __version__
from dl2d.cli.options import reading
from dl2d.cli.output import print_json, print_tables, table
from dl2d.config.settings import Settings, load_settings
from dl2d.core.codec import as_plain
from dl2d.core.errors import CheckpointError
from dl2d.core.history import RecordingStore
from dl2d.core.policy import Policy
from dl2d.core.registry import Registry, Trial, TrialCase
from dl2d.daemon.candidates import Candidate, enter
from dl2d.daemon.incumbent import configured_checkpoint, read_version, version_in
from dl2d.daemon.loop import guard_rules
from dl2d.daemon.plugins import Given, load_placement, load_policy
from dl2d.learning.gate import Compared, Verdict, compare
from dl2d.learning.lesson import Lesson, lesson_of
from dl2d.learning.report import write_report
from dl2d.learning.search import Step
from dl2d.learning.training import State, Trainer, TrainingSettings
from dl2d.learning.twin import DAY_SECONDS
from dl2d.policies.checkpoint import DIGITS, Checkpoint, read_checkpoint, write_checkpoint
from dl2d.policies.dl2 import SHIPPED, from_arrays
from dl2d.throughput.news import merged
from dl2d.throughput.observations import Table

NAME: Final = "dl2"
_STOPPED: Final = 130  # as a shell has it for Ctrl-C
#: Least length of an interval in the twin, in seconds.
_SHORTEST_SLOT: Final = 300.0
#: The search begins with weights that are good already: it looks and goes less far than one that begins with none.
_STEP: Final = Step(spread=0.07, rate=0.03)
#: A site's cluster is what it is; fewer nodes stand for busier days.
_PARTS: Final = (1.0, 1 / 2, 1 / 4)


class Tell(Protocol):
    """Is told what is being done, how far it is, how far it goes, and a word on how it stands."""

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Tell."""
        ...


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of learning."""

    lesson: Lesson
    parent: Checkpoint
    checkpoint: Checkpoint
    record: Mapping[str, Any]
    state: State
    settings: TrainingSettings


def site_of(config: Path, store: str) -> Settings:
    """The settings of a site: its configuration's, or with a store alone the defaults. Raises ``ConfigError``."""
    return (
        Settings.model_validate({"policy": {"name": NAME}, "store": {"url": store}}) if store else load_settings(config)
    )


def train_twin(
    settings: Settings,
    *,
    out: Path,
    iterations: int,
    days: int | None,
    minutes: float | None,
    seed: int,
    gate: bool,
    as_json: bool,
) -> None:
    """Train on the site's twin, and have the gate judge what comes of it if that is asked for."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as display:
        bars: dict[str, Any] = {}

        def tell(what: str, done: int, total: int, note: str = "") -> None:
            if what not in bars:
                bars[what] = display.add_task(what, total=total, note=note)
            display.update(bars[what], completed=done, total=total, note=note)

        with _interruptible(), reading(settings) as store:
            learned = learn(
                settings, store, out=out, iterations=iterations, days=days, minutes=minutes, seed=seed, tell=tell,
                now=time.time(),
            )  # fmt: skip
            _write_report(learned, out)
            digest = learned.checkpoint.digest
            done: dict[str, Any] = {"checkpoint": str(out / "checkpoint"), "digest": digest, **learned.record}
            if gate:
                candidate = judged(settings, store.registry, learned, tell=tell)
                trial = enter(candidate, store.registry, at=time.time())
                done["trial"] = as_plain(trial)
                _append_trial(trial, out)
    if as_json:
        print_json(done)
        return
    typer.echo(f"{out / 'checkpoint'}: {done['digest'][:DIGITS]}, after {done['seconds']:.0f} s; report in {out}")
    if "trial" in done:
        rows = [
            (case.name, f"{case.candidate:.3f}", f"{case.current:.3f}", f"{case.candidate / case.current - 1:+.1%}")
            for case in trial.cases
        ]
        print_tables(table(("WORKLOAD", ">JCT", ">CURRENT", ">CHANGE"), rows))
        typer.echo(f"{'goes live' if trial.passed else 'rejected'}: {trial.reason}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped: nothing was registered", err=True)
        raise typer.Exit(_STOPPED) from None


def _write_report(learned: Learned, out: Path) -> None:
    days = learned.record["days"]
    where = [f"this site's {len(days)} days, {days[0]} to {days[-1]}, and days drawn from them"]
    write_report(out, learned.state, learned.settings, {}, inputs=where, seconds=learned.record["seconds"])


def _append_trial(trial: Trial, out: Path) -> None:
    """Add the gate's page to the report."""
    rows = [f"| {case.name} | {case.candidate:.3f} | {case.current:.3f} |" for case in trial.cases]
    lines = ["", "## The gate", "", f"{'Passed' if trial.passed else 'Rejected'}: {trial.reason}.", ""]
    lines += ["| workload | candidate | current |", "|---|---|---|", *rows, ""]
    try:
        with (out / "report.md").open("a", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from error


def learn(
    settings: Settings,
    store: RecordingStore,
    *,
    out: Path,
    iterations: int,
    days: int | None,
    minutes: float | None,
    seed: int,
    tell: Tell,
    now: float,
) -> Learned:
    """Read the site's history, train from what decides now, and write the checkpoint to a folder.

    ``now`` is the end of the history, seconds since 1970. The store is only read.

    Raises
    ------
    WorkloadError
        There is too little to learn from.
    CheckpointError, StoreError
        Something cannot be read or written.
    """
    length = (settings.learning.days if days is None else days) * DAY_SECONDS
    begin = (now - length) // DAY_SECONDS * DAY_SECONDS
    lesson = lesson_of(store.history(begin, now), slot_seconds(settings), seed=seed)
    parent = current_checkpoint(settings, store.registry)
    limit = settings.learning.minutes if minutes is None else minutes
    own = settings.policy.settings.get("optimism") if settings.policy.name == NAME else None
    return _train(lesson, parent, optimism=own, out=out, iterations=iterations, minutes=limit, seed=seed, tell=tell)


def current_checkpoint(settings: Settings, registry: Registry) -> Checkpoint:
    """What decides now, or would if dl2 were in charge; as in the daemon, where the live version cannot be read."""
    live = registry.live(NAME)
    if live is not None:
        with contextlib.suppress(CheckpointError):
            return read_version(live)
    named = configured_checkpoint(settings) if settings.policy.name == NAME else None
    return read_checkpoint(SHIPPED, policy=NAME) if named is None else named


def judged(settings: Settings, registry: Registry, learned: Learned, *, tell: Tell) -> Candidate:
    """Put what was learned among the versions, and compare it with what decides now; the store is only read."""
    version = replace(
        version_in(settings.versions_path, learned.checkpoint, at=time.time(), origin="learned from this site's days"),
        parent=learned.parent.digest,
        data_from=learned.record["data_from"],
        data_to=learned.record["data_to"],
        jobs=learned.record["jobs"],
    )
    current = current_checkpoint(settings, registry)
    cases: tuple[TrialCase, ...] = ()
    if version.digest == current.digest:
        verdict = Verdict(passed=False, reason="it is what decides already")
    else:
        compared = _compared(settings, learned, current, tell)
        cases, verdict = compared.cases, compared.verdict
    trial = Trial(
        at=time.time(),
        policy=NAME,
        candidate=version.digest,
        current=current.digest,
        days=tuple(day.name for day in learned.lesson.held_out),
        cases=cases,
        change=verdict.change,
        low=verdict.low,
        high=verdict.high,
        passed=verdict.passed,
        reason=verdict.reason,
    )
    return Candidate(version, trial)


def _compared(settings: Settings, learned: Learned, current: Checkpoint, tell: Tell) -> Compared:
    return compare(
        learned.lesson.cases,
        _policy(settings, learned.checkpoint),
        _policy(settings, current),
        load_placement(settings.placement),
        costs=learned.lesson.costs,
        rules=guard_rules(settings),
        timeout=settings.policy.timeout_seconds,
        timer=time.process_time,
        progress=lambda done, total: tell("comparing", done, total),
    )


def _policy(settings: Settings, checkpoint: Checkpoint) -> Policy:
    own = settings.policy.settings if settings.policy.name == NAME else {}
    return load_policy(NAME, given=Given(checkpoint=checkpoint, settings=own, slot_seconds=slot_seconds(settings)))


def slot_seconds(settings: Settings) -> float:
    """Length of an interval in the twin: the site's own, but not so short that a day takes for ever to play."""
    return max(settings.schedule.slot_seconds, _SHORTEST_SLOT)


def _train(
    lesson: Lesson,
    parent: Checkpoint,
    *,
    optimism: float | None,
    out: Path,
    iterations: int,
    minutes: float,
    seed: int,
    tell: Tell,
) -> Learned:
    began = time.monotonic()
    # On few nodes some parts are the same.
    nodes = max(len(workload.nodes()) for workload in lesson.training)
    parts = tuple({max(1, round(nodes * part)): part for part in reversed(_PARTS)}.values())[::-1]
    try:
        known = from_arrays(parent.weights, parent.settings["kinds"])
        how = TrainingSettings(
            seed=seed, iterations=iterations, every=2, hidden=int(parent.settings["hidden"]), parts=parts, rounds=0,
            deciding_optimism=float(parent.settings["optimism"]) if optimism is None else optimism, measuring=False,
            step=_STEP,
        )  # fmt: skip
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"checkpoint of {NAME}: lacks, or has no fit, {error}") from error
    tell("setting up", 0, 1)
    trainer = Trainer(lesson.training, lesson.validation, how)
    state: State = trainer.start(
        parent.weights["scorer"], merged(Table.of(known), Table.of(lesson.measured)).measured()
    )
    tell("setting up", 1, 1)
    tell("searching", 0, iterations)
    for reached in trainer.search(state):
        state = reached
        tell("searching", state.search.iteration, iterations, _note(state))
        if time.monotonic() - began > 60 * minutes:
            break
    seconds = time.monotonic() - began
    days = [day.name for day in lesson.trained_on]
    record = {
        "dl2d": __version__, "twin": True, "parent": parent.digest, "seed": seed, "days": days,
        "held_out": [day.name for day in lesson.held_out],
        "data_from": lesson.trained_on[0].begin, "data_to": lesson.trained_on[-1].begin + DAY_SECONDS,
        "jobs": sum(job.at > 0 for day in lesson.trained_on for job in day.jobs),
        "iterations": state.search.iteration, "best_iteration": state.best_look.iteration,
        "seconds": round(seconds, 1), "parts": list(how.parts), "costs": _costs(lesson),
        "validation_jct_slots": list(state.best_look.jct), "parents_jct_slots": list(state.looks[0].jct),
        "curve": [asdict(look) for look in state.looks],
    }  # fmt: skip
    made = trainer.checkpoint(state, record)
    kept = {name: parent.settings.get(name, 0.0) for name in ("optimism", "resize_seconds")}
    checkpoint = replace(made, settings={**made.settings, **kept})
    write_checkpoint(checkpoint, out / "checkpoint")
    return Learned(lesson, parent, checkpoint, record, state, how)


def _note(state: State) -> str:
    """Mean completion times on the validation workloads with all nodes, in slots."""
    return f"JCT {state.best_look.jct[0]:.3f}, it began with {state.looks[0].jct[0]:.3f}"


def _costs(lesson: Lesson) -> dict[str, float]:
    return {"start_seconds": lesson.costs.start_seconds, "join_seconds": lesson.costs.join_seconds}
