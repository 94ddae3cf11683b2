"""``dl2d why JOB``: the newest decision on a job, with its reason, alternatives and open steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from dl2d.cli.job_summary import JobLine, allocation_json, as_of_now
from dl2d.cli.options import ConfigOption, JobArgument, JsonOption, find_job, reading
from dl2d.cli.output import duration, moment, print_json, print_text
from dl2d.cli.recompute_decision import Recomputed, recompute
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.cluster import Task
from dl2d.core.decision import Constraint, JobDecision, Reason
from dl2d.core.errors import RequestError
from dl2d.core.jobs import NOTHING, Job, JobKey
from dl2d.core.json_codec import as_plain
from dl2d.core.policy_registry import SiteStore
from dl2d.core.store import DecisionEntry, Slot, Store, TaskReport
from dl2d.core.tick_plan import Deferred, Failure

#: Decisions that are shown at most.
_MOST = 10_000
#: Lost tasks that are shown.
_MAX_LOST = 20
#: Jobs that were given more in the same slot that are shown.
_MAX_GROWN = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """A decision on a job, with its deferred and failed steps."""

    entry: DecisionEntry
    deferred: tuple[Deferred, ...]
    failures: tuple[Failure, ...]
    #: Decision on the job that the guard was given; None where it is not recorded, or an observed one.
    proposed: JobDecision | None = None
    #: In mode shadow the decision of dl2d, which is not carried out.
    shadow: DecisionEntry | None = None
    #: Where the job got less, or nothing: decisions of the slot that gave other jobs more.
    grown: tuple[JobDecision, ...] = ()
    #: Which nodes its tasks may use, where these are not all.
    may_use: str = ""
    recomputed: Recomputed | None = None


def why(
    job: JobArgument,
    slot: Annotated[int | None, typer.Option("--slot", min=1, help="The decision in this slot.")] = None,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="All decisions on the job, oldest first, as far as --limit goes.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=_MOST, help="With --all: how many of the newest to show.")
    ] = 1000,
    again: Annotated[
        bool, typer.Option("--recompute", help="Decide again from the recorded inputs; exit 1 if the answer differs.")
    ] = False,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Explain a job's allocation: decision, binding constraint, alternatives, guard, deferred tasks."""
    if slot is not None and every:
        raise RequestError("--slot", "cannot be used with --all")
    settings = load_settings(config)
    with reading(settings) as store:
        chosen = as_of_now(find_job(store, job))
        answers = _answers(store, chosen, slot, limit if every else 1)
        if again:
            answers = [replace(answer, recomputed=_recomputed(store, settings, answer)) for answer in answers]
        tasks = store.tasks(live=True, job=chosen.key)
        lost = [report for report in store.task_reports(chosen.key) if report.how]
        if as_json:
            print_json(_as_json(chosen, tasks, lost, answers))
        else:
            print_text("\n".join(_text(chosen, tasks, lost, answers, time.time())))
    if any(answer.recomputed is not None and not answer.recomputed.same for answer in answers):
        raise typer.Exit(1)


def _answers(store: Store, job: Job, number: int | None, limit: int) -> list[Answer]:
    if number is not None:
        slot = store.slot(number)
        if slot is None:
            raise RequestError("--slot", f"slot {number} is not recorded; the newest is {store.last_slot_number()}")
        for entry in slot.decision.jobs:
            if entry.job == job.key:
                decision = slot.decision
                name, version = entry.by or (decision.policy, decision.policy_version)
                found = DecisionEntry(
                    slot.number, slot.at, name, version, slot.inputs_hash, decision.measure, entry
                )  # fmt: skip
                return [_answer(slot, found)]
        raise RequestError("--slot", f"slot {number} has no decision on job {job.key.id}")
    entries = store.decisions(job.key, limit=limit)
    return [_answer(store.slot(entry.slot), entry) for entry in reversed(entries)]


def _answer(slot: Slot | None, entry: DecisionEntry) -> Answer:
    if slot is None:
        return Answer(entry, (), ())
    key = entry.decided.job
    return Answer(
        entry,
        tuple(item for item in slot.plan.deferred if item.job == key),
        tuple(item for item in slot.outcome.failures if item.job == key),
        next((each for each in slot.proposed.jobs if each.job == key), None),
        _shadow(slot, key),
        _grown(slot, entry.decided),
        next((each.text(len(slot.snapshot.nodes)) for each in slot.snapshot.node_sets if key in each.jobs), ""),
    )


def _grown(slot: Slot, decided: JobDecision) -> tuple[JobDecision, ...]:
    """Decisions of the slot that gave other jobs more, if this one gave its job less than before, or nothing."""
    before, after = decided.previous, decided.allocation
    if after != NOTHING and sum(after) >= sum(before):
        return ()
    others = (each for each in slot.decision.jobs if each.job != decided.job)
    return tuple(each for each in others if sum(each.allocation) > sum(each.previous))


def _shadow(slot: Slot, key: JobKey) -> DecisionEntry | None:
    said = slot.shadow
    decided = None if said is None else next((entry for entry in said.jobs if entry.job == key), None)
    if said is None or decided is None:
        return None
    made = said.policy, said.policy_version
    return DecisionEntry(slot.number, slot.at, *made, slot.inputs_hash, said.measure, decided)


def _recomputed(store: SiteStore, settings: Settings, answer: Answer) -> Recomputed:
    slot = store.slot(answer.entry.slot)
    assert slot is not None
    return recompute(slot, settings, store.registry)


