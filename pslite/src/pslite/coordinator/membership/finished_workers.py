"""Workers that have the last version that they compute, and how the job continues without one of them."""

from __future__ import annotations

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState
from pslite.net.messages import Finished


def finished(job: Job, member: MemberState, message: Finished) -> None:
    """A worker has the last version that it computes."""
    member.finished, member.chief, member.finished_at = True, message.chief, member.heard
    member.finished_version = message.version
    job.state.version = max(job.state.version, message.version)


def lose_finished(job: Job, member: MemberState, text: str) -> None:
    """Continue without a worker that has the last version; fail if it was to write files and no other one can."""
    state = job.state
    member.state = "left"
    others = any(state.members[task].present for task in state.workers_left(state.plan))
    if not member.chief:
        job.say(f"{text}; it had finished")
    elif state.complete and not state.dismissed and others:
        member.chief = False
        job.say(f"{text}; it had finished, and another worker writes files")
    else:
        job.fail(f"{text}, before it had written what the script saves at its end")
