"""Progress of a job within one slot in which its speed may change."""

from __future__ import annotations

from typing import NamedTuple


class Reached(NamedTuple):
    """Epochs done in a slot, and which fraction of the slot it took where the job has ended in it."""

    epochs: float
    ended: float | None


class SlotProgress:
    """Speeds of a job within one slot, in epochs per slot; times are fractions of the slot."""

    def __init__(self, speed: float) -> None:
        self._changes: list[tuple[float, float]] = [(0.0, speed)]

    @property
    def trains(self) -> bool:
        """Whether the job gets on at all."""
        return any(speed > 0 for at, speed in self._changes if at < 1)

    @property
    def last_speed(self) -> float:
        """Speed at the end of the slot."""
        return next(speed for at, speed in reversed(self._changes) if at < 1)

    def change(self, at: float, standstill: float, speed: float) -> None:
        """From ``at`` on, stand still for a while and then go at another speed; drops what was to come later."""
        if at >= 1:
            return
        self._changes = [change for change in self._changes if change[0] < at]
        if standstill > 0 or not self._changes:
            self._changes.append((at, 0.0 if standstill > 0 else speed))
        if standstill > 0 or at > 0:
            self._changes.append((at + standstill, speed))

    def run(self, left: float) -> Reached:
        """Go through the slot with so many epochs left to do."""
        done = 0.0
        ends = [at for at, _ in self._changes[1:]]
        for (begin, speed), end in zip(self._changes, [*ends, 1.0], strict=True):
            if begin >= 1:
                break
            gain = speed * (min(end, 1.0) - begin)
            if speed > 0 and done + gain >= left:
                return Reached(left, min(begin + (left - done) / speed, 1.0))
            done += gain
        return Reached(done, None)
