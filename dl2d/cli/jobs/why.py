"""``dl2d why JOB``: the newest decision on a job, with its reason, alternatives and open steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from dl2d.cli.daemon_access.job_views_from_store_or_api import job_source
from dl2d.cli.jobs.reason_and_remarks_of_job import (
    as_of_now,
    job_json,
    remark_on,
    remark_on_silence,
    remark_on_tasks,
    why_of,
)
from dl2d.cli.jobs.verify_recorded_decision import Recomputed, recompute
from dl2d.cli.output import duration, moment, print_json, print_text
from dl2d.cli.shared_options import ConfigOption, JobArgument, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH, Settings
from dl2d.core.cluster import Task
from dl2d.core.decision import Constraint, JobDecision, Reason
from dl2d.core.errors import ConfigError, RequestError
from dl2d.core.job_views import MAX_LISTED, DecisionView, JobStatus, WhyView
from dl2d.core.store import DecisionEntry

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

#: Lost tasks that are shown.
_MAX_LOST = 20
#: Jobs that were given more in the same slot that are shown.
_MAX_GROWN = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """A decision on a job and, where that was asked for, its recomputation."""

    decision: DecisionView
    recomputed: Recomputed | None = None


def why(
    job: JobArgument,
    slot: Annotated[int | None, option("The decision in this slot.", "--slot", min=1)] = None,
    every: Annotated[
        bool, option("All decisions on the job, oldest first, as far as --limit goes.", "--all", "-a")
    ] = False,
    limit: Annotated[
        int,
        option(
            "With --all: how many of the newest to show; through the job API no more than 5.",
            "--limit",
            "-n",
            min=1,
            max=MAX_LISTED,
        ),
    ] = 100,
    again: Annotated[
        bool, option("Decide again from the recorded inputs; exit 1 if the answer differs.", "--recompute")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Explain a job's allocation: decision, binding constraint, alternatives, guard, deferred tasks."""
    if slot is not None and every:
        raise RequestError("--slot", "cannot be used with --all")
    with job_source(config) as source:
        seen = source.views.why(job, slot=slot, limit=limit if every else 1)
        seen = replace(seen, job=as_of_now(seen.job))
        answers = [Answer(each) for each in seen.decisions]
        if again:
            if source.site is None:
                raise ConfigError("--recompute needs the configuration and the store, which this user cannot read")
            answers = [replace(each, recomputed=_recomputed(*source.site, each.decision.entry)) for each in answers]
    if as_json:
        print_json(_as_json(seen, answers))
    else:
        print_text("\n".join(_text(seen, answers, time.time())))
    if any(answer.recomputed is not None and not answer.recomputed.same for answer in answers):
        raise typer.Exit(1)


def _recomputed(settings: Settings, store: SqlStore, entry: DecisionEntry) -> Recomputed:
    slot = store.slot(entry.slot)
    assert slot is not None
    return recompute(slot, settings, store.registry)


def _text(seen: WhyView, answers: Sequence[Answer], now: float) -> list[str]:
    job, tasks, lost = seen.job, seen.tasks, seen.lost
    progress = job.progress
    lines = [f"job {job.key.id} ({job.request.name}) of {job.owner.user}: {job.state}"]
    if job.state.ended:
        lines.append(f"  ended        {moment(job.ended_at)}: {job.end_reason or 'no reason given'}")
    else:
        lines.append(f"  trains with  {progress.workers}w+{progress.ps}ps, epoch {progress.epoch:.2f}")
    if remark := remark_on(job):
        lines.append(f"  epochs       {remark}")
    if remark := remark_on_silence(job, now):
        lines.append(f"  silent       {remark}")
    if remark := remark_on_tasks(tasks):
        lines.append(f"  suspended    {remark}")
    if not answers:
        lines.append(f"  no decision  {why_of(JobStatus(job, None))}")
    for answer in answers:
        lines += ["", *_decision_text(answer, tasks)]
    if tasks:
        lines += ["", "tasks"]
        width = max(len(task.id) for task in tasks)
        lines += [
            f"  {task.id:{width}}  {task.state} for {duration(now - task.since)} on {task.node or 'any node'}"
            + (f" ({task.note})" if task.note else "")
            for task in tasks
        ]
    if lost:
        lines += ["", "tasks that were lost"]
        lines += [f"  {report.task}  {report.how}" for report in lost[-_MAX_LOST:]]
    return lines


