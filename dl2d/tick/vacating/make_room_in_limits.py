"""Room in the resource manager's limits for foreign jobs that wait for it.

A foreign job that waits for a limit of its account never starts while elastic jobs of the account fill the limit, and
these have no end. So elastic jobs give up tasks above their floors to it, as they do on nodes
(``vacate_for_waiting_jobs``): those that yield to it (``Yields``), in each limit that holds for it. What it needs is
taken off what the limit leaves, so that no elastic job of the limit grows into it. If tasks have to end for that, the
jobs that yield get a limit of their own (``GrowthLimit.makes_room_for``), down to which the guard shrinks them.

Waiting jobs get room in the order of their priority, each only if it fits into all its limits at once, with the elastic
jobs that yield to it at their floors and the minimum sizes of elastic jobs of at least its priority. In one limit,
tasks end at a time only for waiting jobs to which the same elastic jobs yield; others follow when these have room.

The resource manager may wait for room on nodes, or say nothing for a while, before it starts a job to which a limit has
left room. Until then its room is kept, but no more tasks end for it. When it runs, it counts in the limit in place of
its claim, so that the elastic jobs stay as they are. If it has not started ``MAX_UNUSED_SECONDS`` after there was room,
it waits for something else: it is set aside with all like it of its user, and tried again after ``RETRY_SECONDS``.

Cost: linear in the waiting jobs, and in the elastic jobs of the limits for which they wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dl2d.core.cluster import Claimant, Snapshot, Task, TaskState
from dl2d.core.errors import some_of
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.packing.room_in_limits import amounts_of_size, amounts_with_tasks
from dl2d.core.resource_manager import Claim, GrowthLimit, RmJobState, RmListing
from dl2d.core.resources import Resources
from dl2d.tick.vacating.elastic_jobs_that_yield import ElasticJobs
from dl2d.tick.vacating.vacate_for_waiting_jobs import (
    MAX_GRANTED,
    MAX_SET_ASIDE_SHAPES,
    MAX_UNUSED_SECONDS,
    MAX_VACATING_SECONDS,
    RETRY_SECONDS,
)

#: Maximum number of classes of jobs (``_ClaimClass``) for which a tick examines whether elastic jobs can make room.
_MAX_EXAMINED = 256
#: How much of the time between two complete listings counts at most: what a job waits for may change in between.
_MAX_COUNTED_SECONDS = 60.0
#: Maximum number of jobs named in a reason.
_MAX_SHOWN = 3

#: As ``amounts_with_tasks`` has them.
_Amounts = Counter[str]


class _Key(NamedTuple):
    """A waiting job. Tasks of a job array share a handle: when one of them starts, the number changes."""

    handle: str
    waiting: int


class _ClaimClass(NamedTuple):
    """What jobs have in common that are set aside together."""

    #: ``Claim.set_aside_with``.
    whose: tuple[str, bool]
    demand: Resources
    limits: frozenset[str]


class _WaitsForLimit(NamedTuple):
    """Jobs under a handle that wait, or have waited a short while ago, for a limit."""

    claims: tuple[Claim, ...]
    #: The limits that hold for them (``GrowthLimit.reason``).
    limits: frozenset[str]
    #: When a listing showed last that they wait for a limit, seconds on a monotonic clock.
    at: float


class _Waited(NamedTuple):
    """How a job has waited since it got room."""

    #: Seconds in which the limits had the room and it still waited for a limit. They are kept while tasks have to end
    #: again, and go on when there is room once more.
    unused: float = 0.0
    #: When they were counted last; None if they were not in the last tick.
    counted_at: float | None = None
    #: Since when tasks have been ending for the room; None if they do not.
    ending_since: float | None = None

    def after(self, now: float, *, is_free: bool, waits_for_limit: bool) -> _Waited:
        """The same in the next tick, in which it has room."""
        if not is_free:
            return _Waited(self.unused, None, now if self.ending_since is None else self.ending_since)
        if not waits_for_limit:
            return self.paused()
        elapsed = 0.0 if self.counted_at is None else min(now - self.counted_at, _MAX_COUNTED_SECONDS)
        return _Waited(self.unused + elapsed, now)

    def paused(self) -> _Waited:
        """The same while it has no room, or does not wait for a limit."""
        return _Waited(self.unused)

    def in_vain(self, now: float) -> bool:
        """Whether it has waited so long that it waits for something else, or that tasks cannot end."""
        too_long = self.ending_since is not None and now - self.ending_since > MAX_VACATING_SECONDS
        return too_long or self.unused > MAX_UNUSED_SECONDS


@dataclass(frozen=True, slots=True)
class LimitHistory:
    """History of jobs that wait for limits, kept from tick to tick. Times are seconds on a monotonic clock."""

    #: Jobs that wait for a limit or have waited for one a short while ago, by handle.
    waiting: Mapping[str, _WaitsForLimit] = field(default_factory=dict)
    #: How those that have got room have waited since.
    waited: Mapping[_Key, _Waited] = field(default_factory=dict)
    #: When jobs were set aside that did not start although the limits had room.
    set_aside: Mapping[_ClaimClass, float] = field(default_factory=dict)
    #: Jobs that got room in the last tick, and at the last decision. None if that was made on an incomplete listing,
    #: which shows none.
    granted: frozenset[_Key] = frozenset()
    decided: frozenset[_Key] | None = frozenset()
    #: Handles of the jobs that are set aside. No node is vacated for them either: tasks that move for it would fill its
    #: limit again.
    set_aside_handles: frozenset[str] = frozenset()

    def needs_decision(self) -> bool:
        """Whether a job has got room that had none at the last decision."""
        return bool(self.granted if self.decided is None else self.granted - self.decided)

    def after_decision(self, *, incomplete: bool) -> LimitHistory:
        """The history after a decision with the room of the last tick, on a listing that may be incomplete."""
        return replace(self, decided=None if incomplete else self.granted)


def make_room_in_limits(
    snapshot: Snapshot,
    listing: RmListing,
    history: LimitHistory,
    *,
    backing_off: Collection[JobKey],
    proposed: Mapping[JobKey, Allocation],
    now: float,
) -> tuple[tuple[GrowthLimit, ...], LimitHistory]:
    """The listing's limits with room for jobs that wait for them, and the next history. ``now``: on a monotonic clock.

    Silent jobs keep their tasks. Elastic jobs that have nothing do not come before a waiting job if they are silent or
    ``backing_off``, or if the policy has ``proposed`` nothing for them last.
    """
    if listing.incomplete or not (listing.limit_claims or history.waiting):
        return listing.growth_limits, history
    held, expired = _waiting_for_limits(listing, history, now)
    jobs = ElasticJobs(snapshot, listing)
    limited_by = frozenset[str]().union(*(each.limits for each in held.values()))
    rooms = _rooms(snapshot, listing.growth_limits, limited_by)
    by_name: dict[str, list[_LimitWithClaims]] = defaultdict(list)
    for room in rooms.values():
        by_name[room.limit.reason].append(room)
    set_aside = _still_set_aside(history, expired, now)
    other_limits = [limit for limit in listing.growth_limits if limit.reason not in limited_by]
    waiting = jobs.waiting(other_limits, backing_off) if rooms else []
    elastic = [key for key in waiting if key in jobs.without_tasks and proposed.get(key) != NOTHING]
    waited: dict[_Key, _Waited] = {}
    granted: set[_Key] = set()
    failed: set[_ClaimClass] = set()
    set_aside_handles: set[str] = set()
    set_aside_before: dict[tuple[str, bool], set[_ClaimClass]] = defaultdict(set)
    claims = [(claim, each) for each in held.values() for claim in each.claims]
    for claim, each in sorted(claims, key=lambda pair: -pair[0].priority):
        while elastic and jobs.anchors[elastic[0]].priority >= claim.priority:
            _keep_minimum(elastic.pop(0), jobs, rooms.values())
        kind, key = _ClaimClass(claim.set_aside_with, claim.demand, each.limits), _Key(claim.handle, claim.waiting)
        mine = [room for name in each.limits for room in by_name[name] if room.needs(claim)]
        if kind in set_aside:
            set_aside_before[kind.whose].add(kind)
            set_aside_handles.add(claim.handle)
        if kind in set_aside or kind in failed or len(set_aside_before[kind.whose]) >= MAX_SET_ASIDE_SHAPES:
            continue
        first, before = key not in waited, history.waited.get(key, _Waited())
        if first:
            waited[key] = before.paused()
        if not mine or any(len(room.claims) >= MAX_GRANTED for room in mine):
            continue
        is_free, waits_for_limit = not any(room.lacks(claim) for room in mine), each.at == now
        if not is_free and not waits_for_limit:
            continue
        if not is_free and (len(failed) >= _MAX_EXAMINED or not all(room.can_be_made(claim, jobs) for room in mine)):
            failed.add(kind)
            continue
        if first:  # of the tasks of an array
            waited[key] = before.after(now, is_free=is_free, waits_for_limit=waits_for_limit)
        if waited[key].in_vain(now):
            set_aside[kind] = now
            set_aside_handles.add(claim.handle)
            continue
        for room in mine:
            room.grant(claim, jobs)
        granted.add(key)
    limits = tuple(
        changed
        for number, limit in enumerate(listing.growth_limits)
        for changed in (rooms[number].limits() if number in rooms else (limit,))
    )
    decided = history.decided if granted else frozenset[_Key]()
    return limits, LimitHistory(held, waited, set_aside, frozenset(granted), decided, frozenset(set_aside_handles))


def _waiting_for_limits(
    listing: RmListing, history: LimitHistory, now: float
) -> tuple[dict[str, _WaitsForLimit], list[_WaitsForLimit]]:
    """The jobs that wait for limits, and those that did a short while ago and still wait, by handle.

    Where these wait for room on nodes by now, they are claims of the listing. Then those that have waited for something
    else for too long: the room that limits had for them was in vain.
    """
    claims: dict[str, list[Claim]] = defaultdict(list)
    for claim in listing.limit_claims:
        claims[claim.handle].append(claim)
    limits: dict[str, set[str]] = defaultdict(set)
    for limit in listing.growth_limits:
        for handle in limit.waiting:
            limits[handle].add(limit.reason)
    found = {handle: _WaitsForLimit(tuple(each), frozenset(limits[handle]), now) for handle, each in claims.items()}
    before = {handle: each for handle, each in history.waiting.items() if handle not in found}
    if not before:
        return found, []
    pending = {
        handle
        for job in listing.jobs
        if job.state is RmJobState.PENDING and job.priority
        for handle in (job.handle, job.shown_id)
    }
    on_nodes: dict[str, list[Claim]] = defaultdict(list)
    for claim in listing.claims:
        if claim.handle in before:
            on_nodes[claim.handle].append(claim)
    expired: list[_WaitsForLimit] = []
    for handle, each in before.items():
        if handle not in on_nodes and handle not in pending:
            continue
        if now - each.at > MAX_VACATING_SECONDS + MAX_UNUSED_SECONDS:
            expired.append(each)
        elif handle in on_nodes:
            found[handle] = each._replace(claims=tuple(on_nodes[handle]))
        else:
            found[handle] = each
    return found, expired


def _still_set_aside(history: LimitHistory, expired: Iterable[_WaitsForLimit], now: float) -> dict[_ClaimClass, float]:
    """When jobs were set aside that are not tried again yet, with those that ``expired`` after they had got room."""
    set_aside = {kind: at for kind, at in history.set_aside.items() if now - at < RETRY_SECONDS}
    for each in expired:
        for claim in each.claims:
            if _Key(claim.handle, claim.waiting) in history.waited:
                set_aside[_ClaimClass(claim.set_aside_with, claim.demand, each.limits)] = now
    return set_aside


def _rooms(snapshot: Snapshot, limits: Sequence[GrowthLimit], wanted: Collection[str]) -> dict[int, _LimitWithClaims]:
    """The room in the ``wanted`` limits (``GrowthLimit.reason``), by their place among all."""
    tasks: dict[JobKey, list[Task]] = defaultdict(list)
    for task in snapshot.tasks:
        tasks[task.job].append(task)
    floors, held = dict(snapshot.floors), snapshot.held()
    by_anchor = {job.anchor: job for job in snapshot.jobs}
    rooms = {number: _LimitWithClaims(limit) for number, limit in enumerate(limits) if limit.reason in wanted}
    for room in rooms.values():
        for anchor in sorted(room.limit.anchors & by_anchor.keys()):
            job = by_anchor[anchor]
            least, smallest = floors.get(job.key, NOTHING), job.request.min_size
            if held[job.key] != NOTHING:
                least = least.larger(smallest)
            room.add(job.key, anchor, tasks[job.key], Counter(dict(amounts_of_size(job.request, least))))
    return rooms


def _held_by(tasks: Collection[Task]) -> _Amounts:
    return Counter(dict(amounts_with_tasks(Resources.total(task.demand for task in tasks), len(tasks))))


def _keep_minimum(key: JobKey, jobs: ElasticJobs, rooms: Collection[_LimitWithClaims]) -> None:
    """Keep room for the minimum size of a waiting elastic job, if all its limits can have it."""
    request = jobs.requests[key]
    minimum = Counter(dict(amounts_of_size(request, request.min_size)))
    mine = [room for room in rooms if key in room.anchors]
    if all(room.can_keep(minimum) for room in mine):
        for room in mine:
            room.keep(key, minimum)


class _LimitWithClaims:
    """What a limit has for jobs that wait for it, and how much of that elastic jobs have to give up."""

    def __init__(self, limit: GrowthLimit) -> None:
        self.limit = limit
        #: What is free, without what elastic jobs have asked for and lack of their floors.
        self.free = {name: round(1000 * left) for name, left in limit.left.items()}
        #: Anchors of the elastic jobs.
        self.anchors: dict[JobKey, str] = {}
        #: Jobs that have got room, and how much.
        self.claims: list[Claim] = []
        self._reserved: _Amounts = Counter()
        #: What elastic jobs have asked for or is kept for them, and have above their floors.
        self._asked: dict[JobKey, _Amounts] = {}
        self._above_floor: dict[JobKey, _Amounts] = {}
        self._all_above_floors: _Amounts = Counter()
        #: Which of them yield, and what these have above their floors, by the place of the waiting job's priority among
        #: those of elastic jobs.
        self._yielding: dict[int, tuple[frozenset[JobKey], _Amounts]] = {}
        #: Which of them give up how much, and for which jobs.
        self._givers: frozenset[JobKey] = frozenset()
        self._given: _Amounts = Counter()
        self._for: list[Claim] = []

    def add(self, key: JobKey, anchor: str, tasks: Sequence[Task], least: _Amounts) -> None:
        """Add an elastic job with its tasks, which keeps at ``least`` so much."""
        asked, has = _held_by([task for task in tasks if task.state is TaskState.ASKED]), _held_by(tasks)
        self.anchors[key] = anchor
        self._asked[key] = asked
        self._above_floor[key] = Counter({name: max(has[name] - least[name], 0) for name in self.free})
        self._all_above_floors.update(self._above_floor[key])
        for name in self.free:
            self.free[name] -= asked[name] + max(least[name] - has[name], 0)

    def can_keep(self, minimum: _Amounts) -> bool:
        """Whether there is room for the minimum size of an elastic job, perhaps after others have given up some."""
        above_floors = self._all_above_floors
        return all(minimum[name] <= free + above_floors[name] - self._given[name] for name, free in self.free.items())

    def keep(self, key: JobKey, minimum: _Amounts) -> None:
        """Keep room for the minimum size of an elastic job that has nothing."""
        self._asked[key] = minimum
        for name in self.free:
            self.free[name] -= minimum[name]

    def needs(self, claim: Claim) -> bool:
        """Whether a job needs anything of what is limited."""
        return any(self._need(claim).values())

    def lacks(self, claim: Claim) -> _Amounts:
        """What is not free of what a job needs."""
        return Counter({name: n - self.free[name] for name, n in self._need(claim).items() if n > self.free[name]})

    def can_be_made(self, claim: Claim, jobs: ElasticJobs) -> bool:
        """Whether the room that a job lacks, if any, can be made, in this tick, by elastic jobs that yield to it."""
        lacks = self.lacks(claim)
        yielding, above_floors = self._jobs_that_yield(claim, jobs)
        return not lacks or (
            (not self._for or yielding == self._givers)
            and all(more + self._given[name] <= above_floors[name] for name, more in lacks.items())
        )

    def grant(self, claim: Claim, jobs: ElasticJobs) -> None:
        """Give a job what it needs, and have elastic jobs give up what it lacks."""
        lacks = self.lacks(claim)
        if lacks:
            self._givers, _ = self._jobs_that_yield(claim, jobs)
            self._given += lacks
            self._for.append(claim)
        for name, need in self._need(claim).items():
            self.free[name] += lacks[name] - need
            self._reserved[name] += need
        self.claims.append(claim)

    def limits(self) -> Iterator[GrowthLimit]:
        """The limit without what was given, and those of the jobs that yield and of the others, if any yield."""
        if not self.claims:
            yield self.limit
            return
        left = {name: max(most - self._reserved[name] / 1000, 0.0) for name, most in self.limit.left.items()}
        reason = f"{self.limit.reason}, beside what waiting jobs of others need"
        yield replace(self.limit, left=left, reason=reason)
        if not self._for:
            return
        asked = _Amounts()
        for key in self._givers:
            asked.update(self._asked[key])
        claimants = [Claimant(claim.handle, claim.user, claim.priority) for claim in self._for]
        by_text = {claimant.text: claimant for claimant in claimants}  # names tasks of a job array once
        yield GrowthLimit(
            frozenset(self.anchors[key] for key in self._givers),
            {name: (asked[name] - given) / 1000 for name, given in self._given.items()},
            f"room made for {some_of(list(by_text), _MAX_SHOWN)} in {self.limit.reason}",
            makes_room_for=tuple(by_text.values())[:_MAX_SHOWN],
        )
        others = frozenset(anchor for key, anchor in self.anchors.items() if key not in self._givers)
        if others:
            yield replace(self.limit, anchors=others, left=left, reason=reason)

    def _need(self, claim: Claim) -> dict[str, int]:
        amounts = dict(amounts_with_tasks(claim.demand, 1))
        return {name: amounts.get(name, 0) for name in self.free if amounts.get(name)}

    def _jobs_that_yield(self, claim: Claim, jobs: ElasticJobs) -> tuple[frozenset[JobKey], _Amounts]:
        place = bisect_left(jobs.priorities, claim.priority)
        if place not in self._yielding:
            keys = frozenset(key for key in self.anchors if jobs.yields(key, claim))
            above_floors = _Amounts()
            for key in keys:
                above_floors.update(self._above_floor[key])
            self._yielding[place] = keys, above_floors
        return self._yielding[place]
