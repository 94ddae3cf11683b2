"""Plans: who becomes a member when; prepared by their members, committed, followed until done, or given up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.coordinator_settings import Settings
from pslite.coordinator.state.job_state import JobState, MemberState, PendingPlan
from pslite.coordinator.state.status_report import await_steps, report_slow_members
from pslite.job.job_status import PlanReport, Suspension
from pslite.job.membership_plan import Plan, make_plan, next_members
from pslite.net.messages import (
    Abort,
    Announced,
    Begin,
    Commit,
    Drained,
    JobEnded,
    Moved,
    Nack,
    PlanDone,
    Prepare,
    Publish,
    Published,
    Pushed,
    Ready,
)

#: how long the next plan waits after one was given up: the first, doubled with each, up to the second
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 30.0

PlanMessage = Ready | Publish | Nack | Announced | Pushed | Drained | Moved


# --- which plan is next -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Who should be the members of the next plan."""

    workers: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    #: tasks to be dismissed, and why
    unwanted: dict[str, str] = field(default_factory=dict)
    #: wanted tasks of which the job can use no more
    spare: set[str] = field(default_factory=set)
    #: why no plan can be made now; empty if one can
    objection: str = ""


def choose_members(state: JobState) -> Choice:
    """Return who should be the members, from who is there, who is wanted, and who has to stay."""
    spec, plan, target = state.spec, state.plan, state.target
    if spec is None:
        return Choice(objection="no worker has described the job")
    if state.digests_requested:
        return Choice(objection="the job has reached its last version")
    if state.reply is None and plan is None:
        return Choice(objection="it is not known which tasks are wanted")
    if state.reassignment is not None:
        return Choice(objection="servers are told who does the work of a dead worker")
    joined = [task for role in ("worker", "ps") for task in state.joined(role)]
    no_servers = "the job's architecture is allreduce: it has no servers"
    unwanted = dict.fromkeys(state.joined("ps") if state.all_reduce else (), no_servers)
    if target is not None:
        unwanted |= dict.fromkeys(state.once_wanted.intersection(joined) - target, "no longer wanted")
    having_weights = state.workers_left(plan)
    workers = next_members(
        having_weights, [t for t in state.joined("worker") if t not in unwanted], target, spec.shards
    )
    servers = next_members(
        [m.task for m in plan.servers] if plan else [],
        [t for t in state.joined("ps") if t not in unwanted],
        target,
        len(state.blocks),
    )
    if not workers or not (servers or state.all_reduce):
        return Choice(unwanted=unwanted, objection="there is not a member for each role")
    # of blocks that are added only workers have the weights
    servers_lack_weights = state.all_reduce or adds_blocks(state)
    if servers_lack_weights and having_weights and not set(workers) & set(having_weights):
        # one that has the weights stays until the newcomers have them
        workers = (having_weights[0], *workers)[: None if state.all_reduce else spec.shards]
    elif state.extended is not None and having_weights[0] not in workers:
        # others may not have got to the keys that the first worker adds: it leaves with the plan after that
        workers = (having_weights[0], *workers)[: spec.shards]
    spare = {t for t in joined if t not in unwanted and (target is None or t in target)} - {*workers, *servers}
    return Choice(workers, servers, unwanted, spare)


def adds_blocks(state: JobState) -> bool:
    """Whether the next plan has blocks that the plan in force does not have: keys of a script that come late."""
    if state.plan is None or state.all_reduce:
        return False
    return state.extended is not None or not state.plan.has(len(state.blocks) - 1)


def reason_to_wait(state: JobState, settings: Settings, now: float) -> str:
    """Return why a plan should wait for wanted tasks that have not joined, so that one serves all; empty if not."""
    joined = {task for role in state.roles for task in state.joined(role)}
    present = state.plan.tasks() if state.plan is not None else set()
    if not present and any(m.seated and not m.described for m in state.waiting()):
        return "a worker that has a rank has not described the job"
    if state.target is not None:
        gone = {task for task, member in state.members.items() if not member.present} | state.exits.keys()
        if not state.target - joined - present - gone:
            return ""
    elif present:
        return ""
    if present:
        newest = max((state.members[task].joined for task in joined), default=0.0)
        return "wanted tasks may join soon" if now - max(newest, state.target_changed) < settings.settle else ""
    complete = max(min(state.members[task].joined for task in state.joined(role)) for role in state.roles)
    return "wanted tasks may join soon" if now - complete < settings.grace else ""


def consider(job: Job, now: float) -> str:
    """Start a plan if the members or their work should change; return why not, empty if one was started."""
    state, plan = job.state, job.state.plan
    choice = choose_members(state)
    for task, reason in choice.unwanted.items():
        state.members[task].dismiss(reason)
    if choice.objection:
        return choice.objection
    _report_spare(job, choice.spare)
    # of blocks whose server has died there is one copy, until a plan gives them another
    exposed = plan is not None and len(choice.servers) > 1 and -1 in plan.backups
    same = plan is not None and plan.tasks() == {*choice.workers, *choice.servers}
    adds = adds_blocks(state)
    if same and not adds and not exposed and not _rebalance(job, now):
        return "members and their work stay as they are"
    if now < state.retry_at:
        return "a plan was given up a moment ago"
    # workers that add blocks wait for them
    reason = "" if adds else reason_to_wait(state, job.settings, now)
    if not reason:
        _begin(job, now, choice)
    return reason


