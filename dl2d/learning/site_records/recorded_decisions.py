"""Recorded decisions of a scheduler, by slot, and how near the sizes of other deciders come to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import SOON_SECONDS, Decision
from dl2d.core.errors import TooFewSamples, counted
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Count, uncounted
from dl2d.policies.drf import Drf
from dl2d.tick.decision.present_sizes_decision import OBSERVED

#: Jobs that recorded slots must have, unless the caller says otherwise.
MIN_JOBS = 20
_MIN_SLOTS = 2
#: In each so many consecutive blocks of slots the last is held out for a comparison, and the middle one to stop by.
_CYCLE = 5
_STOPPING_BLOCK = 2
#: Number of such cycles at most, and slots with a choice that a block has at least where there are several cycles.
_MAX_CYCLES = 5
_MIN_BLOCK = 8
#: Slots with a choice below which none are held out to stop by.
_MIN_STOPPING_SLOTS = 10
#: Part of the tasks that is printed as 0.0 %.
NO_TASKS = 0.0005


@dataclass(frozen=True, slots=True)
class Recording:
    """A decision on a snapshot, and the placement of its tasks."""

    snapshot: Snapshot
    decision: Decision
    placement: Placement

    def packing(self) -> Packing:
        """Packing of the snapshot for another decision on it."""
        seen = self.snapshot
        return Packing.for_decision(seen.nodes, seen.tasks, self.placement, seen.node_sets, seen.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """How decided sizes compare with those of recorded slots that were not learned from."""

    slots: int
    #: Number of jobs, summed over the slots, and the fraction of them with the recorded size.
    jobs: int
    same: float
    #: Tasks by which sizes differ, divided by the number of recorded tasks.
    differing: float
    #: Number of jobs that the recorded scheduler started in these slots, and the fraction of them with its size.
    started: int
    started_same: float
    #: Tasks given to jobs that the recorded scheduler left waiting, a part of ``differing``.
    given_to_waiting: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What simple deciders reach on the same slots as the network: its comparison alone says little."""

    #: Every job keeps the size that it had before the slot.
    as_before: SizeComparison
    drf: SizeComparison
    #: DRF gives the recorded sizes in these slots, but not in those that were learned from.
    drf_only_here: bool = False


class SplitRecordings(NamedTuple):
    """Recorded slots with jobs, by what they are for; each is oldest first.

    Those to stop by and to compare on are slots in which there was a choice (``has_choice``), if any slots are.
    """

    training: Sequence[Recording]
    #: Slots whose error decides when learning stops; empty if there are too few.
    stopping: Sequence[Recording]
    compared: Sequence[Recording]
    #: Number of different jobs in all of them.
    jobs: int


def with_soon_starts(recordings: Sequence[Recording]) -> list[Recording]:
    """Slots, oldest first, in which also counts what the site's scheduler started soon after an observed slot.

    A slot is recorded as soon as a job comes or ends. The scheduler starts jobs some seconds later, so that a later
    slot shows them; without this, it would seem to have left room. A start counts in each slot within
    ``SOON_SECONDS`` before it from which on the job had room.
    """
    found = list(recordings)
    #: Of each job, the time of the slot that was recorded with its start: the first of those gone through so far.
    started_at: dict[JobKey, float] = {}
    for number in reversed(range(len(found) - 1)):
        each, later = recordings[number], found[number + 1]
        started_at |= dict.fromkeys(_starts(recordings[number + 1].decision), later.snapshot.at)
        if {each.decision.policy, later.decision.policy} != {OBSERVED}:
            continue
        starts = {
            job: size
            for job, size in _starts(later.decision).items()
            if 0 <= started_at[job] - each.snapshot.at <= SOON_SECONDS
        }
        given = _with_starts(each, starts)
        if given != each.decision:
            found[number] = replace(each, decision=given)
            found[number + 1] = replace(later, decision=_with_previous(later.decision, given))
    return found


def _starts(decision: Decision) -> dict[JobKey, Allocation]:
    """Sizes of the jobs that had nothing before a decision and have something with it."""
    return {entry.job: entry.allocation for entry in decision.jobs if entry.previous == NOTHING != entry.allocation}


def _with_starts(recording: Recording, starts: Mapping[JobKey, Allocation]) -> Decision:
    """The recorded decision, in which also those waiting jobs start for whose size in ``starts`` there was room."""
    decision = recording.decision
    if not any(entry.job in starts and entry.allocation == NOTHING for entry in decision.jobs):
        return decision
    packing, jobs = recording.packing(), {job.key: job for job in recording.snapshot.jobs}
    for entry in decision.jobs:
        packing.add(jobs[entry.job], entry.allocation)
    return replace(
        decision,
        jobs=tuple(
            replace(entry, allocation=starts[entry.job])
            if entry.job in starts
            and entry.allocation == NOTHING
            and packing.add(jobs[entry.job], starts[entry.job]) is None
            else entry
            for entry in decision.jobs
        ),
    )


def _with_previous(decision: Decision, before: Decision) -> Decision:
    """A decision that starts no job which the one before gave the same size: that is its previous size, too."""
    sizes = before.allocations()
    return replace(
        decision,
        jobs=tuple(
            replace(entry, previous=entry.allocation)
            if entry.previous == NOTHING and sizes.get(entry.job, NOTHING) == entry.allocation
            else entry
            for entry in decision.jobs
        ),
    )


