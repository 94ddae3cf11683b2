"""Failover: how a job continues when a member is lost, and which servers take over the blocks of a dead one.

The present servers say which versions they have of these blocks, the newest copy of each becomes the block, in the
plan in force and in one that is just replacing it, and workers push the present step to it again.  Where a block may
have no copy of its newest version the job goes back to its newest checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Mapping, Sequence

from pslite.coordinator import answer_sample_requests, checkpoints_and_rollback, job_completion
from pslite.coordinator.failures import allreduce_repair
from pslite.coordinator.failures.failure_detector import examine
from pslite.coordinator.membership import membership_plans
from pslite.coordinator.membership.work_reassignment import lose_worker, stop_waiting_for
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState, ServerFailover
from pslite.coordinator.state.status_report import how_it_ended
from pslite.failure_rate_limits import MAX_LOSSES, Incident
from pslite.job.job_status import TERMINATED
from pslite.job.membership_plan import Plan, holders_of
from pslite.net.messages import (
    AgentExit,
    Census,
    Commit,
    Copies,
    Failed,
    Leave,
    Promote,
    Promoted,
    Severed,
)

#: signals that a program does not usually send to itself
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


def check_members(job: Job, now: float) -> None:
    """Continue without members that are gone."""
    state = job.state
    for member in list(state.members.values()):
        if not member.present or state.members.get(member.task) is not member:
            continue  # or it is told to join again
        verdict = examine(job, member, now)
        if verdict is not None and verdict.well:
            leave(job, member)
        elif verdict is not None:
            lose(job, member, verdict.how, fatal=verdict.fatal)


def check_prepared(job: Job, now: float) -> None:
    """Give up a plan, or a group's members, where making ready for it takes too long."""
    pending, limit = job.state.pending, job.settings.prepare
    if pending is None or pending.phase != "preparing" or not pending.sent or now - pending.sent <= limit:
        return
    if not pending.recover:
        membership_plans.give_up_late(job, pending)
        return
    how = f"died or hangs: not ready for plan {pending.plan.number} within {limit:g} s"
    for task in pending.members() - pending.ready - job.state.dead.keys():
        lose(job, job.state.members[task], how)


def lose(job: Job, member: MemberState, how: str, *, fatal: bool = False) -> None:
    """Continue without a member, or fail; `fatal` where it is no accident: another process would fare no better."""
    state, pending = job.state, job.state.pending
    if not member.present or state.over:
        return
    answer_sample_requests.take_back(job, member.task)
    if member.leaving and not fatal and state.result is None:
        # its script was made to end (status of SIGTERM), and is not done
        member.finished = member.chief = False
        member.finished_at = 0.0
    separator = " " if how.startswith(("died", "violated")) else ": "
    text = f"{member.title}{separator}{how}"
    in_plan = state.plan is not None and member.task in state.plan.tasks()
    certain = pending is not None and (pending.phase == "committed" or pending.recover)
    committed = pending is not None and certain and member.task in pending.members()
    if (in_plan or committed) and member.task not in state.dead:  # the work of a dead worker is others' already
        if member.role == "worker" and not fatal:
            state.dead[member.task] = -1 if member.ended_early else state.version
            if not member.ended_early:
                fatal = _too_many_losses(job, member)
            if fatal:
                job.say(f"workers were lost {MAX_LOSSES.count} times at version {state.version}")
        if fatal:
            job.fail(text)
        elif member.role == "ps":
            lose_server(job, member, text)
        elif state.all_reduce:
            allreduce_repair.lose_worker(job, member, text)
        else:
            lose_worker(job, member, text)
        return
    job.give_up(member, text)
    job.urgent = True
    # nobody has described the job, or this one alone: nothing can come of it unless another worker joins
    newcomer = member.role == "worker" and not member.outdated
    undescribed = state.plan is None and newcomer and not state.somebody_waits_described
    if undescribed and (fatal or _too_many_losses(job, member)):
        job.fail(text)  # another one would fare no better
        return
    job.say(f"{text}; it is in no plan, the job goes on")
    if pending is not None and member.task in pending.plan.tasks():
        membership_plans.give_up(job, pending, text, set())
    if state.plan is None:
        if undescribed:
            state.describe(None)
        left = [*(other.role for other in state.waiting()), *state.coming().values()]
        if job.settings.start is not None and member.role not in left:
            job.fail(text)  # nobody starts another one