def _report_spare(job: Job, spare: set[str]) -> None:
    state = job.state
    for task in sorted(spare - state.spare):
        job.say(
            f"{task} waits: the job has {state.spec.shards if state.spec else 0} shards for workers and "
            f"{len(state.blocks)} blocks for servers, it can use no more of them"
        )
    state.spare = spare


def _rebalance(job: Job, now: float) -> bool:
    """Whether members that differ in speed should do other parts of the work; the next plan then has them."""
    state, balance = job.state, job.balance
    plan, spec = state.plan, job.spec
    if plan is None or any(state.members[task].state != "active" for task in plan.tasks()):
        return False
    shards = 0 if spec.open or state.all_reduce else spec.shards
    left = spec.total_versions - state.version
    proposal = balance.consider(now, plan, shards, [block.nbytes for block in state.blocks], left)
    report_slow_members(job)
    if proposal is None:
        return False
    job.say(f"{proposal.reason}, for a step {proposal.gain:.0%} shorter")
    job.urgent = True
    return True


def _begin(job: Job, now: float, choice: Choice) -> None:
    """Make the plan, and have its members make ready for it."""
    state, division = job.state, job.balance.division
    workers, servers = choice.workers, choice.servers
    first = state.members[workers[0]].spec
    if state.plan is None and first is not None:
        # open jobs: the others' may say another optimizer, made of their rank, say
        state.describe(first)
    if state.extended is not None:
        state.describe(state.extended)
    state.plan_number += 1
    plan = make_plan(
        state.plan_number,
        () if state.all_reduce else state.blocks,
        [state.members[task].plan_entry() for task in workers],
        [state.members[task].plan_entry() for task in servers],
        state.plan,
        replicas=job.spec.durability != "none",
        shares=() if state.all_reduce else division.shares(job.spec.shards, workers),
        speeds=division.speeds(servers),
    )
    job.say(f"plan {plan.number}: {len(workers)} workers, {len(servers)} servers")
    prepare(job, PendingPlan(plan, state.plan, now))


def prepare(job: Job, pending: PendingPlan) -> None:
    """Have the members of a plan make ready for it."""
    state = job.state
    state.pending = pending
    for task in pending.members():
        state.members[task].prepared = True
    job.tell(
        pending.members(),
        Prepare(
            plan=pending.plan,
            previous=pending.previous,
            spec=job.spec,
            recover=pending.recover,
            fresh=not state.begun,
            progress_seconds=job.watch.longest(job.settings.progress),
        ),
    )

    def note() -> None:
        pending.sent = time.monotonic()

    job.then(note)


# --- a plan on its way ------------------------------------------------------------------------------------------------


def take(job: Job, member: MemberState, message: PlanMessage) -> None:
    """Take what a member says about the pending plan."""
    pending = job.state.pending
    if pending is None or message.plan != pending.plan.number:
        return  # about a plan that was given up meanwhile
    match message:
        case Ready():
            pending.ready.add(member.task)
        case Publish():
            published = Published(plan=message.plan, key=message.key, value=message.value)
            job.tell({m.task for m in pending.plan.workers} - {member.task}, published)
        case Nack():
            _refused(job, pending, member, message)
        case Announced() if message.first < 0:
            abort(job, pending, "the job ends before the plan could take effect")
        case Announced():
            pending.first = message.first
        case Pushed():
            pending.pushed[member.task] = message.suspension_ms
        case Drained():
            pending.drained.add(member.task)
        case Moved():
            pending.moved[member.task] = message


def _refused(job: Job, pending: PendingPlan, member: MemberState, message: Nack) -> None:
    """A member cannot take part in a plan: give it up, without the member that is at fault if that is known."""
    state = job.state
    if pending.recover:
        # another member is gone, most likely, which will be known soon
        pending.refused = pending.refused or time.monotonic()
        job.say(f"{member.title} cannot take part in plan {message.plan}: {message.reason}")
        return
    fault = {message.about} & pending.newcomers() or {member.task}
    if message.about in pending.members() - fault:
        lost = state.members[message.about].channel.channel is None
        if lost or member.task not in state.doubted:
            # perhaps the other one has just died, which is not known yet; one whose connection is lost may have
            state.doubted.add(member.task)
            fault = set()
    give_up(job, pending, f"{member.title} cannot take part: {message.reason}", fault)


