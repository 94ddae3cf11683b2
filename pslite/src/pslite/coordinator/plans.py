"""Plans on their way: made, prepared by their members, committed, followed until they are done, or given up."""

from __future__ import annotations

import statistics
import time

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Pending, Record, Seated
from pslite.coordinator.settings import Settings
from pslite.job.load_balancing import LoadBalancer
from pslite.job.plan import Plan, make_plan, next_members
from pslite.job.status import PlanReport, Suspension
from pslite.net.messages import (
    Abort,
    Begin,
    Commit,
    Drained,
    JobEnded,
    Message,
    Moved,
    Nack,
    PlanDone,
    Prepare,
    Publish,
    Published,
    Pushed,
    Ready,
    Resume,
    Stamped,
)

#: how long the next plan waits after one was given up: the first, doubled with each, up to the second
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.1, 30.0


class Planner:
    """Makes plans, one at a time.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.
    balance
        says how much each member should do.

    """

    def __init__(self, record: Record, voice: Voice, settings: Settings, balance: LoadBalancer) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings
        self._balance = balance
        #: slow members that the user has been told of
        self._told_slow: set[str] = set()

    def consider(self, now: float) -> None:
        """Start a plan if the members should be other than they are."""
        record = self._record
        if record.spec is None or record.digest_asked or (record.reply is None and record.plan is None):
            return
        if record.taking_over is not None:
            return
        target = record.target
        if target is not None:
            for task in {*record.joined("worker"), *record.joined("ps")} & (record.once_wanted - target):
                record.members[task].dismiss("no longer wanted")
        if record.all_reduce:
            for task in record.joined("ps"):
                record.members[task].dismiss("the job's architecture is allreduce: it has no servers")
        present = record.plan
        workers = next_members(
            [m.task for m in present.workers if m.task not in record.dead] if present else [],
            record.joined("worker"),
            target,
            record.spec.shards,
        )
        servers = next_members(
            [m.task for m in present.servers] if present else [],
            record.joined("ps"),
            target,
            len(record.blocks),
        )
        if not workers or not (servers or record.all_reduce):
            return
        if record.all_reduce and present is not None:
            # One of those that have the weights has to stay until another has them.
            old = [m.task for m in present.workers if m.task not in record.dead]
            workers = workers if set(workers) & set(old) else (old[0], *workers)
        before = present.tasks() if present else set()
        if record.spec.update == "worker" and present is not None and not before & set(workers):
            # one that has the weights stays until the newcomers have them
            stays = next((m.task for m in present.workers if m.task not in record.dead), None)
            workers = (stays, *workers)[: record.spec.shards] if stays is not None else workers
        wanted = {*workers, *servers}
        self._note_held_back(target, wanted)
        # of blocks whose server has died there is one copy, until a plan gives them another
        exposed = present is not None and len(servers) > 1 and -1 in present.backups
        if wanted == before and not exposed and not self._deal_anew(now):
            return
        if now < record.retry_at or self._should_wait(now, target, before):
            return
        first = record.members[workers[0]].spec
        if present is None and first is not None:
            # open jobs: the others' may say another optimizer, made of their rank, say
            record.describe(first)
        record.plan_number += 1
        dealing = self._balance.dealing
        plan = make_plan(
            record.plan_number,
            () if record.all_reduce else record.blocks,
            [record.members[task].record() for task in workers],
            [record.members[task].record() for task in servers],
            present,
            replicas=record.spec.durability != "none",
            shares=() if record.all_reduce else dealing.shares(record.spec.shards, workers),
            speeds=dealing.speeds(servers),
            stop=self._settings.handoff == "stop",
        )
        record.pending = Pending(plan, present, now)
        self._voice.say(f"plan {plan.number}: {len(workers)} workers, {len(servers)} servers")
        for task in record.pending.members():
            record.members[task].prepared = True
        self._voice.tell(record.pending.members(), self.prepare(record.pending))

    def _deal_anew(self, now: float) -> bool:
        """Whether the work should be dealt otherwise than it is, for who is slow; then the next plan does so."""
        record = self._record
        plan, spec = record.plan, record.spec
        assert spec is not None
        if plan is None or any(record.members[task].state != "active" for task in plan.tasks()):
            return False
        shards = 0 if spec.open or record.all_reduce else spec.shards
        left = spec.total_versions - record.version
        proposal = self._balance.consider(now, plan, shards, [block.nbytes for block in record.blocks], left)
        slow = {straggler.task for straggler in self._balance.stragglers}
        for straggler in self._balance.stragglers:
            if straggler.task not in self._told_slow:
                self._voice.say(f"{straggler.task} on {straggler.host} is slow: it {straggler.reason}")
        self._told_slow = slow
        if proposal is not None:
            self._voice.say(f"{proposal.reason}, for a step {proposal.gain:.0%} shorter")
            self._voice.hurry()
        return proposal is not None

    def _note_held_back(self, target: frozenset[str] | None, wanted: set[str]) -> None:
        record = self._record
        spare = {t for r in ("worker", "ps") for t in record.joined(r) if (target is None or t in target)} - wanted
        for task in sorted(spare - record.held_back):
            self._voice.say(
                f"{task} waits: the job has {record.spec.shards if record.spec else 0} shards for workers and "
                f"{len(record.blocks)} blocks for servers, it can use no more of them"
            )
        record.held_back = spare

    def _should_wait(self, now: float, target: frozenset[str] | None, before: set[str]) -> bool:
        """Whether announced members that have not joined yet deserve a moment, so that one plan serves all."""
        record = self._record
        joined = {t for r in record.roles for t in record.joined(r)}
        if not before and any(m.seated and not m.described for m in record.waiting()):
            return True  # it has a place already: the others count on it
        if target is None:
            missing = not before
        else:
            gone = {t for t, m in record.members.items() if m.state == "left"} | record.exits.keys()
            missing = bool(target - joined - before - gone)
        if not missing:
            return False
        newest = max((record.members[t].joined for t in joined), default=0.0)
        newest = max(newest, record.target_changed)
        if not before:
            roles = [min(record.members[t].joined for t in record.joined(r)) for r in record.roles]
            return now - max(roles) < self._settings.grace
        return now - newest < self._settings.settle

    def prepare(self, pending: Pending) -> Prepare:
        """Return what members of a plan have to know to make ready for it."""
        record = self._record
        assert record.spec is not None
        return Prepare(
            plan=pending.plan,
            previous=pending.previous,
            spec=record.spec,
            recover=pending.recover,
            fresh=not record.reports,
        )

    def take(self, member: Seated, message: Message) -> None:
        """Take what a member says about a plan."""
        record = self._record
        pending, number = record.pending, getattr(message, "plan", 0)
        if pending is None or number != pending.plan.number:
            return  # about a plan that was given up meanwhile
        if isinstance(message, Ready):
            pending.ready.add(member.task)
        elif isinstance(message, Publish):
            published = Published(plan=number, key=message.key, value=message.value)
            self._voice.tell({m.task for m in pending.plan.workers} - {member.task}, published)
        elif isinstance(message, Nack) and pending.recover:
            # Somebody else is gone, most likely, which will be known soon.
            pending.refused = pending.refused or time.monotonic()
            self._voice.say(f"{member.title} cannot take part in plan {number}: {message.reason}")
        elif isinstance(message, Nack):
            fault = {message.about} & pending.newcomers() or {member.task}
            if message.about in pending.members() - fault:
                lost = record.members[message.about].channel.channel is None
                if lost or member.task not in record.doubted:
                    # perhaps the other one has just died, of which nobody has heard yet; one that we have lost may have
                    record.doubted.add(member.task)
                    fault = set()
            self.give_up(f"{member.title} cannot take part: {message.reason}", fault)
        elif isinstance(message, Stamped):
            if message.first < 0:
                self.abort(pending, "the job ends before the plan could take effect")
            else:
                pending.first = message.first
        elif isinstance(message, Pushed):
            pending.pushed[member.task] = message.suspension_ms
        elif isinstance(message, Drained):
            pending.drained.add(member.task)
        elif isinstance(message, Moved):
            pending.moved[member.task] = message

    def commit(self, pending: Pending) -> None:
        """All are ready: have the plan take effect."""
        record = self._record
        pending.phase = "committed"
        pending.prepared_ms = (time.monotonic() - pending.began) * 1e3
        plan, previous = pending.plan, pending.previous
        if previous is None:
            pending.first = max(0, pending.first)
            if plan.servers:
                self._voice.tell(
                    {plan.workers[0].task},
                    Begin(plan=plan.number, checkpoint=record.snapshot if record.rollbacks else -1),
                )
            self._activate(plan)
            record.plan = plan
            self._balance.begin(time.monotonic(), plan)
            record.state = "running"
            self._voice.hurry()
            return
        for task in (previous.tasks() - plan.tasks()) & record.there():
            record.members[task].state = "draining"
        self._activate(plan)
        self._voice.hurry()
        if not pending.recover:
            pacer = previous.owner(0) if previous.servers else previous.workers[0]
            self._voice.tell({pacer.task}, Commit(plan=plan.number))

    def _activate(self, plan: Plan) -> None:
        record = self._record
        # a worker that had finished may have left meanwhile
        for task in plan.tasks() & record.there():
            record.members[task].state = "active"

    def follow(self, pending: Pending) -> set[str] | None:
        """See a committed plan through; returns whom the job goes on without once it is done, None until then."""
        record = self._record
        plan, previous = pending.plan, pending.previous
        all_moved = pending.moved.keys() >= pending.movers()
        if plan.stop and previous is not None and all_moved and not pending.resumed:
            pending.resumed = True
            self._voice.tell({m.task for m in plan.workers}, Resume(plan=plan.number))
        leavers = pending.leavers() - record.dead.keys()
        # A worker that has finished has nothing to push: the job went on from its last version.
        stayers = {m.task for m in plan.workers if not record.members[m.task].finished} - record.dead.keys()
        if not all_moved or not pending.drained >= leavers or not pending.pushed.keys() >= stayers:
            return None
        record.substitutes.pop(previous.number if previous else 0, None)
        record.plan = plan
        self._balance.begin(time.monotonic(), plan)
        record.pending = None
        record.given_up = 0
        self._report(pending)
        self._voice.tell(plan.tasks(), PlanDone(plan=plan.number))
        gone = previous.tasks() - plan.tasks() if previous else set()
        for task in gone:
            record.members[task].let_go()
        self._voice.hurry()
        return gone

    def _report(self, pending: Pending) -> None:
        record = self._record
        plan, previous = pending.plan, pending.previous
        before = previous.tasks() if previous else set()
        waits = [ms for ms in pending.pushed.values() if ms is not None]
        record.suspensions += waits
        report = PlanReport(
            number=plan.number,
            first_version=pending.first,
            workers=len(plan.workers),
            servers=len(plan.servers),
            added=sorted(plan.tasks() - before),
            removed=sorted(before - plan.tasks()),
            moved_bytes=sum(m.sent_bytes for m in pending.moved.values()),
            prepare_ms=round(pending.prepared_ms, 3),
            move_ms=round(max((m.move_ms for m in pending.moved.values()), default=0.0), 3),
            suspension_ms=Suspension(
                p50=round(statistics.median(waits), 3) if waits else 0.0, max=round(max(waits, default=0.0), 3)
            ),
        )
        record.reports.append(report)
        kept = sum(place >= 0 for place in plan.backups)
        replicas = f", replicas of {kept} of {len(plan.backups)} blocks" if plan.backups else ""
        self._voice.say(
            f"plan {report.number} done at version {report.first_version}: {report.workers} workers, "
            f"{report.servers} servers, moved {report.moved_bytes / 1e6:.1f} MB in {report.move_ms:.0f} ms, "
            f"suspension {report.suspension_ms.p50:.2f} ms (max {report.suspension_ms.max:.2f}){replicas}"
        )

    def give_up_late(self, pending: Pending) -> None:
        """Try again without newcomers that do not make ready."""
        late = (pending.members() - pending.ready) & pending.newcomers()
        # workers that are late may be so because they wait for a server; servers wait for no newcomer but servers
        servers = {task for task in late if self._record.members[task].role == "ps"}
        names = ", ".join(sorted(servers or late or pending.members() - pending.ready))
        self.give_up(f"{names} not ready within {self._settings.prepare:g} s", servers or late)

    def give_up(self, reason: str, unfit: set[str]) -> None:
        """Try again without the unfit members; those of the running plan stay as they are."""
        record = self._record
        pending = record.pending
        assert pending is not None
        for task in unfit:
            member = record.members[task]
            if pending.previous is not None and task in pending.previous.tasks():
                continue
            member.channel.send(JobEnded(reason=f"dropped from the job: {reason}"))
            member.state = "left"
        self.abort(pending, reason)

    def abort(self, pending: Pending, reason: str) -> None:
        """Everything stays as it is without the plan; the next one is made a while later."""
        record = self._record
        self._voice.say(f"plan {pending.plan.number} is given up: {reason}")
        self._voice.tell(pending.members(), Abort(plan=pending.plan.number, reason=reason))
        record.pending = None
        before = pending.previous.tasks() if pending.previous else set()
        for task in pending.members():
            member = record.members[task]
            if member.state != "left":
                member.state = "active" if task in before else "joined"
        record.given_up += 1
        record.retry_at = time.monotonic() + min(_MOST_RETRY_SECONDS, _RETRY_SECONDS * 2**record.given_up)
        self._voice.hurry()