def _too_many_losses(job: Job, member: MemberState) -> bool:
    """Count the loss of a worker; return whether there were too many at this version.

    One that was ended by SIGTERM does not count where a daemon replaces it: it was preempted or cancelled, and its
    script is not the cause, however often that happens.
    """
    ended = job.state.exits.get(member.task)
    terminated = ended is not None and (ended.signal == signal.SIGTERM or ended.status == TERMINATED)
    if terminated and job.settings.start is None:
        return False
    loss = Incident(time.monotonic(), job.state.version, member.host)
    window = job.settings.lease + job.settings.verdict
    job.state.losses, too_many = count_loss(job.state.losses, loss, member.heard, window)
    return too_many


def count_loss(losses: Sequence[Incident], loss: Incident, heard: float, window: float) -> tuple[list[Incident], bool]:
    """Return the losses that count, with a worker's new one, and whether they are too many at its version.

    Workers lost at one time count as one loss, such as all workers of a host.  "At one time" means on one host within
    `window` seconds.  On another host it means that nothing was heard of the worker after the other loss was known, so
    that the work it took over cannot be the cause.
    """
    counted = MAX_LOSSES.recent(losses, loss.at)
    if not any((each.host == loss.host and loss.at - each.at <= window) or heard < each.at for each in counted):
        counted.append(loss)
    return counted, MAX_LOSSES.reached(counted, loss.version)


def failed(job: Job, member: MemberState, message: Failed) -> None:
    """A member cannot go on."""
    member.failure = message.reason
    lose(job, member, message.reason, fatal=True)


def severed(job: Job, member: MemberState, message: Severed) -> None:
    """Two members live and cannot reach each other: continue without one, a worker if one is, for nothing is lost."""
    state = job.state
    other = state.members.get(message.task)
    if other is None or not (member.present and other.present) or other.lost or member.lost:
        return  # one of them is given up already, or about to be
    pair = {member.task, other.task}
    in_force = state.plan is not None and pair <= state.plan.tasks()
    if not in_force and not (state.pending is not None and pair <= state.pending.members()):
        return  # said of a plan before: the job went back, or one of them was drained
    away, stays = (member, other) if member.role == "worker" else (other, member)
    lose(job, away, f"cannot reach {stays.title}, although both live: {message.reason}")


def leave(job: Job, member: MemberState, message: Leave | None = None) -> None:
    """A member says that it leaves, or its process has ended as it should."""
    state = job.state
    if message is not None and member.finished and not member.drained and member.task in (*job.agents, *state.exits):
        member.leaving = True  # until it is known with which status its process ends
        return
    if member.state == "active" and not member.finished and member.role == "worker":
        lose(job, member, "its process ended before the job was finished", fatal=True)
        return
    member.state = "left"
    job.urgent = True
    alone = state.state == "waiting" and state.plan is None and not state.waiting("worker")
    if alone and member.role == "worker" and not member.described and job.settings.start is not None:
        job.fail(f"{member.title}: its script ended without training anything")


def process_ended(job: Job, task: str, message: AgentExit) -> None:
    """A task agent has reported how its process ended."""
    state = job.state
    if task in state.members:
        return  # examined when its connection ends, which it does at the same time
    if message.status or message.signal:
        text = f"{task} (pid {message.pid}) {how_it_ended(message, ' before it joined')}"
    else:
        text = (
            f"{task} (pid {message.pid}): its script ended without joining the job (does it use ElasticJob, or with "
            "MXNet a kvstore of type dist_sync?)"
        )
    job.say(text)
    if state.plan is None and not state.somebody_waits_described and state.state == "waiting":
        if job.settings.start is None and task in job.lenient:
            return  # it had joined, and has ended by itself during a pause of this coordinator
        if job.settings.start is None and message.signal in _SIGNALS_FROM_OUTSIDE:
            # The script is probably not the cause. The daemon starts another process, and ends the job after too many
            # attempts: it knows from the resource manager whether this one was preempted, cancelled or lost its node.
            return
        job.fail(text)


# --- servers ----------------------------------------------------------------------------------------------------------