def _text(
    job: Job, tasks: Sequence[Task], lost: Sequence[TaskReport], answers: Sequence[Answer], now: float
) -> list[str]:
    progress = job.progress
    lines = [f"job {job.key.id} ({job.request.name}) of {job.owner.user}: {job.state}"]
    if job.state.ended:
        lines.append(f"  ended        {moment(job.ended_at)}: {job.end_reason or 'no reason given'}")
    else:
        lines.append(f"  trains with  {progress.workers}w+{progress.ps}ps, epoch {progress.epoch:.2f}")
    if remark := JobLine(job, None).remark:
        lines.append(f"  epochs       {remark}")
    if not answers:
        lines.append(f"  no decision  {JobLine(job, None).why}")
    for answer in answers:
        lines += ["", *_decision_text(answer, tasks)]
    if tasks:
        lines += ["", "tasks"]
        width = max(len(task.id) for task in tasks)
        lines += [
            f"  {task.id:{width}}  {task.state} for {duration(now - task.since)} on {task.node}"
            + (f" ({task.note})" if task.note else "")
            for task in tasks
        ]
    if lost:
        lines += ["", "tasks that were lost"]
        lines += [f"  {report.task}  {report.how}" for report in lost[-_MAX_LOST:]]
    return lines


def _decision_text(answer: Answer, tasks: Sequence[Task]) -> list[str]:
    entry, decided = answer.entry, answer.entry.decided
    before, after = decided.previous, decided.allocation
    change = f"{before} -> {after}" if before != after else f"{after}, as before"
    lines = [
        f"slot {entry.slot} at {moment(entry.at)}",
        f"  policy       {entry.policy} version {entry.policy_version}, inputs {entry.inputs_hash}",
        f"  allocation   {change}",
        *_because(decided, None if answer.shadow else answer.proposed, entry.measure),
    ]
    if answer.shadow is not None:
        shadow = answer.shadow
        same = "the same" if shadow.decided.allocation == after else f"{shadow.decided.allocation} instead"
        lines += [
            "decision of dl2d, not carried out",
            f"  policy       {shadow.policy} version {shadow.policy_version}",
            f"  allocation   {same}",
            *_because(shadow.decided, answer.proposed, shadow.measure),
        ]
    if answer.grown:
        names = [f"job {each.job.id} {each.previous} -> {each.allocation}" for each in answer.grown[:_MAX_GROWN]]
        more = f" and {len(answer.grown) - _MAX_GROWN} others" if len(answer.grown) > _MAX_GROWN else ""
        lines.append(f"  given more   {', '.join(names)}{more}")
    if answer.may_use:
        lines.append(f"  may use      {answer.may_use}")
    for item in answer.deferred:
        has = sum(task.role is item.role and task.state.wanted for task in tasks)
        since = "; started since" if has >= after.count(item.role) else ""
        missing = "; ".join(map(str, item.shortfalls)) or "no node takes tasks"
        where = f"until others have ended: {item.limit}" if item.limit else f"on {item.nearest or 'every node'}"
        because = item.postponed or f"{missing} {where}"
        lines.append(f"  deferred     {item.count} {item.role}: {because}{since}")
    lines += [f"  failed       {failure.what}: {failure.error}" for failure in answer.failures]
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


def _as_json(
    job: Job, tasks: Sequence[Task], lost: Sequence[TaskReport], answers: Sequence[Answer]
) -> dict[str, object]:
    return {
        **JobLine(job, answers[-1].entry.decided if answers and not job.state.ended else None).as_json(),
        "decisions": [_decision_json(answer) for answer in answers],
        "tasks": [
            {"task": task.id, "state": str(task.state), "node": task.node, "since": task.since, "note": task.note}
            for task in tasks
        ],
        "lost": [{"task": report.task, "cause": report.cause, "how": report.how} for report in lost],
    }


def _decision_json(answer: Answer) -> dict[str, object]:
    entry = answer.entry
    shown: dict[str, object] = {
        "slot": entry.slot,
        "at": entry.at,
        "inputs_hash": entry.inputs_hash,
        "previous": allocation_json(entry.decided.previous),
        **_entry_json(entry),
        "deferred": [
            {"role": str(item.role), "count": item.count, "nearest": item.nearest, "limit": item.limit,
             "shortfalls": as_plain(item.shortfalls), "postponed": item.postponed}
            for item in answer.deferred
        ],
        "may_use": answer.may_use,
        "given_more": [
            {"job": each.job.id, "previous": allocation_json(each.previous),
             "allocation": allocation_json(each.allocation)}
            for each in answer.grown
        ],
        "failures": [{"what": failure.what, "error": failure.error} for failure in answer.failures],
    }  # fmt: skip
    if answer.shadow is not None:
        shown["shadow"] = _entry_json(answer.shadow)
    if answer.recomputed is not None:
        shown["recomputed"] = {"same": answer.recomputed.same, "text": answer.recomputed.text}
    return shown


def _entry_json(entry: DecisionEntry) -> dict[str, object]:
    decided = entry.decided
    return {
        "policy": entry.policy,
        "policy_version": entry.policy_version,
        "allocation": allocation_json(decided.allocation),
        "reason": as_plain(decided.reason),
        "measure": entry.measure,
        "alternatives": [
            {"allocation": allocation_json(option.allocation), "score": option.score} for option in decided.alternatives
        ],
        "guarded": as_plain(decided.guarded),
    }
