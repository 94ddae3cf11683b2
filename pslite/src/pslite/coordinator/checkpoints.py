"""Going back to the newest checkpoint when state is lost: all members begin again, as they did when the job began."""

from __future__ import annotations

import time

from pslite.coordinator.global_norm import Scales
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import ROLES, Record
from pslite.coordinator.progress import Progress
from pslite.coordinator.settings import Settings
from pslite.net.messages import RollBack

#: a job that has gone back so often without a newer checkpoint fails
MAX_ROLLBACKS = 5


class Rollback:
    """Has the job begin again from its newest checkpoint, or from its beginning if there is none.

    Nothing of the old run counts any more: every member is told to end and to join again, and the first plan is made
    of those that do.  So the result is that of a job which was stopped and started again.

    Parameters
    ----------
    record, voice
        the job's.
    settings
        times.
    scales, progress
        forget what they know of the versions that are done again.

    """

    def __init__(self, record: Record, voice: Voice, settings: Settings, *, scales: Scales, progress: Progress) -> None:
        self._record = record
        self._voice = voice
        self._settings = settings
        self._scales = scales
        self._progress = progress

    def go_back(self, reason: str) -> None:
        """State is lost for that reason: go back, or fail where that is of no use."""
        record = self._record
        objection = self._objection()
        if objection:
            self._voice.fail(f"{reason}{objection}")
            return
        version = max(0, record.snapshot)
        where = f"its checkpoint of version {version}" if record.snapshot >= 0 else "its beginning"
        self._voice.say(f"{reason}; the job goes back to {where}")
        record.rollbacks.append(version)
        returning = {}
        for member in record.present():
            if member.state == "draining":
                member.let_go()
            elif member.prepared:
                member.channel.send(RollBack(reason=f"the job goes back to {where}"))
                returning[member.task] = member.role
                del record.members[member.task]
        record.begin_again(time.monotonic(), version, returning, reason)
        self._scales.forget()
        self._progress.begin_again()
        self._voice.hurry()

    def _objection(self) -> str:
        """Why the job cannot go back, to be said after what has happened; empty if it can."""
        record = self._record
        assert record.spec is not None
        if record.spec.on_loss == "fail":
            return ": state is lost, and on_loss is 'fail'"
        if any(member.chief for member in record.members.values()):
            return ", after the script of the first worker had ended"
        if record.rollbacks.count(max(0, record.snapshot)) >= MAX_ROLLBACKS:
            return (
                f"; the job has gone back {MAX_ROLLBACKS} times without a newer checkpoint: have it keep checkpoints "
                "(checkpoint=...) or replicas (durability='durable')"
            )
        return ""

    def check(self, now: float) -> None:
        """Fail where nobody comes in the place of members that are gone."""
        record, limit = self._record, self._settings.start
        if not record.lost_with or record.plan is not None:
            return
        coming = {task: role for task, role in record.returning.items() if task not in record.exits}
        empty = [role for role in record.roles if not record.waiting(role) and role not in coming.values()]
        unknown = any(task not in record.members and task not in coming for task in record.target or ())
        if limit is None:
            limit = self._settings.vacancy
        elif empty and not unknown:
            limit = self._settings.settle  # nobody starts another one
        if now - max(record.began, record.target_changed) <= limit:
            return
        missing = empty or [role for role in record.roles if not record.joined(role)]
        if missing and record.pending is None:
            roles = " and ".join(ROLES[role] for role in missing)
            self._voice.fail(f"{record.lost_with}; it was the last {roles}, and no other came in its place")
