"""Repair of all-reduce groups: one that has lost a worker, or whose members cannot reach each other, is made again."""

from __future__ import annotations

import time

from pslite.coordinator.membership import membership_plans, work_reassignment
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState, PendingPlan
from pslite.failure_rate_limits import MAX_BREAKS, Incident
from pslite.job.membership_plan import Plan
from pslite.net.messages import Broken


def lose_worker(job: Job, member: MemberState, text: str) -> None:
    """Continue without a worker from the newest version that another one has, or fail."""
    if not job.state.complete:
        job.give_up(member, text)
        _make_group(job, text, "the others go on without it; nothing is lost")
        return
    work_reassignment.lose_finished(job, member, text)


def _make_group(job: Job, what: str, then: str) -> None:
    """Make a group of all workers that are left and may have weights; fail where there is none."""
    state = job.state
    if state.pending is not None and state.pending.phase == "preparing" and not state.pending.recover:
        membership_plans.abort(job, state.pending, f"{what}; {then}")
    known = [plan for plan in (state.plan, state.pending.plan if state.pending else None) if plan is not None]
    tasks = dict.fromkeys(m.task for plan in known for m in plan.workers if state.members[m.task].present)
    state.broken = None
    if not tasks:
        job.fail(what)
        return
    job.say(f"{what}; {then}")
    state.plan_number += 1
    workers = tuple(state.members[task].plan_entry() for task in tasks)
    plan = Plan(number=state.plan_number, workers=workers, servers=(), owners=())
    membership_plans.prepare(job, PendingPlan(plan, state.plan, time.monotonic(), recover=True))
    job.urgent = True


def broke(job: Job, member: MemberState, message: Broken) -> None:
    """An exchange failed; if a worker is dead, that will be known within the time for verdicts."""
    if job.state.broken is None:
        job.state.broken = time.monotonic(), message.plan, f"{member.title} reports: {message.reason}"


def check(job: Job, now: float) -> None:
    """Make a group again that is broken, or cannot be made, although no member is dead."""
    state = job.state
    recovering = state.pending if state.pending is not None and state.pending.recover else None
    if recovering is not None and state.broken is None and recovering.refused:
        number = recovering.plan.number
        state.broken = recovering.refused, number, f"plan {number} could not be prepared"
    if state.broken is None:
        return
    since, number, why = state.broken
    in_use = recovering.plan if recovering is not None else state.plan
    if in_use is None or number < in_use.number or state.complete:
        state.broken = None  # another group has replaced it
        return
    if now - since < 1.5 * job.settings.verdict or any(member.lost for member in state.present()):
        return
    state.breaks = [*MAX_BREAKS.recent(state.breaks, now), Incident(now, state.version)]
    if MAX_BREAKS.reached(state.breaks, state.version):
        job.fail(f"workers cannot reach each other: {why}")
    else:
        _make_group(job, why, "no worker is known to have died: the workers connect again")