def lose_server(job: Job, member: MemberState, text: str) -> None:
    """Have others own the blocks of a server that died, or go back to a checkpoint."""
    state, pending = job.state, job.state.pending
    if state.result is not None:
        member.state = "left"
        job.say(f"{text}; it was no longer needed")
        return
    if pending is not None and pending.phase == "preparing":
        membership_plans.abort(job, pending, text)
    job.give_up(member, text)
    state.lost_servers[member.task] = text
    stop_waiting_for(job, {member.task})
    in_force, gone = state.plans_in_force(), tuple(state.lost_servers)
    blocks = sorted({block for plan in in_force for task in gone for block in plan.blocks_of(task)})
    state.failover = None
    if job.spec.durability == "none":
        checkpoints_and_rollback.go_back(job, text)
    elif not _knows_plan(job) or exposed(in_force, blocks, gone):
        checkpoints_and_rollback.go_back(job, f"{text}, and so did the server with its replicas")
    else:
        state.failovers += 1
        servers = set(state.servers_in_force())
        state.failover = ServerFailover(state.failovers, tuple(blocks), servers)
        job.tell(servers, Census(number=state.failovers, gone=gone, blocks=tuple(blocks)))
        job.urgent = True
        job.say(f"{text}; other servers take over its blocks")


def _knows_plan(job: Job) -> bool:
    """Whether a server is left that knows the plan in force, not only the one that is replacing it."""
    plan = job.state.plan
    return plan is not None and any(job.state.members[m.task].present for m in plan.servers)


def take_copies(job: Job, member: MemberState, message: Copies) -> None:
    """Take which versions a server has of the blocks; with the last server's their owners can be chosen."""
    state, failover = job.state, job.state.failover
    if failover is None or message.number != failover.number or failover.phase != "counting":
        return  # another server has died since
    failover.waits_for.discard(member.task)
    for block, version in message.versions.items():
        failover.copies.setdefault(block, {})[member.task] = version
    if failover.waits_for:
        return
    newest = state.pending.plan if state.pending is not None else state.plan
    assert newest is not None
    chosen = choose_owners(failover.blocks, failover.copies, newest, state.servers_in_force())
    gone = tuple(state.lost_servers)
    if chosen is None:
        checkpoints_and_rollback.go_back(
            job, f"{state.lost_servers[gone[-1]]}, and parts of the model had no replica yet"
        )
        return
    owners = {block: state.members[task].plan_entry() for block, task in chosen.items()}
    state.new_owners.update(owners)
    state.replace_servers(gone, owners)
    failover.phase = "promoting"
    failover.waits_for = {m.task for plan in state.plans_in_force() for m in plan.servers}
    for task in failover.waits_for:
        state.members[task].state = "active"  # one that was to leave may be needed for longer
    job.tell(failover.waits_for, Promote.by_block(failover.number, gone, owners))


def promoted(job: Job, member: MemberState, message: Promoted) -> None:
    """A server owns its new blocks; with the last one workers are told."""
    state, failover, pending = job.state, job.state.failover, job.state.pending
    if pending is not None:
        pending.moved.pop(member.task, None)  # said before it had other blocks
    if failover is None or message.number != failover.number or failover.phase != "promoting":
        return
    failover.waits_for.discard(member.task)
    if failover.waits_for:
        return
    gone, owners = tuple(state.lost_servers), state.new_owners
    state.failover, state.new_owners = None, {}
    job.tell(state.workers_in_force(), Promote.by_block(failover.number, gone, owners))
    if 0 in owners and pending is not None and pending.previous is not None:
        job.tell({pending.previous.owner(0).task}, Commit(plan=pending.plan.number))
    if state.digests_requested:
        job_completion.request_digests(job)
    job.urgent = True


def exposed(in_force: Sequence[Plan], blocks: Collection[int], gone: Collection[str]) -> bool:
    """Whether a block may have lost its newest version: two of those that may have it are gone.

    While one plan replaces another a replica may be old that the coming plan does without.
    """
    return any(len(frozenset[str]().union(*(holders_of(p, b) for p in in_force)) & set(gone)) > 1 for b in blocks)


def choose_owners(
    wanted: Collection[int], copies: Mapping[int, Mapping[str, int]], plan: Plan, servers: Sequence[str]
) -> dict[int, str] | None:
    """Return who owns each block whose owner is gone: who has the newest copy; None if one has no copy.

    Parameters
    ----------
    wanted
        the blocks.
    copies
        block -> server -> version of the copy that it has.
    plan
        the newest one; of equal copies that of the block's owner is chosen, then one of the plan's members.
    servers
        those that are there, in the order in which they are chosen.

    """
    members = plan.tasks()
    owners: dict[int, str] = {}
    for block in wanted:
        found, present = copies.get(block, {}), plan.owner(block).task
        newest = max(found.values(), default=-1)
        holders = [task for task in servers if found.get(task, -1) == newest >= 0]
        if not holders:
            return None
        owners[block] = max(holders, key=lambda task, present=present: (task == present, task in members))  # type: ignore[misc]
    return owners