def split_recordings(recordings: Sequence[Recording], min_jobs: int = MIN_JOBS) -> SplitRecordings:
    """Keep a fifth of the slots for the comparison, and another to stop by.

    Both are made of whole blocks, spread over the recorded time: consecutive slots are alike, so slots beside those
    that were learned from tell little. Blocks have equal numbers of slots with a choice: what all deciders give, as to
    jobs that keep their sizes while none waits, tells nothing about a scheduler.

    Raises
    ------
    TooFewSamples
        There are less than two slots with jobs, or they have less than ``min_jobs`` different jobs.
    """
    given = [recording for recording in recordings if recording.snapshot.jobs]
    if len(given) < _MIN_SLOTS:
        raise TooFewSamples(
            f"supervised learning: {_MIN_SLOTS} slots with jobs are needed, the store has {len(given)}; record longer, "
            "or with a shorter schedule.slot_seconds if jobs end between two slots"
        )
    jobs = len({job.key for recording in given for job in recording.snapshot.jobs})
    if jobs < min_jobs:
        raise TooFewSamples(
            f"supervised learning: the recorded slots have {counted(jobs, 'job')}, at least {min_jobs} "
            "are needed; record more, or lower --min-jobs"
        )
    choice = [has_choice(each, before) for before, each in zip([None, *given], given, strict=False)]
    if sum(choice) < _MIN_SLOTS:
        choice = [True] * len(given)
    count, earlier = sum(choice), itertools.accumulate(choice, initial=0)
    blocks = _CYCLE * min(max(count // (_CYCLE * _MIN_BLOCK), 1), _MAX_CYCLES)
    parts: tuple[list[Recording], list[Recording], list[Recording]] = [], [], []
    training, stopping, compared = parts
    for each, chosen, number in zip(given, choice, earlier, strict=False):
        place = (min(number + 1, count) * blocks - 1) // count % _CYCLE  # the last slots are in the last block
        if place == _CYCLE - 1:
            part = compared
        else:
            part = stopping if place == _STOPPING_BLOCK and count >= _MIN_STOPPING_SLOTS else training
        if chosen or part is training:
            part.append(each)
    return SplitRecordings(training, stopping, compared, jobs)


def has_choice(recording: Recording, before: Recording | None) -> bool:
    """Whether a job waited, started or changed its size in a slot, or one had ended since the slot before.

    A job that waits and may use no node, such as one that its user holds (``scontrol hold``), is no choice.
    """
    unable = {job for each in recording.snapshot.node_sets if not each.nodes for job in each.jobs}
    if any(
        entry.allocation != entry.previous or (entry.allocation == NOTHING and entry.job not in unable)
        for entry in recording.decision.jobs
    ):
        return True
    keys = {job.key for job in recording.snapshot.jobs}
    return before is not None and any(job.key not in keys for job in before.snapshot.jobs)


def simple_yardstick(split: SplitRecordings, seed: int) -> Yardstick:
    """Compute the comparisons of the simple deciders on the held-out slots."""
    drf = compare_sizes(sizes_of(Drf(), seed), split.compared)
    return Yardstick(
        as_before=compare_sizes(
            lambda recording: {entry.job: entry.previous for entry in recording.decision.jobs}, split.compared
        ),
        drf=drf,
        drf_only_here=drf.differing < NO_TASKS
        and compare_sizes(sizes_of(Drf(), seed), split.training).differing >= NO_TASKS,
    )


def sizes_of(policy: Policy, seed: int) -> Callable[[Recording], Mapping[JobKey, Allocation]]:
    """The function that has a policy decide on a recorded snapshot."""

    def sizes(recording: Recording) -> Mapping[JobKey, Allocation]:
        snapshot = recording.snapshot
        return policy.decide(snapshot, recording.packing(), np.random.default_rng([seed, snapshot.slot])).allocations()

    return sizes


def compare_sizes(
    decide: Callable[[Recording], Mapping[JobKey, Allocation]], recordings: Sequence[Recording],
    progress: Count = uncounted,
) -> SizeComparison:  # fmt: skip
    """Compare the sizes that ``decide`` gives to the jobs of recorded slots with the recorded ones.

    ``progress`` is told how many of how many slots are compared.
    """
    jobs = same = tasks = differing = started = started_same = given_to_waiting = 0
    for number, each in enumerate(recordings):
        progress(number, len(recordings))
        sizes = decide(each)
        for entry in each.decision.jobs:
            got, wanted = sizes[entry.job], entry.allocation
            new = entry.previous == NOTHING != wanted
            started += new
            started_same += new and got == wanted
            jobs += 1
            same += got == wanted
            tasks += wanted.tasks
            differing += abs(got.workers - wanted.workers) + abs(got.ps - wanted.ps)
            given_to_waiting += got.tasks if wanted == NOTHING else 0
    return SizeComparison(
        slots=len(recordings), jobs=jobs, same=same / max(jobs, 1), differing=differing / max(tasks, 1),
        started=started, started_same=started_same / max(started, 1),
        given_to_waiting=given_to_waiting / max(tasks, 1),
    )  # fmt: skip
