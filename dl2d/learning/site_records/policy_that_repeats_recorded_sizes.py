"""The site's own scheduler in a replay: each job at the size that it was recorded with, in the recorded order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobRequest
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.core.store import RecordedSizes

_REASON = Reason(Constraint.OBSERVED, "size and turn as recorded")


class RecordedScheduler:
    """Gives jobs their recorded sizes, and starts them in the recorded order. Implements ``Policy``.

    A running job has the size that it was recorded with at the same time of the day, and before the first or after the
    last recorded size that one. The waiting job that was recorded to start first starts as soon as there
    is room for it, also before its recorded start: a replay has fewer hindrances than a real cluster. The others wait
    behind it. A job without a recorded size gets its minimum size, after the others; a job whose size does not fit on
    idle nodes gets its minimum size. A job that was paused has nothing from then until it was recorded to go on, and
    nobody waits behind it.

    Parameters
    ----------
    sizes
        Recorded sizes by job id; their times are in the replay's seconds.
    """

    name: ClassVar[str] = "recorded"
    version: ClassVar[str] = "1"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(self, sizes: Mapping[str, RecordedSizes]) -> None:
        self._sizes = sizes

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``."""
        del rng
        held = snapshot.held()
        present = [job for job in snapshot.jobs if not self._is_paused(job, snapshot.at)]
        jobs = sorted(present, key=self._turn)
        running, waiting = ([job for job in jobs if (held[job.key] != NOTHING) is runs] for runs in (True, False))
        given: dict[JobKey, Allocation] = dict.fromkeys(held, NOTHING)
        # All running jobs keep what they have before any of them is enlarged.
        for job in running:
            size = self._size(job, snapshot.at).common(held[job.key])
            if packing.add(job, size) is None:
                given[job.key] = size
        for job in running:
            for size in (self._size(job, snapshot.at), held[job.key]):
                if given[job.key] != NOTHING and packing.add(job, size.beyond(given[job.key])) is None:
                    given[job.key] = size
                    break
        for job in waiting:
            idle = all(size == NOTHING for size in given.values())
            sizes = (self._size(job, snapshot.at), *((job.request.min_size,) if idle else ()))
            given[job.key] = next((size for size in sizes if packing.add(job, size) is None), NOTHING)
            if given[job.key] == NOTHING:
                break
        entries = tuple(JobDecision(job.key, given[job.key], _REASON, held[job.key]) for job in snapshot.jobs)
        return Decision(self.name, self.version, entries)

    def _is_paused(self, job: Job, at: float) -> bool:
        """Whether the last recorded change took everything from the job, and a later one gave it something again."""
        sizes = self._sizes.get(job.key.id, ())
        before, later = [size for time, size in sizes if time <= at], [size for time, size in sizes if time > at]
        return bool(before) and before[-1] == NOTHING and any(size != NOTHING for size in later)

    def _turn(self, job: Job) -> tuple[float, int]:
        sizes = self._sizes.get(job.key.id)
        return sizes[0][0] if sizes else float("inf"), job.key.submitted

    def _size(self, job: Job, at: float) -> Allocation:
        """The recorded size at a time, within the job's bounds."""
        sizes = [each for each in self._sizes.get(job.key.id, ()) if each[1] != NOTHING]
        if not sizes:
            return job.request.min_size
        return _within_bounds(next((size for time, size in reversed(sizes) if time <= at), sizes[0][1]), job.request)


def _within_bounds(size: Allocation, request: JobRequest) -> Allocation:
    least = request.min_size
    workers = max(request.largest_allowed(size.workers), least.workers)
    return Allocation(workers, min(max(size.ps, least.ps), request.max_ps))
