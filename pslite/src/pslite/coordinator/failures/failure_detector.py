"""Failure detector: when a member that is silent, disconnected or whose process has ended is given up."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState
from pslite.coordinator.state.status_report import how_it_ended
from pslite.job.job_status import TERMINATED
from pslite.net.messages import AgentExit


@dataclass(frozen=True)
class Verdict:
    """That a member is gone."""

    how: str
    #: its process has ended as it should
    well: bool = False
    #: it is no accident: another process would fare no better
    fatal: bool = False


def examine(job: Job, member: MemberState, now: float) -> Verdict | None:
    """Return that a member is gone, and how; None while it is there, or may come back.

    A member is lost when its connection ends, or when it is silent for the time of a lease.  Once a task agent has
    reported how its process ended that is how it is gone.  Until then it is waited for: `settings.verdict`, for a
    worker that has left the time of a lease, a tenth of that for a task without an agent, and longer after a pause of
    this coordinator.
    """
    settings = job.settings
    silent = not member.lost and now - member.heard > settings.lease
    if silent:
        member.lost = now - settings.verdict
        member.lost_how = f"died or hangs: silent for {settings.lease:g} s"
    ended = job.state.exits.get(member.task)
    if ended is not None and (member.lost or member.channel.channel is None):
        if _ended_well(member, ended):
            return Verdict("its process has ended", well=True)
        # while this coordinator is paused, members end since they cannot reach it: that is no failure of the script
        accident = ended.signal or ended.status == TERMINATED or member.task in job.lenient
        return Verdict(how_it_ended(ended), fatal=not accident)
    if not member.lost:
        return None
    patience = settings.lease if member.leaving else settings.verdict
    until = member.lost + patience * (1.0 if member.task in job.agents else 0.1)
    if member.task in job.lenient:
        until = max(until, job.lenient_until)
    if not silent and now < until:
        return None
    if member.leaving:
        return Verdict("its script has ended", well=True)
    return Verdict(member.lost_how or "died: its connection ended, and no dl2-run reported how its process ended")


def _ended_well(member: MemberState, ended: AgentExit) -> bool:
    if member.leaving:
        return ended.status == 0  # a signal came when its script was done
    return ended.status == 0 and not ended.signal and (member.finished or member.state in ("joined", "draining"))


def be_lenient(job: Job, now: float) -> None:
    """Give members that have lost this coordinator for a while the time of a lease to come back."""
    if now >= job.lenient_until:
        job.lenient_until = now + job.settings.lease
    job.lenient = frozenset(job.state.members)
    job.reconnected.clear()


def take_back(job: Job, member: MemberState) -> None:
    """A member has connected again; it may be gone already that has asked for that, and ask once more."""
    member.heard, member.lost, member.lost_how = time.monotonic(), 0.0, ""
    job.reconnected.add(member.task)


def heard(job: Job, member: MemberState) -> None:
    """A member has sent a message: one that was taken back knows so, and has died when it is lost once more."""
    member.heard = time.monotonic()
    # one whose connection has lasted through the pause does not connect again
    if member.task in job.reconnected or member.heard >= job.lenient_until:
        job.reconnected.discard(member.task)
        job.lenient -= {member.task}
