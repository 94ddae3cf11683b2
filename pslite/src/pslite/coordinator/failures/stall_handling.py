"""Stall handling: what the coordinator does if the version of a job does not change for too long.

The deadline is learned from the job's own steps (`ProgressRule`).  When it has passed, every member writes the stacks
of its threads to its log, and answers whether its script computes and for which members it waits.  The member for which
the others wait is given up as if it had died, so that another process takes its place.  The second time within a day
the job fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pslite.coordinator import checkpoints_and_rollback
from pslite.coordinator.failures.failover import lose
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.failure_rate_limits import MAX_STALLS, Incident
from pslite.net.messages import DumpStacks, Stacks

#: how long members may take to answer what they do, in seconds
_ANSWER_SECONDS = 5.0


class Stuck(NamedTuple):
    """A member that holds the others up, and how, in words that follow its name."""

    task: str
    how: str


def check(job: Job, now: float) -> None:
    """Check whether the job makes progress; if it has made none for too long, find out why, and act."""
    state, watch = job.state, job.watch
    _give_up_undescribed(job, now)
    if not _expects_progress(state):
        watch.rest(now)
        return
    assert state.plan is not None
    # a plan that takes effect, or work that others take over, is progress of its own
    watch.note(now, state.version, (state.plan.number, state.failovers, state.reassignments, len(state.rollbacks)))
    limit = watch.deadline(job.settings.progress)
    if not limit or now - watch.since <= limit:
        return
    if not watch.asked:
        watch.asked = now
        watch.answers.clear()
        job.say(
            f"no progress for {limit:.0f} s: the job is still at version {state.version}; its tasks write their stacks "
            "to their logs"
        )
        job.tell(state.members, DumpStacks())
    elif watch.answers.keys() >= _answering(state) or now - watch.asked > _ANSWER_SECONDS:
        _act(job, now, limit)


def take_stacks(job: Job, member: MemberState, message: Stacks) -> None:
    """Take a member's answer."""
    if job.watch.asked:
        job.watch.answers[member.task] = message


def _give_up_undescribed(job: Job, now: float) -> None:
    """Give up workers whose scripts have not described the model in time: others may wait for them."""
    limit = job.settings.progress.first
    for member in job.state.waiting("worker") if limit else ():
        if not member.described and now - member.joined > limit:
            member.hung = (
                f"its script has not created its ElasticJob (or given the KVStore its keys) within {limit:g} s after "
                "the task joined"
            )
            lose(job, member, f"died or hangs: {member.hung}")


def _expects_progress(state: JobState) -> bool:
    if state.state != "running" or state.plan is None or state.digests_requested:
        return False
    workers = [state.members[task] for task in state.workers_left(state.plan)]
    return any(worker.present and not worker.finished for worker in workers)


def _answering(state: JobState) -> set[str]:
    plans = [*state.plans_in_force(), *([state.pending.plan] if state.pending is not None else [])]
    return {task for plan in plans for task in plan.tasks()} & state.present_tasks() - state.dead.keys()


def _act(job: Job, now: float, limit: float) -> None:
    """Give up the members that hold the job up, or fail."""
    state = job.state
    found = stuck_members(state.version, _workers(state), job.watch.answers)
    reason = f"no progress at version {state.version} for {limit:.0f} s"
    text = f"{reason}: " + (
        "; ".join(f"{state.members[each.task].title} {each.how}" for each in found) or "no member says why"
    )
    job.watch.rest(now)
    state.stalls = [*MAX_STALLS.recent(state.stalls, now), Incident(now, state.version)]
    if len(state.stalls) >= MAX_STALLS.count:
        for each in found:
            state.members[each.task].hung = f"{reason}: it {each.how}"
        job.fail(f"{text}; this happened before within {MAX_STALLS.seconds / 3600:g} h")
        return
    everybody = {each.task for each in found} >= set(_workers(state))
    if state.all_reduce and not found:
        # perhaps two of them cannot reach each other: a new group connects them again
        state.broken = state.broken or (now, state.plan.number if state.plan is not None else 0, text)
    elif everybody or not found:
        # nobody would be left, or nobody is known to hang: all processes begin again
        checkpoints_and_rollback.go_back(job, text)
    else:
        for each in found:
            member = state.members[each.task]
            if member.present and not state.over:
                member.hung = f"{reason}: it {each.how}"
                lose(job, member, f"died or hangs: {reason}: it {each.how}")


def _workers(state: JobState) -> list[str]:
    return [task for task in state.workers_left(state.plan) if not state.members[task].finished]


def stuck_members(version: int, workers: list[str], answers: Mapping[str, Stacks]) -> list[Stuck]:
    """Return the members that hold a job up, by the answers of all; none if the answers do not tell.

    Parameters
    ----------
    version
        the job's present version.
    workers
        those of the plan in force that have not finished; all others are servers.
    answers
        by task.

    """
    silent = [Stuck(task, "does not answer") for task in workers if task not in answers]
    if silent:
        return silent
    computing = [task for task in workers if answers[task].computes]
    if computing:
        how = "has been computing step {} since then, at {}"
        return [Stuck(task, how.format(version, answers[task].place)) for task in computing]
    waits = {task: answers[task].waits_for for task in workers}
    # a worker and a server that wait for each other: the worker is given up, since nothing is lost with it; or the
    # server, if it and every worker wait for each other
    pairs = [(task, server) for task in workers for server in waits[task] if _waits(answers, server, task)]
    for server in dict.fromkeys(server for _, server in pairs):
        if len(workers) > 1 and {(task, server) for task in workers} <= set(pairs):
            return [Stuck(server, "does not take what workers push")]
    if pairs:
        how = "and {} wait for each other: no data arrives between them"
        return [Stuck(task, how.format(server)) for task, server in dict(pairs).items()]
    servers = dict.fromkeys(server for task in workers for server in waits[task])
    for server in servers:
        idle = [task for task in workers if _waits(answers, server, task) and not waits[task]]
        if idle:
            return [Stuck(task, f"waits at a barrier, and {server} for its part of the step") for task in idle]
        others = [other for other in (answers[server].waits_for if server in answers else ()) if other not in workers]
        return [Stuck(others[0] if others else server, "does not answer")]
    return []


def _waits(answers: Mapping[str, Stacks], task: str, other: str) -> bool:
    return task in answers and other in answers[task].waits_for
