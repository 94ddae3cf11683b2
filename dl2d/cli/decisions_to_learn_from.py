"""Recorded decisions of a store that a policy may learn from: those outside the days on which versions are compared."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from dl2d.cli.options import reading
from dl2d.cli.promotion_trial import recorded_days
from dl2d.config.settings import Settings
from dl2d.core.cluster import Node
from dl2d.core.errors import RequestError, TooFewSamples, WorkloadError
from dl2d.core.jobs import JobRequest
from dl2d.learning.recorded_days import day_name
from dl2d.learning.recorded_decisions import Recording
from dl2d.learning.split_of_recorded_days import Split
from dl2d.plugins import load_placement
from dl2d.policies.common.checkpoint import Checkpoint

_NOT_COMPARED: Final = "completion times cannot be compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSlots:
    """Slots of a store, oldest first."""

    slots: list[Recording]
    #: Those that are not on a day on which versions are compared.
    learned_from: list[Recording]
    #: Usual distance of two slots, in seconds.
    slot_seconds: float
    #: The days on which versions are compared; None if there are too few.
    days: Split | None
    #: Why completion times on these days do not tell which weights are better; empty if they do.
    problem: str

    @property
    def note(self) -> str:
        """Which days were left out, and why; empty for none."""
        if self.days is None or len(self.slots) == len(self.learned_from):
            return ""
        names = ", ".join(day.name for day in self.days.held_out)
        return f"not learned from: {names}, the days on which versions are compared (learning.gate_min_days)"

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes of the newest slot."""
        return self.slots[-1].snapshot.nodes

    @property
    def requests(self) -> list[JobRequest]:
        """The requests of the jobs in all slots, those of the newest first."""
        return [job.request for recording in reversed(self.slots) for job in recording.snapshot.jobs]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the note to the error of too few samples."""
        try:
            yield
        except TooFewSamples as error:
            raise TooFewSamples(f"{error}; {self.note}" if self.note else str(error)) from None

    def with_days(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint that says on which days it was trained, so that it is not compared on these."""
        days = sorted({day_name(each.snapshot.at) for each in self.learned_from})
        return replace(checkpoint, training={**checkpoint.training, "days": days})


def recorded_slots(settings: Settings, limit: int, policy: str | None, seed: int) -> RecordedSlots:
    """The newest slots of the store, of those in which one policy decided or of all.

    Raises ``RequestError`` where there are none.
    """
    placement = load_placement(settings.placement)
    with reading(settings) as store:
        listed = [each for each in store.slots(limit=limit) if policy in {None, each.policy}]
        found = [slot for each in reversed(listed) if (slot := store.slot(each.number)) is not None]
        if not found:
            whose = "" if policy is None else f" in which {policy} decided"
            raise RequestError("--slots", f"the store has no recorded slots{whose}")
        try:
            days = recorded_days(settings, store, now=time.time(), seed=seed, assume_speeds=not settings.mode.acts)
            problem = f"{_NOT_COMPARED}: jobs report no speeds" if days.unreported else ""
        except WorkloadError as error:
            days, problem = None, f"{_NOT_COMPARED}: {error.problem}"
    times = sorted(slot.at for slot in found)
    between = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
    slots = [Recording(slot.snapshot, slot.decision, placement) for slot in found]
    held_out = () if days is None else days.held_out
    return RecordedSlots(
        slots=slots,
        learned_from=[each for each in slots if not any(day.includes(each.snapshot.at) for day in held_out)],
        slot_seconds=statistics.median(between or [60.0]), days=days, problem=problem,
    )  # fmt: skip
