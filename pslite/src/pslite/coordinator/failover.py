"""Workers are gone: others do their part of the step under way, and of those until the next plan."""

from __future__ import annotations

from pslite.coordinator.checkpoints import Rollback
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import MOST_DEATHS, Record, Seated, TakingOver
from pslite.coordinator.plans import Planner
from pslite.coordinator.substitutes import news_for_servers, news_for_worker, share_out
from pslite.net.messages import JobEnded


class Takeovers:
    """Has workers push what others cannot any more; servers know before workers do.

    Parameters
    ----------
    record, voice
        the job's.
    planner
        has the plan that is on its way.
    rollback
        goes back where no worker is left, or nobody has the first weights.

    """

    def __init__(self, record: Record, voice: Voice, planner: Planner, rollback: Rollback) -> None:
        self._record = record
        self._voice = voice
        self._planner = planner
        self._rollback = rollback

    def go_on_without(self, member: Seated, text: str) -> bool:
        """Have others do the part of a worker that died; returns whether that is possible.

        Nothing is rolled back: what it pushed counts, and what it did not push of the present version others compute
        again.  The plan stays in force until the next one, which is made without it.
        """
        record = self._record
        pending = record.pending
        early = bool(member.finished_at) and not member.finished
        record.dead[member.task] = -1 if early else record.version
        if record.too_many_deaths:
            self._voice.say(f"{MOST_DEATHS} workers died at version {record.version}")
            return False
        if member.finished and (record.complete or (record.spec is not None and record.spec.open)):
            # The last version is there, and only one worker has something left to do.
            member.state = "left"
            if member.chief:
                self._voice.fail(f"{text}, before it had written what the script saves at its end")
            else:
                self._voice.say(f"{text}; it had finished")
            return True
        if pending is not None and pending.phase == "preparing":
            self._planner.abort(pending, text)
            pending = None
        if self._is_before_first_weights(member) or not self._somebody_has_the_state():
            return self._go_back(member, text)
        before = record.substitutes
        record.substitutes = {}
        for plan in [plan for plan in (record.plan, pending.plan if pending else None) if plan is not None]:
            given = share_out(record, plan, before.get(plan.number, {}))
            if given is None:
                return self._go_back(member, f"{text}; it was the last worker")
            record.substitutes[plan.number] = given
        member.state = "left"
        others = sorted({task for given in record.substitutes.values() for task in given.values()})
        if record.spec is not None and record.spec.asynchronous:
            self._voice.say(f"{text}; its samples are left out until the next plan")
        else:
            self._voice.say(
                f"{text}; {' and '.join(others)} {'do' if len(others) > 1 else 'does'} its part, nothing is lost"
            )
        if not early:
            member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        record.take_overs += 1
        servers = set(record.servers_there())
        record.taking_over = TakingOver(record.take_overs, servers)
        self._voice.tell(servers, news_for_servers(record))
        self._tell_workers()
        self._voice.hurry()
        return True

    def _go_back(self, member: Seated, text: str) -> bool:
        """Nobody who is left has what this worker had."""
        member.state = "left"
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        self._rollback.go_back(text)
        return True

    def _is_before_first_weights(self, member: Seated) -> bool:
        """Whether a worker dies that may have weights which nobody else has: the first one, as it sends them."""
        record = self._record
        pending = record.pending
        return pending is not None and pending.plan.workers[0].task == member.task and not record.servers_have_begun()

    def _somebody_has_the_state(self) -> bool:
        """Whether weights are left: where workers have them, with one that was there before or has begun to push."""
        record = self._record
        pending = record.pending
        if record.spec is None or record.spec.update == "server" or pending is None or pending.phase == "preparing":
            return True
        old = {m.task for m in pending.previous.workers} if pending.previous is not None else set()
        having = {m.task for m in pending.plan.workers} & (old | pending.pushed.keys())
        return pending.previous is None or bool(having - record.dead.keys())

    def taken_over(self, task: str, number: int) -> None:
        """A server knows of taking over `number`."""
        taking = self._record.taking_over
        if taking is not None and number == taking.number:  # else another worker has died since
            self.stop_waiting_for({task})

    def stop_waiting_for(self, servers: set[str]) -> None:
        """Wait for these no more: they have said so, or are gone, or nobody pushes to them."""
        record = self._record
        if record.taking_over is not None:
            record.taking_over.waits_for -= servers
            self._tell_workers()

    def _tell_workers(self) -> None:
        """Once all servers know, tell workers what they do in place of others."""
        record = self._record
        if record.taking_over is None or record.taking_over.waits_for:
            return
        number = record.taking_over.number
        record.taking_over = None
        for task in record.workers_there():
            self._voice.tell({task}, news_for_worker(record, task, number))
