"""Who comes in: what a newcomer says of the job must agree with it, and workers learn their places."""

from __future__ import annotations

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import ROLES, Record, Seated
from pslite.coordinator.settings import Settings
from pslite.job.spec import JobSpec, Sum, differences
from pslite.net.messages import BarrierOpen, Hello, Join, Refused, Seat
from pslite.net.tls import VARIABLE, Encryption

#: how often the user is told that the job cannot begin yet
_STILL_WAITING_SECONDS = 60.0


class Admission:
    """Lets members in, up to the first plan that has them.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.
    encrypt
        what goes over TLS.

    """

    def __init__(self, record: Record, voice: Voice, settings: Settings, encrypt: Encryption) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings
        self._encrypt = encrypt

    def objection(self, hello: Hello, message: Join) -> str:
        """Return why a process may not join; empty if it may."""
        record = self._record
        if record.state in ("failed", "cancelled"):
            return f"the job is over, {record.state}: {record.reason}"
        if hello.role == "ps":
            if record.all_reduce:
                return "the job's architecture is allreduce: it has no servers"
            return "" if message.address else "a server must say where it takes data"
        return self._mismatch(message.spec) if message.spec is not None else ""

    def describe(self, member: Seated, spec: JobSpec) -> None:
        """A worker that has joined says what it trains."""
        reason = self._mismatch(spec)
        if reason:
            self._voice.say(f"refused {member.task}: {reason}")
            member.channel.send(Refused(reason=reason))
            return
        self.adopt(spec)
        member.described, member.spec = True, spec
        self._voice.hurry()

    def adopt(self, spec: JobSpec) -> None:
        """Take the description of the job from the first worker that gives one."""
        record = self._record
        if record.spec is None:
            record.describe(spec)

    def _mismatch(self, spec: JobSpec) -> str:
        record = self._record
        if spec.architecture == "allreduce" and self._encrypt == "all":
            return (
                f"{VARIABLE} is all, and an all-reduce job cannot keep that: gradients go over connections of torch "
                "(gloo), which are not encrypted; train with servers, or with control"
            )
        if record.spec is None or spec.agrees(record.spec):
            late = record.plan is not None and any(isinstance(s.optimizer, Sum) for s in spec.segments)
            return (
                "its script updates the weights in its workers (update_on_kvstore=False), so there is nobody to get "
                "them from: only servers can be added"
                if late
                else ""
            )
        return "its script describes another job than the first worker's: " + "; ".join(
            differences(spec, record.spec)[:10]
        )

    def give_seats(self, now: float) -> None:
        """Tell workers that need it before they can say what they train which place they have among how many.

        At the start all that are announced are waited for; a later one takes the next place.
        """
        record = self._record
        waiting = record.waiting("worker")
        if all(m.seated or m.described for m in waiting) or any(m.lost for m in waiting):
            return  # who is lost comes back in a moment, or will be known to have died
        target = record.target
        if record.plan is None:
            there = {m.task for m in record.members.values()}
            late = record.reply is None or target is None or bool(target - there)
            if late and now - max(m.joined for m in waiting) < self._settings.grace:
                return
        present = [m.task for m in record.plan.workers if m.task not in record.dead] if record.plan else []
        places = [*present, *(m.task for m in waiting if target is None or m.task in target)]
        for member in waiting:
            if member.task in places and not member.seated:
                member.seated = True
                member.channel.send(Seat(rank=places.index(member.task), workers=len(places)))

    def open_barrier(self) -> None:
        """Let the workers go on that wait for all others, once all do; a newcomer passes barriers of the beginning."""
        record = self._record
        there = [m for m in record.members.values() if m.role == "worker" and m.state != "left"]
        waiting = [m for m in there if m.state == "joined" and m.seated]
        members = [m for m in there if m.state != "joined" and not m.finished]
        groups = [[m] for m in waiting] + [members] if record.plan is not None else [waiting]
        for group in groups:
            if group and all(m.at_barrier for m in group):
                for member in group:
                    member.at_barrier = False
                    member.channel.send(BarrierOpen())

    def check_start(self, now: float) -> None:
        """Fail where nobody has come for too long."""
        record, limit = self._record, self._settings.start
        if record.plan is not None:
            return
        if record.pending is None and limit is not None and now - record.began > limit:
            there = {m.role for m in record.waiting()}
            if there >= set(record.roles) and any(m.lost or not m.described for m in record.waiting()):
                return  # it comes back in a moment, or takes its time to say what it trains
            missing = [ROLES[role] for role in record.roles if not record.joined(role)]
            self._voice.fail(f"no {' and no '.join(missing) or 'wanted member'} joined within {limit:g} s")
        elif now - record.said_waiting > _STILL_WAITING_SECONDS:
            record.said_waiting = now
            self._voice.say("still waiting for at least one worker and one server")
