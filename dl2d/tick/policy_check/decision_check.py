"""Check of a decision: complete, within bounds, and nothing in it that cannot be carried out or recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision, JobDecision, Reason
from dl2d.core.errors import PolicyError
from dl2d.core.jobs import NOTHING, TASK_ROLES, Allocation, JobKey


def check_decision(decision: Decision, snapshot: Snapshot) -> None:
    """Check that a decision is complete, within bounds, and about jobs and nodes of the snapshot.

    Every job has one allocation of whole numbers, within its bounds and not below its floor. Scores and amounts are
    finite: others mean that the numbers of a learned policy have overflowed. The named jobs and nodes exist.

    Raises
    ------
    PolicyError
        The decision is not valid; names the job and what is wrong. Nothing of such a decision is used.
    """
    decided = {entry.job: entry.allocation for entry in decision.jobs}
    if len(decided) != len(decision.jobs) or decided.keys() != {job.key for job in snapshot.jobs}:
        unknown = sorted(key.slug for key in decided.keys() - {job.key for job in snapshot.jobs})
        names = f"; it named jobs that do not wait or run here: {', '.join(unknown[:5])}" if unknown else ""
        raise PolicyError(f"policy {decision.policy} did not decide for every job exactly once{names}")
    floors = dict(snapshot.floors)
    for job in snapshot.jobs:
        workers, ps = decided[job.key]
        request, floor = job.request, floors.get(job.key, NOTHING)
        whole = type(workers) is int and type(ps) is int
        in_bounds = whole and (
            (request.allows(workers) and request.min_ps <= ps <= request.max_ps) or (workers, ps) == NOTHING
        )
        if not in_bounds or workers < floor.workers or ps < floor.ps:
            counts = ", ".join(map(str, request.allowed_workers)) or f"{request.min_workers} to {request.max_workers}"
            raise PolicyError(
                f"policy {decision.policy} gave job {job.key.id} {_shown(decided[job.key])}; it may have {counts} "
                f"workers and {request.min_ps} to {request.max_ps} PSs, or {NOTHING}, and not less than {floor}"
            )
    for entry in decision.jobs:
        if problem := next(_problems(entry), ""):
            raise PolicyError(f"policy {decision.policy} gave job {entry.job.id} {problem}")
    _check_names(decision, snapshot)


def _shown(allocation: Allocation) -> str:
    workers, ps = allocation
    return f"{workers!r}w+{ps!r}ps"


def _problems(entry: JobDecision) -> Iterator[str]:
    for alternative in entry.alternatives:
        if not _finite(alternative.score):
            yield (
                f"an alternative {alternative.allocation} with score {alternative.score!r}, "
                "which is not a finite number"
            )
        if any(type(count) is not int or count < 0 for count in alternative.allocation):
            yield f"an alternative {_shown(alternative.allocation)}, which is no allocation"
    reasons: tuple[object, ...] = (entry.reason, *entry.guarded)
    for reason in reasons:
        if not isinstance(reason, Reason):
            yield f"a reason {reason!r}, which is not a Reason"
            return
        for short in reason.shortfalls:
            if not (_finite(short.wanted) and _finite(short.had)):
                yield f"a shortfall of {short.resource} with amounts that are not finite numbers"


def _finite(number: object) -> bool:
    """Whether a number is finite and can be recorded; subclasses of ``float``, as numpy has them, cannot."""
    return type(number) in (int, float) and math.isfinite(number)  # type: ignore[arg-type]


def _check_names(decision: Decision, snapshot: Snapshot) -> None:
    """Jobs and nodes that the optional parts of a decision name exist, and amounts are whole and not negative."""
    keys = {job.key for job in snapshot.jobs}
    if decision.nodes:
        known = {node.name for node in snapshot.nodes}
        for key, role, node in decision.nodes:
            if key not in keys or node not in known or role not in TASK_ROLES:
                raise PolicyError(
                    f"policy {decision.policy} wants a {role} of job {_name(key)} on {node!r}, and there is no such "
                    f"{'job' if key not in keys else 'node' if node not in known else 'role'}"
                )
    for key, increment in decision.actions:
        if key not in keys or any(type(count) is not int or count < 0 for count in increment):
            raise PolicyError(
                f"policy {decision.policy} gave job {_name(key)} an increment {_shown(increment)}, "
                f"{'which is no allocation' if key in keys else 'and there is no such job'}"
            )


def _name(key: JobKey) -> str:
    return str(getattr(key, "id", key))