def commit(job: Job, pending: PendingPlan) -> None:
    """Have a plan take effect for which all members are ready."""
    state = job.state
    plan, previous = pending.plan, pending.previous
    pending.phase = "committed"
    pending.prepared_ms = (time.monotonic() - pending.began) * 1e3
    present = state.present_tasks()
    for task in (pending.previous_tasks() - plan.tasks()) & present:
        state.members[task].state = "draining"
    for task in plan.tasks() & present:  # a worker that had finished may have left meanwhile
        state.members[task].state = "active"
    job.urgent = True
    if previous is None:
        pending.first = max(0, pending.first)
        if plan.servers:
            checkpoint = state.checkpoint if state.rollbacks else -1
            job.tell({plan.workers[0].task}, Begin(plan=plan.number, checkpoint=checkpoint))
        _put_in_force(job, plan)
        state.state = "running"
    elif not pending.recover:
        announcer = previous.owner(0) if previous.servers else previous.workers[0]
        job.tell({announcer.task}, Commit(plan=plan.number))


def _put_in_force(job: Job, plan: Plan) -> None:
    job.state.plan = plan
    job.balance.begin(time.monotonic(), plan)


def follow(job: Job, pending: PendingPlan) -> Collection[str] | None:
    """See a committed plan through; return the tasks that it has removed once it is done, None until then."""
    state = job.state
    plan, previous = pending.plan, pending.previous
    all_moved = pending.all_moved()
    # nor has one that waits at a barrier: it takes up the newest plan when that opens, or is told to end now
    leavers = pending.leavers() - state.dead.keys() - state.away()
    # a worker that has finished has nothing to push: the job went on from its last version
    stayers = {task for task in state.workers_left(plan) if not state.members[task].finished} - state.away()
    if not all_moved or not pending.drained >= leavers or not pending.pushed.keys() >= stayers:
        return None
    state.reassigned.pop(previous.number if previous else 0, None)
    _put_in_force(job, plan)
    state.pending = None
    state.given_up = 0
    state.doubted.clear()
    _report(job, pending)
    job.tell(plan.tasks(), PlanDone(plan=plan.number))
    before = () if previous is None else previous.workers
    await_steps(job, plan.number, stayers & {member.task for member in before})
    removed = pending.previous_tasks() - plan.tasks()
    for task in removed:
        state.members[task].drain()
    del job.progress[:-1]  # what was measured belongs to another size
    job.urgent = True
    return removed


def _report(job: Job, pending: PendingPlan) -> None:
    state, plan = job.state, pending.plan
    waits = [ms for ms in pending.pushed.values() if ms is not None]
    state.suspensions += waits
    report = PlanReport(
        number=plan.number,
        first_version=pending.first,
        workers=len(plan.workers),
        servers=len(plan.servers),
        added=sorted(pending.newcomers()),
        removed=sorted(pending.previous_tasks() - plan.tasks()),
        moved_bytes=sum(m.sent_bytes for m in pending.moved.values()),
        prepare_ms=round(pending.prepared_ms, 3),
        move_ms=round(max((m.move_ms for m in pending.moved.values()), default=0.0), 3),
        suspension_ms=Suspension(
            p50=round(statistics.median(waits), 3) if waits else 0.0, max=round(max(waits, default=0.0), 3)
        ),
    )
    state.reports.append(report)
    state.begun = True
    kept = sum(place >= 0 for place in plan.backups)
    replicas = f", replicas of {kept} of {len(plan.backups)} blocks" if plan.backups else ""
    job.say(
        f"plan {report.number} done at version {report.first_version}: {report.workers} workers, "
        f"{report.servers} servers, moved {report.moved_bytes / 1e6:.1f} MB in {report.move_ms:.0f} ms, "
        f"suspension {report.suspension_ms.p50:.2f} ms (max {report.suspension_ms.max:.2f}){replicas}"
    )


# --- given up ---------------------------------------------------------------------------------------------------------


def give_up_late(job: Job, pending: PendingPlan) -> None:
    """Give up a plan whose members do not make ready in time, and drop those of them that are new."""
    late = (pending.members() - pending.ready) & pending.newcomers()
    # workers that are late may be so because they wait for a server; servers wait for no newcomer but servers
    late = {task for task in late if job.state.members[task].role == "ps"} or late
    names = ", ".join(sorted(late or pending.members() - pending.ready))
    give_up(job, pending, f"{names} not ready within {job.settings.prepare:g} s", late)


def give_up(job: Job, pending: PendingPlan, reason: str, unfit: set[str]) -> None:
    """Give up a plan, and drop the unfit members; those of the plan in force stay."""
    for task in unfit - pending.previous_tasks():
        member = job.state.members[task]
        member.channel.send(JobEnded(reason=f"dropped from the job: {reason}"))
        member.state, member.given_up = "left", True
    abort(job, pending, reason)


def abort(job: Job, pending: PendingPlan, reason: str) -> None:
    """Give up a plan: the one in force stays so, with its description, and the next is made a while later."""
    state = job.state
    # who asked for further segments asks for the next plan, too, if it is still the first worker
    state.describe_in_force()
    job.say(f"plan {pending.plan.number} is given up: {reason}")
    job.tell(pending.members(), Abort(plan=pending.plan.number, reason=reason))
    state.pending = None
    for task in pending.members():
        member = state.members[task]
        if member.present:
            member.state = "active" if task in pending.previous_tasks() else "joined"
    state.given_up += 1
    state.retry_at = time.monotonic() + min(_MAX_RETRY_SECONDS, _RETRY_SECONDS * 2**state.given_up)
    job.urgent = True
