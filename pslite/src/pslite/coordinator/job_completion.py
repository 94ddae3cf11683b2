"""Completion of a job: all workers have its last version, the digest of the weights is known, its processes end."""

from __future__ import annotations

import time

from pslite.coordinator import checkpoints_and_rollback
from pslite.coordinator.membership import membership_plans
from pslite.coordinator.membership.work_reassignment import lose_worker
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.job.job_status import Result
from pslite.job.weight_blocks import digest_of
from pslite.net.messages import Complete, DigestRequest, Digests, Exit

#: how long the other workers of an open job may go on by themselves after one has ended its loop: mostly all do at once
_EARLY_SECONDS = 1.0
#: how long members may take to read that the job is over
GOODBYE_SECONDS = 3.0


def check(job: Job) -> str:
    """Take the next step to the end of a running job; return what is waited for, empty once it has ended."""
    state = job.state
    assert state.plan is not None
    reason = "" if state.result is not None else _reach_result(job)
    if reason:
        return reason
    workers = _workers(state)
    if not state.dismissed and not _dismiss(job, workers):
        return "the worker that writes files is told so"
    if any(w.present for w in workers):
        return "the first worker may still write its files"
    if checkpoints_and_rollback.last_one_is_written(job, time.monotonic()):
        return "the last checkpoint is being written"
    assert state.result is not None
    job.say(f"finished: {state.result.versions} versions, digest {state.result.digest or 'unknown'}")
    state.state = "finished"
    return ""


def _reach_result(job: Job) -> str:
    """Take the next step to the digest of the last version; return what is waited for, empty once it is known."""
    state, spec = job.state, job.spec
    if state.failover is not None:
        return "other servers take over the blocks of a dead one"
    reason = _open_job_goes_on(job) if spec.open else ""
    if reason:
        return reason
    pending = state.pending
    committed = pending is not None and pending.phase == "committed" and pending.stamped()
    if pending is not None and (pending.recover or (committed and not spec.open)):
        return "a plan takes effect"
    if not spec.open and not all(w.finished for w in _workers(state)):
        return "workers compute"
    if pending is not None:
        membership_plans.abort(job, pending, "the job has reached its last version")
    if not state.digests_requested:
        state.digests_requested = True
        request_digests(job)
    # of blocks whose plan was given up there are none
    if len(state.digests) < (len(state.plan.owners) if state.plan and state.plan.owners else len(state.blocks)):
        return "digests are missing"  # who has the weights may still die: no member may end yet
    state.result = Result(digest=digest_of(state.digests), versions=state.version)
    job.urgent = True  # members end from now on: whoever starts others in their place has to know before
    return ""


def _workers(state: JobState) -> list[MemberState]:
    return [state.members[task] for task in state.workers_left(state.plan)]


def _dismiss(job: Job, workers: list[MemberState]) -> bool:
    """Have one worker write files; once it knows that, all other members may end.  Returns whether they are told.

    Until then another worker takes its place if it is lost.
    """
    state = job.state
    assert state.plan is not None
    if not job.spec.open:
        chief = next((worker for worker in workers if worker.chief), None)
        if chief is None:
            chief = next(worker for worker in workers if worker.present)
            chief.chief = True
            chief.channel.send(Complete(chief=chief.task))
        if chief.present and chief.channel.unconfirmed:
            return False
        job.tell({worker.task for worker in workers} - {chief.task}, Complete(chief=chief.task))
    state.dismissed = True
    job.tell({m.task for m in state.plan.servers}, Exit(reason="the job is finished"))
    for member in state.members.values():
        if member.state == "joined":
            member.dismiss("the job is finished")
    return True


def request_digests(job: Job) -> None:
    """Have servers send the digests of their blocks; where workers have the weights, they have sent them."""
    state = job.state
    assert state.plan is not None
    if state.all_reduce:
        return
    state.digests.clear()  # of blocks that others had, which may have been different in async mode
    job.tell({m.task for m in state.plan.servers}, DigestRequest(version=state.version))


def take_digests(job: Job, member: MemberState, message: Digests) -> None:
    """Take digests of final weights; every replica must have the same."""
    for block, digest in message.blocks.items():
        if job.state.digests.setdefault(block, digest) != digest:
            job.fail(f"{member.title} has other final weights in block {block} than another worker")
            return


# --- open jobs: each worker's script decides when its loop ends -------------------------------------------------------


def _open_job_goes_on(job: Job) -> str:
    """Have an open job end once the first worker's script has ended; return why it goes on, empty if it does not."""
    state = job.state
    workers = _workers(state)
    chiefs = [worker.finished_version for worker in workers if worker.chief and not worker.present]
    if not chiefs:
        _release_early(job, workers)
        return "the first worker's script has not ended"
    version, pending = max(chiefs), state.pending
    if pending is not None and pending.phase == "committed" and pending.previous and 0 <= pending.first <= version:
        # no later plan takes effect
        if not pending.all_moved():
            return "parameters move"
        state.plan, state.pending = pending.plan, None
        workers = _workers(state)
    elif pending is not None and pending.phase == "committed" and (pending.first > version or not pending.stamped()):
        # it does not take effect any more; workers that it would have removed end as the others
        membership_plans.abort(job, pending, "the first worker's script has ended")
    for worker in workers:
        if worker.state == "active" and not worker.finished:
            worker.state = "draining"
            reason = "the first worker's script has ended, and so has the job"
            worker.channel.send(Exit(reason=reason, version=version))
    return "" if all(worker.finished or not worker.present for worker in workers) else "workers end their loops"


def _release_early(job: Job, workers: list[MemberState]) -> None:
    """Continue without workers of an open job whose loops ended before the first one's."""
    now = time.monotonic()
    for worker in workers:
        early = worker.finished and not worker.present
        if early and now - worker.finished_at >= _EARLY_SECONDS and job.state.plan:
            worker.finished = False
            job.state.dead[worker.task] = -1
            lose_worker(job, worker, f"{worker.title}: its script has ended")
