"""Members that are lost: how it is known, and whether the job goes on without them."""

from __future__ import annotations

import time
from collections.abc import Container

from pslite.coordinator.failover import Takeovers
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated
from pslite.coordinator.plans import Planner
from pslite.coordinator.regrouping import Regrouping
from pslite.coordinator.server_failover import ServerFailover
from pslite.coordinator.settings import Settings
from pslite.coordinator.status import how_it_ended
from pslite.net.messages import AgentExit, JobEnded, Severed


class Losses:
    """Judges who is lost, and has others go on.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.
    planner
        has the plan that is on its way.
    regrouping, takeovers, failover
        go on without a worker of an all-reduce job, another worker, a server.

    """

    def __init__(
        self,
        record: Record,
        voice: Voice,
        settings: Settings,
        *,
        planner: Planner,
        regrouping: Regrouping,
        takeovers: Takeovers,
        failover: ServerFailover,
    ) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings
        self._planner = planner
        self._regrouping = regrouping
        self._takeovers = takeovers
        self._failover = failover
        #: until when which members may come back, and which have asked for it
        self._lenient_until, self._lenient = 0.0, frozenset[str]()
        self._back: set[str] = set()

    def be_lenient(self, now: float) -> None:
        """Members have lost us for a while: they come back, or look for another coordinator."""
        if now >= self._lenient_until:
            self._lenient_until = now + self._settings.lease
        self._lenient = frozenset(self._record.members)
        self._back.clear()

    def take_back(self, member: Seated) -> None:
        """A member is there again; it may be gone already that has asked for that, and ask once more."""
        member.heard, member.lost, member.lost_how = time.monotonic(), 0.0, ""
        self._back.add(member.task)

    def hear(self, member: Seated) -> None:
        """A member says something: if it was taken back it knows that now; when it is lost once more it has died."""
        member.heard = time.monotonic()
        if member.task in self._back:
            self._back.discard(member.task)
            self._lenient -= {member.task}

    def judge(self, now: float, agents: Container[str]) -> None:
        """Go on without those that are lost; of tasks with `agents` it will be said how they ended."""
        record = self._record
        for member in list(record.members.values()):
            if member.state == "left" or record.members.get(member.task) is not member:
                continue  # or it is told to come again
            silent = not member.lost and now - member.heard > self._settings.lease
            if silent:
                member.lost = now - self._settings.verdict
                member.lost_how = f"died or hangs: silent for {self._settings.lease:g} s"
            told = record.exits.get(member.task)
            if not member.lost and (told is None or member.channel.channel is not None):
                continue
            patience = self._settings.verdict * (1.0 if member.task in agents else 0.1)
            given_up_at = member.lost + patience
            if member.task in self._lenient:
                given_up_at = max(given_up_at, self._lenient_until)
            if told is not None:
                if self._ended_well(member, told):
                    self.left(member)
                else:
                    self.lose(member, how_it_ended(told), fatal=not told.signal)
            elif silent or now >= given_up_at:
                self.lose(
                    member, member.lost_how or "died: its connection ended, and nobody reported how its process did"
                )

    @staticmethod
    def _ended_well(member: Seated, told: AgentExit) -> bool:
        return told.status == 0 and not told.signal and (member.finished or member.state in ("joined", "draining"))

    def lose(self, member: Seated, how: str, *, fatal: bool = False) -> None:
        """Go on without a member, or fail; `fatal` where it is no accident: another one would fare no better."""
        record = self._record
        if member.state == "left" or record.over:
            return
        separator = " " if how.startswith(("died", "broke")) else ": "
        text = f"{member.title}{separator}{how}"
        pending = record.pending
        in_plan = record.plan is not None and member.task in record.plan.tasks()
        # others do the part of who was let go in the middle of a plan
        let_go = member.task in record.dead
        certain = pending is not None and (pending.phase == "committed" or pending.recover)
        committed = pending is not None and certain and member.task in pending.members()
        if (in_plan or committed) and not let_go:
            if record.all_reduce:
                go_on = self._regrouping.go_on_without
            else:
                go_on = self._go_on_without_server if member.role == "ps" else self._takeovers.go_on_without
            if fatal or not go_on(member, text):
                self._voice.fail(text)
            return
        member.state = "left"
        self._voice.say(f"{text}; it is in no plan, the job goes on")
        self._voice.hurry()
        if pending is not None and member.task in pending.plan.tasks():
            self._planner.give_up(text, set())
        if record.plan is None and member.role == "worker" and not record.somebody_waits_described:
            # the only one that knew what to train: nothing can come of this job unless another worker comes
            record.describe(None)
        if record.plan is None and self._settings.start is not None and not record.waiting(member.role):
            self._voice.fail(text)  # nobody starts another one

    def separate(self, member: Seated, message: Severed) -> None:
        """Two members live and cannot reach each other: go on without one, a worker if one is, for nothing is lost."""
        other = self._record.members.get(message.task)
        if other is None or "left" in (member.state, other.state) or other.lost or member.lost:
            return  # one of them is judged already, or about to be
        away = member if member.role == "worker" else other
        stays = other if away is member else member
        self.lose(away, f"cannot reach {stays.title}, although both live: {message.reason}")

    def _go_on_without_server(self, member: Seated, text: str) -> bool:
        """Have others own the blocks of a server that died; returns whether that is possible."""
        record = self._record
        assert record.spec is not None
        pending = record.pending
        if record.result is not None:
            member.state = "left"
            self._voice.say(f"{text}; it was needed no more")
            return True
        if pending is not None and pending.phase == "preparing":
            self._planner.abort(pending, text)
        member.state = "left"
        record.lost_servers[member.task] = text
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        self._takeovers.stop_waiting_for({member.task})
        self._failover.begin()
        if record.succession is not None:
            self._voice.say(f"{text}; others take its place")
        return True

    def left(self, member: Seated) -> None:
        """A member says that it has left, or its process has ended as it should."""
        record = self._record
        if member.state == "active" and not member.finished and member.role == "worker":
            self.lose(member, "its process left in the middle of the job", fatal=True)
            return
        member.state = "left"
        self._voice.hurry()
        alone = record.state == "waiting" and record.plan is None and not record.waiting("worker")
        if alone and member.role == "worker" and not member.described and self._settings.start is not None:
            self._voice.fail(f"{member.title}: its script ended without training anything")

    def reported(self, task: str, message: AgentExit) -> None:
        """An agent has said how its process ended."""
        record = self._record
        if task in record.members:
            return  # judged when its connection ends, which it does at the same time
        if message.status or message.signal:
            text = f"{task} (pid {message.pid}) {how_it_ended(message)}{',' if message.text else ''} before it joined"
        else:
            text = f"{task} (pid {message.pid}): its script ended without joining the job (does it use ElasticJob?)"
        self._voice.say(text)
        if record.plan is None and not record.somebody_waits_described and record.state == "waiting":
            self._voice.fail(text)
