"""Load balancing: members that are measured to be slower get fewer shards or fewer bytes of weights.

Workers differ in seconds per logical shard, servers in seconds per byte of weights.  Shards and blocks are divided
so that the slowest is done as early as possible.  In exact mode no bit depends on who does what.

A new division is made only if all of `Rule` says so; then the next plan has it, like any other plan.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from pslite.job.membership_plan import Plan
from pslite.job.shard_and_block_assignment import assign, ranges
from pslite.job.step_time_and_usage_statistics import StepTimes, Throughput

#: reports of a member that are looked at, newest last; one comes with a heartbeat that had a step
_MAX_REPORTS = 60


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When another division is worth a plan; times in seconds."""

    #: members are measured for so long under a plan before it is judged, and for so many reports
    measure: float = 30.0
    reports: int = 5
    #: a step has to become so much shorter, as a share of what it takes now
    gain: float = 0.10
    #: that must be so for so long without a break
    steady: float = 10.0
    #: all steps that are left must become shorter by so much together: a plan has its price too
    worth: float = 10.0
    #: the least time between two divisions; it doubles, up to `most_pause`, when one brings less than half of what
    #: it promised
    pause: float = 60.0
    most_pause: float = 3600.0
    #: between two looks
    look: float = 1.0
    #: a member that takes so many times as long as the others' median is called slow
    slow: float = 1.3


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A member that is slower than the others."""

    task: str
    host: str
    #: how many times as long as the others' median it takes for the same work
    factor: float
    #: in words
    reason: str


@dataclass(frozen=True)
class WorkDivision:
    """What each member is to have; empty where all are to have the same."""

    #: worker -> seconds for a shard
    workers: Mapping[str, float] = field(default_factory=dict)
    #: server -> seconds for a byte
    servers: Mapping[str, float] = field(default_factory=dict)

    def shares(self, shards: int, tasks: Sequence[str]) -> tuple[int, ...]:
        """Return how many shards each worker of a plan has; empty for almost equal numbers.

        One that was not measured counts as the median of those that were.
        """
        costs = _filled(self.workers, tasks)
        return shards_by_speed(shards, costs) if costs else ()

    def speeds(self, tasks: Sequence[str]) -> tuple[float, ...]:
        """Return how fast each server of a plan is; empty for all alike."""
        return tuple(1.0 / cost for cost in _filled(self.servers, tasks))


@dataclass(frozen=True)
class Proposal:
    """Another division, and what it is good for."""

    division: WorkDivision
    #: by how much a step becomes shorter, as a share of what it takes now
    gain: float
    reason: str


def shards_by_speed(shards: int, costs: Sequence[float]) -> tuple[int, ...]:
    """Return how many shards each worker computes so that the last one is done as early as possible.

    Parameters
    ----------
    shards
        their number, at least that of the workers.
    costs
        seconds that each worker takes for a shard, above 0.

    Returns
    -------
    At least one for each. Shards are given out one by one, each to who would have it done first, which makes the
    longest time as short as it can be. Where everybody's part in proportion to speed is a shard at least, nobody has
    less than that, rounded down. Among equal workers earlier ones come first.

    """
    if len(costs) > shards:
        raise ValueError(f"{len(costs)} workers cannot share {shards} shards")
    counts = [1] * len(costs)
    line = [(2 * cost, place) for place, cost in enumerate(costs)]
    heapq.heapify(line)
    for _ in range(shards - len(costs)):
        _, place = line[0]
        counts[place] += 1
        heapq.heapreplace(line, ((counts[place] + 1) * costs[place], place))
    return tuple(counts)


def _filled(costs: Mapping[str, float], tasks: Sequence[str]) -> list[float]:
    known = [costs[task] for task in tasks if task in costs]
    if not known:
        return []
    usual = statistics.median(known)
    return [costs.get(task, usual) for task in tasks]


@dataclass(eq=False)
class LoadBalancer:
    """Measures the members of a job, and says when its work should be divided anew."""

    rule: Rule
    #: "even": never; members are measured all the same
    by: Literal["speed", "even"] = "speed"
    #: what plans are made by
    division: WorkDivision = WorkDivision()
    stragglers: tuple[Straggler, ...] = ()
    _paces: dict[str, deque[Throughput]] = field(default_factory=dict)
    _steps: dict[str, deque[StepTimes]] = field(default_factory=dict)
    _began: float = 0.0
    _looked: float = 0.0
    #: since when a proposal has been good without a break
    _since: float = 0.0
    _divided_at: float = float("-inf")
    #: the least time between two divisions now; set by `begin`
    _pause: float = 0.0
    #: seconds of a step at most if the last division has brought half of what it promised; None: that is known
    _promised: float | None = None
    _members: frozenset[str] = frozenset()

    def begin(self, now: float, plan: Plan) -> None:
        """A plan has taken effect: what was measured before belongs to another."""
        self._paces.clear()
        self._steps.clear()
        self._began, self._since = now, 0.0
        self.stragglers = ()
        members = frozenset(plan.tasks())
        if members != self._members:
            self._members = members
            self._promised, self._pause = None, self.rule.pause

    def note(self, task: str, pace: Throughput | None, steps: StepTimes | None) -> None:
        """Take what a member has said with a heartbeat."""
        if pace is not None and pace.amount > 0 and pace.seconds > 0:
            self._paces.setdefault(task, deque(maxlen=_MAX_REPORTS)).append(pace)
        if steps is not None:
            self._steps.setdefault(task, deque(maxlen=_MAX_REPORTS)).append(steps)

    def consider(self, now: float, plan: Plan, shards: int, sizes: Sequence[int], left: int) -> Proposal | None:
        """Look at what was measured under the plan in force; return another division if that is worth a plan.

        Parameters
        ----------
        now
            monotonic seconds.
        plan
            the plan in force.
        shards
            how many there are; 0 if workers share nothing out.
        sizes
            bytes of each block.
        left
            versions that are left.

        """
        rule = self.rule
        if now - self._looked < rule.look:
            return None
        self._looked = now
        if now - self._began < rule.measure:
            return None
        workers = self._costs(m.task for m in plan.workers)
        servers = self._costs(m.task for m in plan.servers)
        self.stragglers = (
            *_slow(plan, workers, rule.slow, "computes a shard in {0:.3g} ms, the others in {1:.3g} ms", 1e3),
            *_slow(plan, servers, rule.slow, "updates 1 MB in {0:.3g} ms, the others in {1:.3g} ms", 1e9),
        )
        step = self._step_seconds()
        if self.by == "even" or not step:
            return None
        self._keep_word(step)
        proposal = self._propose(plan, workers if shards else {}, servers, step, shards, sizes)
        if proposal is None or proposal.gain * step * left < rule.worth:
            self._since = 0.0
            return None
        self._since = self._since or now
        if now - self._since < rule.steady or now - self._divided_at < self._pause:
            return None
        self._divided_at, self._since = now, 0.0
        self._promised = step * (1 - proposal.gain / 2)
        self.division = proposal.division
        return proposal

    def _costs(self, tasks: Iterable[str]) -> dict[str, float]:
        """Return the seconds that each member takes for a unit of work; nothing unless all are known."""
        found = {}
        for task in tasks:
            reports = self._paces.get(task, ())
            if len(reports) < self.rule.reports:
                return {}
            found[task] = statistics.median(pace.seconds / pace.amount for pace in reports)
        return found

    def _step_seconds(self) -> float:
        means = [statistics.median(times.mean_ms for times in reports) for reports in self._steps.values() if reports]
        return statistics.median(means) / 1e3 if means else 0.0

    def _keep_word(self, step: float) -> None:
        """See whether the last division has brought what it promised: if not, be slower to make another."""
        promised, self._promised = self._promised, None
        if promised is not None:
            self._pause = self.rule.pause if step <= promised else min(self.rule.most_pause, 2 * self._pause)

    def _propose(
        self,
        plan: Plan,
        workers: Mapping[str, float],
        servers: Mapping[str, float],
        step: float,
        shards: int,
        sizes: Sequence[int],
    ) -> Proposal | None:
        by_worker, by_server = self.division.workers, self.division.servers
        least = self.rule.gain * step
        saved, reasons = 0.0, []
        if len(workers) > 1:
            worker_costs = list(workers.values())
            even = tuple(high - low for low, high in ranges(shards, len(workers)))
            shares = plan.shares or even
            better = _better(
                shares, even, shards_by_speed(shards, worker_costs), lambda counts: longest(counts, worker_costs), least
            )
            if better is not None:
                by_worker = {} if better.division == even else workers
                saved += better.saved
                reasons.append(f"shards {_listed(shares)} become {_listed(better.division)}")
        if len(servers) > 1:
            server_costs = list(servers.values())
            tasks = [m.task for m in plan.servers]
            before = {block: tasks[owner] for block, owner in enumerate(plan.owners)}
            even = assign(sizes, before, tasks)
            by_speed = assign(sizes, before, tasks, [1 / cost for cost in server_costs])
            better = _better(
                plan.owners, even, by_speed,
                lambda owners: longest(loads(sizes, owners, len(tasks)), server_costs), least,
            )  # fmt: skip
            if better is not None:
                by_server = {} if better.division == even else servers
                saved += better.saved
                moved = sum(size for size, a, b in zip(sizes, plan.owners, better.division, strict=True) if a != b)
                reasons.append(f"{moved / 1e6:.1f} MB move between servers")
        if not reasons:
            return None
        return Proposal(WorkDivision(by_worker, by_server), saved / step, " and ".join(reasons))


class _Better(NamedTuple):
    """A division of work that is worth taking in place of the present one."""

    #: shards of each worker, or the owner of each block
    division: tuple[int, ...]
    #: seconds of a step
    saved: float


def _better(
    now: tuple[int, ...],
    even: tuple[int, ...],
    by_speed: tuple[int, ...],
    seconds: Callable[[tuple[int, ...]], float],
    least: float,
) -> _Better | None:
    """Return the even division, or the one by speed if that saves `least` seconds more; None if neither saves them."""
    chosen = by_speed if seconds(even) - seconds(by_speed) >= least else even
    saved = seconds(now) - seconds(chosen)
    return _Better(chosen, saved) if saved >= least else None


def longest(amounts: Sequence[float], costs: Sequence[float]) -> float:
    """Return how long the last one takes."""
    return max(amount * cost for amount, cost in zip(amounts, costs, strict=True))


def loads(sizes: Sequence[int], owners: Sequence[int], servers: int) -> list[int]:
    """Return how many bytes each server owns."""
    found = [0] * servers
    for size, owner in zip(sizes, owners, strict=True):
        found[owner] += size
    return found


def _listed(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts)) if len(counts) <= 16 else f"{min(counts)} to {max(counts)}"


def _slow(plan: Plan, costs: Mapping[str, float], factor: float, words: str, scale: float) -> list[Straggler]:
    found = []
    hosts = {m.task: m.host for m in (*plan.workers, *plan.servers)}
    for task, cost in costs.items():
        others = [other for name, other in costs.items() if name != task]
        usual = statistics.median_low(others) if others else cost
        if cost >= factor * usual:
            reason = words.format(scale * cost, scale * usual)
            found.append(Straggler(task=task, host=hosts[task], factor=round(cost / usual, 2), reason=reason))
    return found
