"""All-reduce: groups of workers that have lost one, or whose members cannot reach each other, are made anew."""

from __future__ import annotations

import time

from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import MOST_DEATHS, Pending, Record, Seated
from pslite.coordinator.plans import Planner
from pslite.coordinator.settings import Settings
from pslite.job.plan import Plan
from pslite.net.messages import Broken, JobEnded

#: a group that breaks so often at one version, although nobody is dead, fails the job
_MOST_BREAKS = 5


class Regrouping:
    """Makes plans that take the place of a broken group at once.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.
    planner
        has the plan that is on its way.

    """

    def __init__(self, record: Record, voice: Voice, settings: Settings, planner: Planner) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings
        self._planner = planner

    def go_on_without(self, member: Seated, text: str) -> bool:
        """A worker died: the others go on from the newest version that one of them has. Returns whether they can."""
        record = self._record
        record.dead[member.task] = record.version
        if record.too_many_deaths:
            self._voice.say(f"{MOST_DEATHS} workers died at version {record.version}")
            return False
        member.state = "left"
        if record.complete:
            self._voice.say(f"{text}; it had finished")
            return not member.chief
        if not self._regroup(f"{text}; the others go on without it, nothing is lost"):
            return False
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        return True

    def _regroup(self, why: str) -> bool:
        """Make a group of all workers that are left and may have weights; returns whether there is one."""
        record = self._record
        pending = record.pending
        if pending is not None and pending.phase == "preparing" and not pending.recover:
            self._planner.abort(pending, why)
            pending = None
        plans = [plan for plan in (record.plan, pending.plan if pending is not None else None) if plan is not None]
        present = [m.task for plan in plans for m in plan.workers]
        tasks = [task for task in dict.fromkeys(present) if record.members[task].state != "left"]
        record.broken = None
        if not tasks:
            return False
        self._voice.say(why)
        record.plan_number += 1
        plan = Plan(
            number=record.plan_number,
            workers=tuple(record.members[task].record() for task in tasks),
            servers=(),
            owners=(),
        )
        record.pending = Pending(plan, record.plan, time.monotonic(), recover=True)
        self._voice.tell(plan.tasks(), self._planner.prepare(record.pending))
        self._voice.hurry()
        return True

    def broke(self, member: Seated, message: Broken) -> None:
        """An exchange failed; if a worker is dead, that will be known within the time for verdicts."""
        record = self._record
        if record.broken is None:
            record.broken = time.monotonic(), message.plan, f"{member.title} says: {message.reason}"

    def judge(self, now: float) -> None:
        """Nobody is dead, and still a group is broken or cannot be made: try again."""
        record = self._record
        pending, verdict = record.pending, self._settings.verdict
        recovering = pending is not None and pending.recover
        if pending is not None and recovering and record.broken is None and pending.refused:
            record.broken = (
                pending.refused,
                pending.plan.number,
                f"plan {pending.plan.number} could not be made ready",
            )
        if record.broken is None:
            return
        since, number, why = record.broken
        in_use = pending.plan if pending is not None and recovering else record.plan
        if in_use is None or number < in_use.number or record.complete:
            record.broken = None  # another group has taken its place
            return
        if now - since < 1.5 * verdict or any(member.lost for member in record.present()):
            return
        record.breaks.append(record.version)
        if record.breaks.count(record.version) >= _MOST_BREAKS:
            self._voice.fail(f"workers cannot reach each other: {why}")
        elif not self._regroup(f"{why}; nobody is known to be dead: they try again"):
            self._voice.fail(why)
