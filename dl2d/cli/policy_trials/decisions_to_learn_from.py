"""Recorded decisions of a store that a policy may learn from: those outside the days on which versions are compared.

Where the gate could not compare versions on these days, since there are too few of them or of their jobs, none are left
out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.policy_trials.trial_on_recorded_days import recorded_days, too_little_to_judge
from dl2d.config.settings import Settings
from dl2d.core.cluster import Node
from dl2d.core.errors import RequestError, TooFewSamples, WorkloadError, counted
from dl2d.core.jobs import JobRequest
from dl2d.core.progress_callback import Tell
from dl2d.core.store import Slot
from dl2d.daemon.policy_versions.active_version import nodes_and_requests
from dl2d.learning.site_records.recorded_days import day_name
from dl2d.learning.site_records.recorded_decisions import Recording, with_soon_starts
from dl2d.learning.site_records.split_of_recorded_days import Split
from dl2d.plugins import load_placement
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.tick.decision.present_sizes_decision import OBSERVED

#: Jobs, summed over slots, after which no older slot is read: in memory each takes about 3 KiB.
_MAX_JOBS = 500_000
_NOT_COMPARED = "completion times cannot be compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSlots:
    """What a store has to learn from, and to check with what was learned."""

    #: Slots that are not on a day on which versions are compared, oldest first.
    slots: list[Recording]
    #: The site's schedule.slot_seconds, in which a network counts times; slots of arrivals and ends come sooner.
    slot_seconds: float
    #: The recorded days as workloads, and those on which versions are compared; None if there are too few.
    days: Split | None
    #: Whether these days are left out.
    left_out: bool
    #: Why completion times on these days do not tell which weights are better; empty if they do.
    problem: str
    #: The nodes of the newest slot.
    nodes: Sequence[Node]
    #: The requests of the newest jobs.
    requests: Sequence[JobRequest]
    #: Whether as many slots were read as may be: there may be older ones.
    limit_reached: bool = False
    #: Whether older ones were not read, as the newest have so many jobs.
    jobs_limit_reached: bool = False

    @property
    def note(self) -> str:
        """What was left out, and why, or that there are no days to leave out."""
        days = [
            f"no days are left to compare versions on: {self.problem.removeprefix(f'{_NOT_COMPARED}: ')}"
            if self.days is None or not self.left_out
            else f"not learned from: {_names(self.days)}"
        ]
        newest = f"only the newest {counted(len(self.slots), 'slot')} with jobs were read: they list {_MAX_JOBS:,} jobs"
        return "; ".join([*days, *([newest] if self.jobs_limit_reached else [])])

    @property
    def deciders(self) -> list[str]:
        """A line that says who decided how many of the slots, if that was more than one."""
        counts = Counter(each.decision.policy for each in self.slots).most_common()
        if len(counts) < 2:
            return []
        (most, name), *others = ((number, _scheduler(policy)) for policy, number in counts)
        shares = "".join(f", {number} by {other}" for number, other in others)
        return [f"of the slots learned from {most} were decided by {name}{shares}; --policy NAME takes those of one"]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add to the error of too few samples what was not read."""
        try:
            yield
        except TooFewSamples as error:
            limited = f"only the newest {len(self.slots)} slots with jobs were read: raise --slots"
            told = [str(error), *([limited] if self.limit_reached else []), *([self.note] if self.note else [])]
            raise TooFewSamples("; ".join(told)) from None

    def with_days(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint that says on which days it was trained, so that it is not compared on these."""
        days = sorted({day_name(each.snapshot.at) for each in self.slots})
        return replace(checkpoint, training={**checkpoint.training, "days": days})


def recorded_slots(settings: Settings, limit: int, policy: str | None, seed: int, *, tell: Tell) -> RecordedSlots:
    """The newest slots with jobs outside the days on which versions are compared, of one policy or of all.

    No more than ``limit`` slots are read, however many are left out, and none after ``_MAX_JOBS`` jobs. Raises
    ``RequestError`` where there are none.
    """
    placement = load_placement(settings.placement)
    with open_store(settings) as store:
        try:
            days = recorded_days(
                settings, store, now=time.time(), seed=seed, assume_speeds=not settings.mode.acts, tell=tell
            )
            too_little = too_little_to_judge(settings, days)
            left_out = not too_little
            cause = too_little or ("jobs report no speeds" if days.unreported else "")
            problem = f"{_NOT_COMPARED}: {cause}" if cause else ""
        except WorkloadError as error:
            days, left_out, problem = None, False, f"{_NOT_COMPARED}: {error.problem}"
        outside = days.held_out_times if days is not None and left_out else ()
        listed = store.slots(limit=limit, policy=policy, outside=outside, with_jobs=True)
        found: list[Slot] = []
        jobs = 0
        for each in listed:
            if jobs >= _MAX_JOBS:
                break
            tell("recorded slots read", len(found), len(listed))
            if (slot := store.slot(each.number)) is not None:
                found.append(slot)
                jobs += len(slot.snapshot.jobs)
        cut = jobs >= _MAX_JOBS and len(found) < len(listed)
        found.reverse()
        nodes, requests = nodes_and_requests(store)
    if not found:
        whose = "" if policy is None else f" in which {policy} decided"
        where = f" outside {_names(days)}" if days is not None and left_out else ""
        raise RequestError("--slots", f"the store has no recorded slots with jobs{whose}{where}")
    return RecordedSlots(
        slots=with_soon_starts([Recording(slot.snapshot, slot.decision, placement) for slot in found]),
        slot_seconds=settings.schedule.slot_seconds, days=days, left_out=left_out, problem=problem, nodes=nodes,
        requests=requests,
        limit_reached=len(listed) == limit and not cut, jobs_limit_reached=cut,
    )  # fmt: skip


def _scheduler(policy: str) -> str:
    return f"the site's scheduler ({policy})" if policy == OBSERVED else policy


def _names(days: Split) -> str:
    names = ", ".join(day.name for day in days.held_out)
    return f"{names}, the days on which versions are compared (learning.gate_min_days)"
