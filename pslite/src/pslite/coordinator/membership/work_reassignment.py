"""Work of dead workers: others push their part of the step under way, and of those until the next plan.

Workers that have the last version that they compute have finished; the job continues without one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pslite.coordinator import checkpoints_and_rollback
from pslite.coordinator.membership import membership_plans
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState, Reassignment
from pslite.job.membership_plan import Plan, reduction
from pslite.net.messages import Finished, Reassign, Reassigned


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


def lose_worker(job: Job, member: MemberState, text: str) -> None:
    """Have others do the part of a worker that died, or go back to a checkpoint.

    Where another worker is left nothing is done twice: what the dead one pushed counts, and what it did not push of
    the present version others compute again.  The plan stays in force until the next one, which is made without it.
    """
    state = job.state
    if member.finished and (state.complete or job.spec.open):
        lose_finished(job, member, text)
        return
    if state.pending is not None and state.pending.phase == "preparing":
        membership_plans.abort(job, state.pending, text)
    if not state.workers_in_force() - state.away() - state.dead.keys():
        for other in state.members.values():
            other.away = False  # nobody trains any more: the barrier opens, and they go on
    only_copy = has_only_copy(job, member)
    given = None if only_copy else share_out_all(job)
    if given is None:
        text = text if only_copy else f"{text}; it was the last worker"
        job.give_up(member, text)
        checkpoints_and_rollback.go_back(job, text)
        return
    others = sorted({task for nodes in given.values() for task in nodes.values()})
    names, several = " and ".join(others), len(others) > 1
    if job.spec.asynchronous:
        how = "its samples are left out until the next plan"
    elif job.spec.open:
        how = f"the {'gradients' if several else 'gradient'} of {names} {'count' if several else 'counts'} in its place"
    else:
        how = f"{names} {'do' if several else 'does'} its part, nothing is lost"
    job.say(f"{text}; {how}")
    if member.ended_early:
        member.state = "left"
    else:
        job.give_up(member, text)
    _reassign(job, given)


def _reassign(job: Job, given: dict[int, dict[int, str]]) -> None:
    """Tell servers, and then workers, who pushes the tree nodes of those that are dead or away."""
    state = job.state
    state.reassigned = given
    state.reassignments += 1
    servers = set(state.servers_in_force())
    state.reassignment = Reassignment(state.reassignments, servers)
    job.tell(
        servers,
        Reassign(
            number=state.reassignments,
            gone=tuple(state.dead),
            nodes={number: tuple(nodes) for number, nodes in given.items()},
            away=tuple(state.away()),
        ),
    )
    _tell_workers(job)
    job.urgent = True


def set_away(job: Job, tasks: Collection[str]) -> None:
    """Have others do the part of these workers, which wait at a barrier, and of no other ones that are alive.

    In open jobs alone.  Not where workers have weights that servers do not have: who was away could not go on.
    """
    state, spec = job.state, job.state.spec
    before = state.away()
    if tasks == before or state.failover is not None or state.over or spec is None:
        return
    if not spec.open or spec.asynchronous or spec.updated_by_scripts:
        return
    for member in state.members.values():
        member.away = member.task in tasks
        member.missed_steps = member.missed_steps or member.away
    given = share_out_all(job)
    if given is None:
        for member in state.members.values():
            member.away = member.task in before
        return
    if tasks:
        waits, them = ("waits", "it") if len(tasks) == 1 else ("wait", "them")
        job.say(f"{' and '.join(sorted(tasks))} {waits} at a barrier; the others train on without {them}")
    else:
        job.say("all workers are at the barrier")
    _reassign(job, given)


def share_out_again(job: Job) -> None:
    """Have others do the part of workers that are away under a plan that has just been committed, too."""
    given = share_out_all(job) if job.state.away() else None
    if given is not None:
        _reassign(job, given)


def has_only_copy(job: Job, member: MemberState) -> bool:
    """Whether this dead worker may be the only one that had the initial weights, which it sends to the servers."""
    pending = job.state.pending
    if pending is None or pending.phase == "preparing" or pending.previous is not None:
        return False
    # a worker that has pushed has had all of them from the servers
    return pending.plan.workers[0].task == member.task and not pending.pushed and not pending.all_moved()


def share_out_all(job: Job) -> dict[int, dict[int, str]] | None:
    """Return by plan which worker pushes each tree node of a dead one; None where no worker is left."""
    state, shared = job.state, {}
    for plan in (state.plan, state.pending.plan if state.pending is not None else None):
        if plan is not None:
            given = share_out(job, plan, state.reassigned.get(plan.number, {}))
            if given is None:
                return None
            shared[plan.number] = given
    return shared


def share_out(job: Job, plan: Plan, before: dict[int, str]) -> dict[int, str] | None:
    """Return which worker of a plan pushes each tree node of those that are dead or away; None where none is left.

    Who has begun with a node keeps it.  Workers that stay in the next plan come first: the others may have left.
    """
    state, pending, away = job.state, job.state.pending, job.state.away()
    there = [task for task in state.workers_left(plan) if state.members[task].present and task not in away]
    leaving = pending.leavers() if pending is not None else set()
    willing = [task for task in there if task not in leaving] or [
        task for task in there if pending is None or task not in pending.drained
    ]
    how = reduction(job.spec, len(plan.workers), plan.shares)
    nodes = [
        node
        for member, own in zip(plan.workers, how.nodes, strict=True)
        if member.task in state.dead or member.task in away
        for node in own
    ]
    if not nodes:
        return {}
    if not willing and pending is not None:
        if plan.number != pending.plan.number and pending.pushed:
            return {}  # who has pushed under the next plan has the last version of this one
        if plan.number == pending.plan.number and not away.isdisjoint(state.workers_left(plan)):
            return {}  # the barrier opens when those that leave have taken the last step before this plan
    if not willing:
        return None
    given = {node: task for node, task in before.items() if task in willing and node in nodes}
    load = Counter(given.values())
    for node in nodes:
        if node not in given:
            given[node] = min(willing, key=lambda task: load[task])
            load[given[node]] += 1
    return given


def taken_over(job: Job, member: MemberState, message: Reassigned) -> None:
    """A server accepts reassigned nodes."""
    current = job.state.reassignment
    if current is not None and message.number == current.number:  # else another worker has died since
        stop_waiting_for(job, {member.task})


def stop_waiting_for(job: Job, servers: Collection[str]) -> None:
    """Wait no longer for servers that accept the reassignment, or are gone, or to which no worker pushes any more."""
    if job.state.reassignment is not None:
        job.state.reassignment.waits_for.difference_update(servers)
        _tell_workers(job)


def _tell_workers(job: Job) -> None:
    """Once all servers accept reassigned nodes, tell workers what they do in place of others."""
    state, current = job.state, job.state.reassignment
    if current is None or current.waits_for:
        return
    state.reassignment = None
    for task in state.workers_in_force():
        nodes = {
            plan: tuple(node for node, other in given.items() if other == task)
            for plan, given in state.reassigned.items()
        }
        job.tell({task}, Reassign(number=current.number, gone=tuple(state.dead), nodes=nodes))