def _decision_text(answer: Answer, tasks: Sequence[Task]) -> list[str]:
    view, entry, decided = answer.decision, answer.decision.entry, answer.decision.entry.decided
    before, after = decided.previous, decided.allocation
    change = f"{before} -> {after}" if before != after else f"{after}, as before"
    lines = [
        f"slot {entry.slot} at {moment(entry.at)}",
        f"  policy       {entry.policy} version {entry.policy_version}, inputs {entry.inputs_hash}",
        f"  allocation   {change}",
        *_because(decided, None if view.shadow else view.proposed, entry.measure),
    ]
    if view.shadow is not None:
        shadow = view.shadow
        same = "the same" if shadow.decided.allocation == after else f"{shadow.decided.allocation} instead"
        lines += [
            "decision of dl2d, not carried out",
            f"  policy       {shadow.policy} version {shadow.policy_version}",
            f"  allocation   {same}",
            *_because(shadow.decided, view.proposed, shadow.measure),
        ]
    if view.grown:
        names = [f"job {each.job.id} {each.previous} -> {each.allocation}" for each in view.grown[:_MAX_GROWN]]
        more = f" and {len(view.grown) - _MAX_GROWN} others" if len(view.grown) > _MAX_GROWN else ""
        lines.append(f"  given more   {', '.join(names)}{more}")
    if view.may_use:
        lines.append(f"  may use      {view.may_use}")
    for item in view.deferred:
        has = sum(task.role is item.role and task.state.wanted for task in tasks)
        since = "; started since" if has >= after.count(item.role) else ""
        missing = "; ".join(map(str, item.shortfalls)) or "no node takes tasks"
        where = f"until others have ended: {item.limit}" if item.limit else f"on {item.nearest or 'every node'}"
        because = item.postponed or f"{missing} {where}"
        lines.append(f"  deferred     {item.count} {item.role}: {because}{since}")
    lines += [f"  failed       {failure.what}: {failure.error}" for failure in view.failures]
    if answer.recomputed is not None:
        lines.append(f"  recomputed   {answer.recomputed.text}")
    return lines


def _because(decided: JobDecision, proposed: JobDecision | None, measure: str) -> list[str]:
    """Constraint, alternatives and what the guard changed; an observed decision has neither of the latter.

    Where the guard changed the proposed allocation, the constraints are its reasons.
    """
    proposal = proposed or decided
    if proposal.allocation == decided.allocation:
        lines, chosen, guarded = _reason_text("constraint", decided.reason), "chosen", decided.guarded
    else:
        lines = [
            line for reason in decided.guarded[len(proposal.guarded) :] for line in _reason_text("constraint", reason)
        ]
        lines.append(
            f"  proposed     {proposal.allocation} by the policy, which the guard changed to {decided.allocation}"
        )
        lines += _reason_text("", proposal.reason)
        chosen, guarded = "proposed", proposal.guarded
    if decided.alternatives:
        options = [
            f"{option.allocation} {option.score:.4g}"
            + (f" ({chosen})" if option.allocation == proposal.allocation else "")
            for option in decided.alternatives
        ]
        lines.append(f"  alternatives by {measure or 'score'}: {', '.join(options)}")
    for reason in guarded:
        lines += _reason_text("guard", reason)
    if not decided.guarded and decided.reason.constraint is not Constraint.OBSERVED:
        lines.append("  guard        changed nothing")
    return lines


def _reason_text(heading: str, reason: Reason) -> list[str]:
    text = reason.text.removeprefix(f"{reason.constraint}: ")
    lines = [f"  {heading:<12} {reason.constraint}: {text}"]
    lines += [f"  {'':<12} {shortfall}" for shortfall in reason.shortfalls]
    return lines


def _as_json(seen: WhyView, answers: Sequence[Answer]) -> dict[str, object]:
    job, tasks, lost = seen.job, seen.tasks, seen.lost
    newest = seen.decisions[-1].entry.decided if seen.decisions and not job.state.ended else None
    return {
        **job_json(JobStatus(job, newest)),
        "decisions": [_decision_json(answer) for answer in answers],
        "tasks": [
            {"task": task.id, "state": task.state, "node": task.node, "since": task.since, "note": task.note}
            for task in tasks
        ],
        "lost": [{"task": report.task, "cause": report.cause, "how": report.how} for report in lost],
    }


def _decision_json(answer: Answer) -> dict[str, object]:
    view, entry = answer.decision, answer.decision.entry
    shown: dict[str, object] = {
        "slot": entry.slot,
        "at": entry.at,
        "inputs_hash": entry.inputs_hash,
        "previous": entry.decided.previous._asdict(),
        **_entry_json(entry),
        "deferred": [
            {"role": item.role, "count": item.count, "nearest": item.nearest, "limit": item.limit,
             "shortfalls": item.shortfalls, "postponed": item.postponed}
            for item in view.deferred
        ],
        "may_use": view.may_use,
        "given_more": [
            {"job": each.job.id, "previous": each.previous._asdict(),
             "allocation": each.allocation._asdict()}
            for each in view.grown
        ],
        "failures": [{"what": failure.what, "error": failure.error} for failure in view.failures],
    }  # fmt: skip
    if view.shadow is not None:
        shown["shadow"] = _entry_json(view.shadow)
    if answer.recomputed is not None:
        shown["recomputed"] = {"same": answer.recomputed.same, "text": answer.recomputed.text}
    return shown


def _entry_json(entry: DecisionEntry) -> dict[str, object]:
    decided = entry.decided
    return {
        "policy": entry.policy,
        "policy_version": entry.policy_version,
        "allocation": decided.allocation._asdict(),
        "reason": decided.reason,
        "measure": entry.measure,
        "alternatives": [
            {"allocation": option.allocation._asdict(), "score": option.score} for option in decided.alternatives
        ],
        "guarded": decided.guarded,
    }
