"""Dealing of samples to workers with loops of their own: each sample of an epoch once, to whoever asks next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Deal(NamedTuple):
    """Places [low, high) of the order of samples of an epoch, dealt in epoch `epoch`; none: that is over."""

    epoch: int
    order: int = 0
    low: int = 0
    high: int = 0


#: the first sample, dealt without being taken from the others
NOT_COUNTED = Deal(-1, -1, 0, 1)


class Seen(NamedTuple):
    """What a worker has seen of the deals: the last epoch that is over for it, and its last deal's epoch."""

    over: int = -1
    epoch: int = -1


@dataclass(eq=False)
class SampleDealer:
    """What is dealt of the epoch under way.

    Of its last step all workers have equal parts, so that it ends for all with the same step.  What a worker was dealt
    for a step in which it died is dealt again.
    """

    samples: int
    epoch: int = 0
    place: int = 0
    #: the newest version of the job that a worker has said
    version: int = 0
    #: to be dealt again, before others
    returned: list[Deal] = field(default_factory=list)
    #: by worker, what it was dealt at its last version, and that version
    dealt: dict[str, tuple[int, list[Deal]]] = field(default_factory=dict)
    #: by worker, the last epoch of whose last step it had its part
    served: dict[str, int] = field(default_factory=dict)

    @property
    def epochs(self) -> float:
        """Epochs that are dealt."""
        return self.epoch + self.place / self.samples

    def deal(self, task: str, version: int, seen: Seen, count: int, workers: int) -> Deal:
        """Deal one of so many workers up to `count` samples of the epoch that it is in, or of the next one."""
        self.version = max(self.version, version)
        done = self.place >= self.samples and not self.returned
        served = self.served.get(task) == seen.epoch and not self.returned
        if seen.epoch > seen.over and (seen.epoch < self.epoch or done or served):
            return Deal(seen.epoch)
        if self.epoch <= seen.over or done:
            if self.place < self.samples:
                self.returned.append(Deal(self.epoch, self.epoch, self.place, self.samples))
            self.epoch, self.place = self.epoch + 1, 0
        if self.returned:
            _, order, low, high = self.returned.pop(0)
            if low + count < high:
                self.returned.insert(0, Deal(self.epoch, order, low + count, high))
            given = Deal(self.epoch, order, low, min(low + count, high))
        else:
            have = {other for other, (at, _) in self.dealt.items() if at == version}
            have |= {other for other, epoch in self.served.items() if epoch == self.epoch}
            part = math.ceil((self.samples - self.place) / max(1, workers - len(have - {task})))
            given = Deal(self.epoch, self.epoch, self.place, self.place + min(count, part))
            self.place = given.high
            if part < count:
                self.served[task] = self.epoch
        before, deals = self.dealt.get(task, (version, []))
        self.dealt[task] = version, [*(deals if before == version else ()), given]
        return given

    def lose(self, task: str, version: int) -> None:
        """Take back what a dead worker was dealt for a step that is not complete; `version` is the job's."""
        before, deals = self.dealt.pop(task, (-1, []))
        if before >= max(self.version, version):
            self.returned += deals
