"""Assignment of samples to workers with loops of their own: each sample of an epoch once, to whoever asks next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

#: after so long without an answer the coordinator is asked for samples again
ASK_AGAIN_SECONDS = 1.0


class SampleRange(NamedTuple):
    """Positions [low, high) in the order of samples of epoch `order`, assigned in epoch `epoch`.

    Empty if `epoch` is over for the worker that asks.  The order is that of an earlier epoch where samples are assigned
    again that a worker had when it died.
    """

    epoch: int
    order: int = 0
    low: int = 0
    high: int = 0


#: the first sample, which others are assigned as well
NOT_COUNTED = SampleRange(-1, -1, 0, 1)


class Seen(NamedTuple):
    """What a worker knows of its answers: the last epoch that is over for it, and the epoch of its last samples."""

    over: int = -1
    epoch: int = -1


@dataclass(eq=False)
class SampleAssigner:
    """Samples of the present epoch, and which of them are assigned.

    In the last step of an epoch all workers have equal parts, so that it ends for all with the same step.  Samples of a
    worker that died in the middle of a step are assigned again.
    """

    samples: int
    epoch: int = 0
    #: of the first sample in the order of this epoch that is not assigned
    position: int = 0
    #: the newest version of the job that a worker has said
    version: int = 0
    #: to be assigned again, before others
    returned: list[SampleRange] = field(default_factory=list)
    #: by worker, the last version at which it asked, and its samples of the step from that version
    assigned: dict[str, tuple[int, list[SampleRange]]] = field(default_factory=dict)
    #: by worker, the last epoch of whose last step it has its part
    last_parts: dict[str, int] = field(default_factory=dict)

    @property
    def epochs(self) -> float:
        """Epochs that are assigned."""
        return self.epoch + self.position / self.samples

    def assign(self, task: str, version: int, seen: Seen, count: int, workers: int) -> SampleRange:
        """Assign up to `count` samples of the epoch that a worker is in, or of the next one.

        Parameters
        ----------
        task
            the worker.
        version
            of the job, at which the worker asks.
        seen
            which epochs it is in.
        count
            samples that its batch lacks.
        workers
            how many take part in a step.

        """
        self.version = max(self.version, version)
        none_left = self.position >= self.samples and not self.returned
        has_last_part = self.last_parts.get(task) == seen.epoch and not self.returned
        if seen.epoch > seen.over and (seen.epoch < self.epoch or none_left or has_last_part):
            return SampleRange(seen.epoch)
        if self.epoch <= seen.over or none_left:
            if self.position < self.samples:
                self.returned.append(SampleRange(self.epoch, self.epoch, self.position, self.samples))
            self.epoch, self.position = self.epoch + 1, 0
        given = self._from_returned(count) if self.returned else self._from_epoch(task, version, count, workers)
        before, ranges = self.assigned.get(task, (version, []))
        self.assigned[task] = version, [*(ranges if before == version else ()), given]
        return given

    def _from_returned(self, count: int) -> SampleRange:
        _, order, low, high = self.returned.pop(0)
        if low + count < high:
            self.returned.insert(0, SampleRange(self.epoch, order, low + count, high))
        return SampleRange(self.epoch, order, low, min(low + count, high))

    def _from_epoch(self, task: str, version: int, count: int, workers: int) -> SampleRange:
        """Take the next samples of this epoch; fewer than `count` where not all workers would have so many."""
        supplied = {other for other, (at, _) in self.assigned.items() if at == version}
        supplied |= {other for other, epoch in self.last_parts.items() if epoch == self.epoch}
        part = math.ceil((self.samples - self.position) / max(1, workers - len(supplied - {task})))
        given = SampleRange(self.epoch, self.epoch, self.position, self.position + min(count, part))
        self.position = given.high
        if part < count:
            self.last_parts[task] = self.epoch
        return given

    def take_back(self, task: str, version: int) -> None:
        """Return the samples of a worker that died in a step that is not complete; `version` is the job's."""
        before, ranges = self.assigned.pop(task, (-1, []))
        if before >= max(self.version, version):
            self.returned += ranges
