"""Joining of members and start of the job: who may join, what the job is, ranks, and the time limit of the start."""

from __future__ import annotations

import time

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import ROLES, JobState, MemberState
from pslite.job.job_spec import JobSpec, differences
from pslite.net.messages import Describe, Hello, Join, Refused, Seat
from pslite.net.reliable_channel import ReliableChannel
from pslite.net.tls import VARIABLE

#: how often the user is told that the job cannot begin yet
_STILL_WAITING_SECONDS = 60.0


def objection(job: Job, hello: Hello, message: Join) -> str:
    """Return why a process may not join; empty if it may."""
    state = job.state
    if state.state in ("failed", "cancelled"):
        return f"the job is over, {state.state}: {state.reason}"
    if hello.role == "worker":
        return _mismatch(job, message.spec) if message.spec is not None else ""
    if state.all_reduce:
        return "the job's architecture is allreduce: it has no servers"
    return "" if message.address else "a server must send the address at which it accepts data connections"


def join(job: Job, hello: Hello, message: Join, line: ReliableChannel) -> MemberState:
    """Add a process to the members."""
    now = time.monotonic()
    member = MemberState(
        task=hello.task,
        role=hello.role,
        incarnation=hello.incarnation,
        host=message.host,
        pid=message.pid,
        address=message.address,
        local=message.local,
        machine=message.machine,
        channel=line,
        heard=now,
        joined=now,
        described=hello.role == "ps" or message.spec is not None,
    )
    job.state.members[hello.task] = member
    job.state.returning.pop(hello.task, None)
    if message.spec is not None:
        _adopt(job.state, message.spec)
    job.say(f"{member.title} has joined")
    job.urgent = True
    return member


def describe(job: Job, member: MemberState, message: Describe) -> None:
    """Take the job specification of a worker that has joined without one, or that adds to it."""
    if member.described:
        # the next plan has what the first worker adds (`membership_plans`); others find out if they add more
        member.spec = message.spec
        return
    reason = _mismatch(job, message.spec)
    if reason:
        job.say(f"refused {member.task}: {reason}")
        member.channel.send(Refused(reason=reason))
        return
    _adopt(job.state, message.spec)
    member.described, member.spec = True, message.spec
    job.urgent = True


def _adopt(state: JobState, spec: JobSpec) -> None:
    """The first worker that sends a job specification says what the job is."""
    if state.spec is None:
        state.describe(spec)


def _mismatch(job: Job, spec: JobSpec) -> str:
    """Return why a worker with that job specification cannot take part; empty if it can."""
    state = job.state
    if spec.architecture == "allreduce" and job.encrypt == "all":
        return (
            f"{VARIABLE} is all, which is not possible in an all-reduce job: torch (gloo) sends the gradients over "
            f"connections that are not encrypted; train with servers, or set {VARIABLE}=control"
        )
    if state.spec is not None and not spec.agrees(first := state.spec.without_late()):
        return "its script describes another job than the first worker's: " + "; ".join(differences(spec, first)[:10])
    if state.plan is not None and spec.updated_by_scripts:
        return (
            "its script updates the weights in the workers (update_on_kvstore=False), so a new worker cannot get "
            "them from the servers: only servers can be added"
        )
    return ""


def give_ranks(job: Job, now: float) -> None:
    """Tell workers that need it before they can describe the job which rank they have among how many.

    At the start all wanted tasks are waited for, and ranks go by the tasks' numbers; a later worker has the next rank.
    """
    state, target = job.state, job.state.target
    waiting = state.waiting("worker")
    if all(m.seated or m.described for m in waiting) or any(m.lost for m in waiting):
        return  # who is lost comes back in a moment, or will be known to have died
    if state.plan is None:
        late = target is None or bool(target - state.members.keys())
        if late and now - max(m.joined for m in waiting) < job.settings.grace:
            return
    ranks = [*state.workers_left(state.plan), *(m.task for m in waiting if target is None or m.task in target)]
    for member in waiting:
        if member.task in ranks and not member.seated:
            member.seat = ranks.index(member.task)
            member.channel.send(Seat(rank=member.seat, workers=len(ranks)))


def check_start(job: Job, now: float) -> None:
    """Fail the job if its first members take too long to come."""
    state, limit = job.state, job.settings.start
    if state.plan is not None:
        return
    if state.pending is None and limit is not None and now - state.began > limit:
        waiting = state.waiting()
        if {m.role for m in waiting} >= set(state.roles) and any(m.lost or not m.described for m in waiting):
            return  # it comes back in a moment, or needs more time to describe the job
        wanted = [[t for t in state.joined(role) if state.target is None or t in state.target] for role in state.roles]
        if all(wanted):
            return  # the first plan is about to be made
        missing = [ROLES[role] for role in state.roles if not state.joined(role)]
        job.fail(f"no {' and no '.join(missing) or 'wanted member'} joined within {limit:g} s")
    elif now - state.waiting_reported > _STILL_WAITING_SECONDS:
        state.waiting_reported = now
        job.say("still waiting for at least one worker and one server")
