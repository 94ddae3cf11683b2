"""The end of a job: all workers have its last version, and the digest of the weights is known."""

from __future__ import annotations

import time

from pslite.coordinator.failover import Takeovers
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated
from pslite.coordinator.plans import Planner
from pslite.job.blocks import digest_of
from pslite.job.status import Result
from pslite.net.messages import Complete, DigestRequest, Digests, Exit

#: how long the other workers of an open job may go on by themselves after one has ended its loop: mostly all do at once
_EARLY_SECONDS = 1.0


class Finish:
    """Sees a job to its end.

    Parameters
    ----------
    record, voice
        the job's.
    planner
        has the plan that is on its way.
    takeovers
        go on without workers whose scripts end before the others'.

    """

    def __init__(self, record: Record, voice: Voice, planner: Planner, takeovers: Takeovers) -> None:
        self._record = record
        self._voice = voice
        self._planner = planner
        self._takeovers = takeovers

    def check(self) -> None:
        """Do what is next for the job to end, if it has come so far."""
        record = self._record
        assert record.plan is not None
        if record.succession is not None:
            return
        workers = [record.members[m.task] for m in record.plan.workers if m.task not in record.dead]
        assert record.spec is not None
        if record.spec.open:
            if not any(w.chief for w in workers):
                self._release_early(workers)
                return
            if not self._settled(max(w.finished_version for w in workers if w.chief)):
                return
            workers = [record.members[m.task] for m in record.plan.workers if m.task not in record.dead]
            if not self._have_ended(workers):
                return
        pending = record.pending
        committed = pending is not None and pending.phase == "committed" and pending.stamped()
        if pending is not None and (pending.recover or (committed and not record.spec.open)):
            return
        if not record.spec.open and not all(w.finished for w in workers):
            return
        if pending is not None:
            self._planner.abort(pending, "the job has reached its last version")
        if not record.digest_asked:
            record.digest_asked = True
            self.ask_for_digests()
        if len(record.digests) < len(record.blocks):
            return  # who has the weights may still die: nobody may go yet
        if record.result is None:
            record.result = Result(digest=digest_of(record.digests), versions=record.version)
            if not record.spec.open:
                record.complete = workers[0].chief = True
                self._voice.tell({w.task for w in workers}, Complete(chief=workers[0].task))
            self._voice.tell({m.task for m in record.plan.servers}, Exit(reason="the job is finished"))
            for member in record.members.values():
                if member.state == "joined":
                    member.dismiss("the job is finished")
        # the chief may still be writing its files: the job ends when its workers' processes have
        if all(w.state == "left" for w in workers):
            self._voice.say(f"finished: {record.result.versions} versions, digest {record.result.digest}")
            record.state = "finished"
            record.final = True

    def _settled(self, version: int) -> bool:
        """Whether all parameters are where a plan says; an open job has ended at `version`, no plan begins any more."""
        record = self._record
        pending = record.pending
        if pending is None or pending.phase != "committed" or pending.previous is None:
            return True
        if 0 <= pending.first <= version:
            if pending.moved.keys() >= pending.movers():
                record.plan, record.pending = pending.plan, None
            return record.pending is None
        return True

    @staticmethod
    def _have_ended(workers: list[Seated]) -> bool:
        """Whether all workers of an open job have ended: who is in a loop leaves it, others go on to their end."""
        version = max(worker.finished_version for worker in workers if worker.chief)
        for worker in workers:
            if worker.state == "active" and not worker.finished:
                worker.state = "draining"
                reason = "the first worker's script has ended, and so has the job"
                worker.channel.send(Exit(reason=reason, version=version))
        return all(worker.finished or worker.state == "left" for worker in workers)

    def _release_early(self, workers: list[Seated]) -> None:
        """Go on without workers of an open job whose loops ended before the first one's."""
        record = self._record
        now = time.monotonic()
        for worker in workers:
            if worker.finished and now - worker.finished_at >= _EARLY_SECONDS:
                worker.finished = False
                text = f"{worker.title}: its script has ended"
                if (
                    record.plan is not None
                    and worker.task in record.plan.tasks()
                    and not self._takeovers.go_on_without(worker, text)
                ):
                    self._voice.fail(text)

    def ask_for_digests(self) -> None:
        """Have servers say what their blocks end with; where workers have the weights, they have said so."""
        record = self._record
        assert record.plan is not None
        assert record.spec is not None
        if record.all_reduce or record.spec.update == "worker":
            return
        record.digests.clear()  # of blocks that others had, which may have been different in async mode
        self._voice.tell({m.task for m in record.plan.servers}, DigestRequest(version=record.version))

    def take_digests(self, member: Seated, message: Digests) -> None:
        """Take digests of final weights; every replica must have the same."""
        for block, digest in message.blocks.items():
            if self._record.digests.setdefault(block, digest) != digest:
                self._voice.fail(f"{member.title} ends with other weights in block {block} than another worker")
                return
