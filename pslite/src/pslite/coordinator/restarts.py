"""A worker goes on where all others are gone: servers say how far they are, and send it their weights."""

from __future__ import annotations

from pslite.coordinator.record import Record
from pslite.coordinator.scales import Scales
from pslite.coordinator.substitutes import news_for_worker, share_out
from pslite.coordinator.succession import Succession, holders
from pslite.coordinator.voice import Voice
from pslite.job.plan import reduction
from pslite.net.messages import Promote, Restart, Resumption, TakeOver


class Restarts:
    """Has a newcomer, who is ready, begin at the version that all servers have reached.

    Parameters
    ----------
    record, voice
        the job's.
    scales
        forgets what is said again.

    """

    def __init__(self, record: Record, voice: Voice, scales: Scales) -> None:
        self._record = record
        self._voice = voice
        self._scales = scales

    def begin(self, task: str) -> None:
        """Have servers forget the workers that are gone, and say how far they are."""
        record = self._record
        assert record.spec is not None
        assert record.plan is not None
        self._let_go_of_leavers()
        record.substitutes = {plan.number: share_out(record, plan, {}) or {} for plan in record.plans_in_force()}
        how = {p.number: reduction(record.spec, len(p.workers), p.shares).nodes for p in record.plans_in_force()}
        # of the step under way it does everything, also what others have done that are there
        record.substitutes[record.plan.number] = {
            node: task
            for member, own in zip(record.plan.workers, how[record.plan.number], strict=True)
            for node in own
            if member.task != task
        }
        record.take_overs += 1
        everything = {number: tuple(node for own in nodes for node in own) for number, nodes in how.items()}
        servers = set(record.servers_there())
        message = TakeOver(number=record.take_overs, gone=tuple(record.dead), nodes=everything)
        self._voice.tell(servers, message)
        self._voice.tell({task}, news_for_worker(record, task, record.take_overs))
        record.successions += 1
        blocks = tuple(block.number for block in record.blocks)
        fresh = Succession(record.successions, blocks, set(), workers=False, newcomer=task)
        record.succession = fresh.after(record.succession)
        self._voice.tell(servers, record.succession.census(servers, tuple(record.lost_servers)))

    def _let_go_of_leavers(self) -> None:
        """Do without workers that the coming plan does without: who does their part too does not wait for them.

        Servers hear that they are gone before anybody goes on, so that none is sent more versions than it can take.
        """
        record = self._record
        leavers = record.pending.leavers() if record.pending is not None else set()
        for task in (leavers - record.dead.keys()) & record.there():
            record.dead[task] = -1
            record.members[task].let_go()

    def resume(self, succession: Succession) -> None:
        """Servers have said how far they are: the worker begins with the version that all have reached."""
        record = self._record
        assert record.spec is not None
        assert record.vacancy is not None
        pending = record.pending
        newest = record.newest_plan
        assert record.plan is not None
        found = holders(record.blocks, succession.copies, newest)
        if found is None:
            self._voice.fail(f"{record.vacancy.reason}; it was the last worker, and servers have not all of the model")
            return
        versions = [version for version, _ in found.values()]
        succession.at = min(versions)
        succession.ahead = sum(version > succession.at for version in versions)
        succession.furthest = max(versions)
        crossed = pending is not None and 0 <= pending.first <= succession.at
        succession.plan = newest.number if crossed else record.plan.number
        if succession.ahead and record.spec.on_loss == "fail" and not (crossed and record.vacancy.member):
            self._voice.fail(
                f"{record.vacancy.reason}; it was the last worker, it has pushed a part of step {succession.at}, "
                "and on_loss is 'fail'"
            )
            return
        record.heirs = {block: record.members[task].record() for block, (_, task) in found.items()}
        if crossed and record.vacancy.member:
            succession.plan = 0  # it has its weights from the coming plan, or is about to
            self.promote(succession)
            return
        succession.phase = "restarting"
        self._voice.tell({succession.newcomer}, Restart(number=succession.number, plan=succession.plan))

    def promote(self, succession: Succession) -> None:
        """The worker awaits its weights: have servers send them."""
        record = self._record
        at = succession.at
        record.go_to(tuple(record.lost_servers), record.heirs)
        plans = record.plans_in_force()
        resume = Resumption(
            worker=succession.newcomer, plan=succession.plan, version=at, furthest=succession.furthest,
            workers={plan.number: plan.workers for plan in plans}, stamp=record.stamp(succession),
        )  # fmt: skip
        self._scales.forget()
        if succession.ahead and succession.plan:
            record.mark_inexact(at)
            last = succession.furthest - 1
            steps = f"step {at}" if last == at else f"steps {at} to {last} or some of them"
            self._voice.say(
                f"INEXACT from version {at} on: {succession.ahead} of {len(record.blocks)} blocks have {steps}, "
                "so the gradient of the others is of weights that have it in part"
            )
        else:
            self._voice.say(f"the job goes on from version {at}, nothing is lost")
        succession.phase = "promoting"
        succession.waits_for = {m.task for plan in plans for m in plan.servers}
        gone = tuple(record.lost_servers)
        going = resume if succession.plan else None
        message = Promote(number=succession.number, gone=gone, owners=record.heirs, resume=going)
        self._voice.tell(succession.waits_for.copy(), message)
