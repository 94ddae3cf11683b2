"""What the resource manager has refused: nodes to single jobs, and growth by limits that it does not list. Pure.

A task that waits on a node on which it will not be started, or for a limit, is withdrawn, and what kept it waiting is
remembered for a while, so that the next tasks are asked for elsewhere, or later. So are nodes on which a task failed
before it had joined, or did not start in time: the same may happen to each task there, and as the node stays empty it
would be chosen again and again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from dl2d.core.cluster import Node, NodeSet, NodeState, Task, TaskState
from dl2d.core.jobs import Allocation, FailureCause, Job, JobKey
from dl2d.core.packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.resize_guard_state import GuardState, LearnedLimit, NodeRefusal
from dl2d.core.resource_manager import EligibleNodes, GrowthLimit, RmJob, RmJobState, RmListing
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.start_failures import MAX_BACKOFF_SECONDS, doubled
from dl2d.core.store import TaskChange
from dl2d.core.task_starts_and_stops import Outcome

#: How long a task that the resource manager refuses to start may wait; shorter than for one that waits for room, and
#: long enough for tasks that leave to make room in a limit.
MAX_REFUSED_SECONDS: Final = 30.0
#: How long a job avoids a node that was refused to it, or on which a task of it failed; doubled with each further
#: refusal or failure there, up to the second value.
_AVOID_SECONDS: Final = 300.0
_MAX_AVOID_SECONDS: Final = 3600.0
#: How long the jobs that were found to wait for a limit do not grow; doubled each time that it is found again, up to
#: ``MAX_BACKOFF_SECONDS``.
_LIMIT_SECONDS: Final = 60.0
#: A refusal is remembered for this long after its retry time; a further one until then doubles the delay.
_FORGET_SECONDS: Final = 3600.0
#: So many nodes at most are avoided since tasks failed there, and so many combinations of them: each combination makes
#: a set of nodes, and with many sets packing is slow.
_MAX_AVOIDED: Final = 16
#: For so many sets of nodes without failures at most it is worked out in one tick what fits on them.
_MAX_PACKINGS: Final = 32


def _node_retry_at(refusal: NodeRefusal) -> float:
    """When the job may ask for its next task on the node, seconds since 1970."""
    return refusal.at + doubled(_AVOID_SECONDS, refusal.attempts, _MAX_AVOID_SECONDS)


def _growth_retry_at(limit: LearnedLimit) -> float:
    """When the jobs of a limit may grow again, seconds since 1970."""
    return limit.at + doubled(_LIMIT_SECONDS, limit.times, MAX_BACKOFF_SECONDS)


def why_refused(listed: RmJob) -> str:
    """Why a task that waits will not be started where it waits; empty if it only waits for room."""
    if listed.state is not RmJobState.PENDING:
        return ""
    if listed.limit is not None:
        return listed.limit.reason
    return listed.reason or "the node is refused" if listed.node_refused else ""


def remember_withdrawn(
    memory: GuardState,
    jobs: Iterable[Job],
    tasks: Sequence[Task],
    changes: Iterable[TaskChange],
    listed: Mapping[str, RmJob],
    at: float,
) -> GuardState:
    """The memory after a tick that makes these changes to these tasks: of those that it withdraws, what refused them.

    Nodes on which tasks failed before they had joined, or did not start in time, are remembered as well.

    ``listed`` has the resource manager's job of each task, by tag. What is remembered of jobs that are not among the
    live ones, ``jobs``, is dropped.
    """
    by_key = {job.key: job for job in jobs}
    before = {(task.job, task.id): task for task in tasks}
    refused: dict[JobKey, dict[str, str]] = defaultdict(dict)
    failed: dict[JobKey, dict[str, str]] = defaultdict(dict)
    limits: dict[str, GrowthLimit] = {}
    for change in changes:
        task = before[change.job, change.task]
        found = listed.get(task.tag)
        if _failed_on_node(task, change):
            failed[change.job].setdefault(change.node or task.node, f"a task failed there: {change.note}")
        if change.state is not TaskState.DRAINING or task.state is not TaskState.ASKED or found is None:
            continue
        if found.state is not RmJobState.PENDING or change.job not in by_key:
            continue
        if found.limit is not None:
            known = limits.get(found.limit.reason, found.limit)
            limits[found.limit.reason] = replace(known, anchors=known.anchors | {by_key[change.job].anchor})
        elif found.node_refused:
            refused[change.job].setdefault(task.node, found.reason)
        elif not found.any_node:
            failed[change.job].setdefault(task.node, f"a task was {change.note}")
    return replace(
        memory,
        refused_nodes=_refused_nodes(memory.refused_nodes, refused, by_key, at, failed),
        learned_limits=_learned_limits(memory.learned_limits, limits, by_key.values(), tasks, at),
    )


def _failed_on_node(task: Task, change: TaskChange) -> bool:
    """Whether a change is the end of a task that ran, but had not joined, by itself or with its node."""
    is_cause = change.cause in (FailureCause.FAILED, FailureCause.NODE_LOST)
    return change.state is TaskState.FAILED and is_cause and task.state in (TaskState.ASKED, TaskState.GRANTED)


def remember_refused_starts(memory: GuardState, outcome: Outcome, at: float) -> GuardState:
    """The memory after the starts of a tick, of which the resource manager has refused some because of their node."""
    refused: dict[JobKey, dict[str, str]] = defaultdict(dict)
    for failure in outcome.failures:
        if failure.node:
            refused[failure.job].setdefault(failure.node, failure.error)
    if not refused:
        return memory
    jobs = memory.refused_nodes.keys() | refused.keys()
    return replace(memory, refused_nodes=_refused_nodes(memory.refused_nodes, refused, jobs, at))


def _refused_nodes(
    known: Mapping[JobKey, Mapping[str, NodeRefusal]],
    refused: Mapping[JobKey, Mapping[str, str]],
    jobs: Iterable[JobKey],
    at: float,
    failed: Mapping[JobKey, Mapping[str, str]] = MappingProxyType({}),
) -> dict[JobKey, Mapping[str, NodeRefusal]]:
    kept: dict[JobKey, Mapping[str, NodeRefusal]] = {}
    for job in jobs:
        nodes = dict(known.get(job, {}))
        for is_failed, reasons in ((True, failed), (False, refused)):
            for node, reason in reasons.get(job, {}).items():
                before = nodes.get(node)
                nodes[node] = NodeRefusal(1 if before is None else before.attempts + 1, at, reason, is_failed)
        remembered = {
            # A time in the future means that the clock was set back.
            node: found._replace(at=min(found.at, at))
            for node, found in nodes.items()
            if at < _node_retry_at(found) + _FORGET_SECONDS
        }
        if remembered:
            kept[job] = remembered
    return kept


def _learned_limits(
    known: Mapping[str, LearnedLimit],
    found: Mapping[str, GrowthLimit],
    jobs: Iterable[Job],
    tasks: Iterable[Task],
    at: float,
) -> dict[str, LearnedLimit]:
    anchors = {job.anchor: job.key for job in jobs if job.anchor}
    running: dict[JobKey, list[Resources]] = defaultdict(list)
    for task in tasks if found else ():
        if task.state is not TaskState.ASKED and task.state.wanted:
            running[task.job].append(task.demand)
    learned = {
        reason: limit._replace(at=min(limit.at, at))
        for reason, limit in known.items()
        if at < _growth_retry_at(limit) + MAX_BACKOFF_SECONDS and anchors.keys() & limit.anchors
    }
    for reason, limit in found.items():
        members = sorted(limit.anchors & anchors.keys())
        holds = Resources.total(demand for anchor in members for demand in running[anchors[anchor]])
        had = {name: holds.get(name) + left for name, left in limit.left.items()}
        times = learned[reason].times + 1 if reason in learned else 1
        learned[reason] = LearnedLimit(tuple(members), had, times, at)
    return learned


def learned_growth_limits(
    memory: GuardState, jobs: Iterable[Job], tasks: Iterable[Task], at: float
) -> tuple[GrowthLimit, ...]:
    """The limits that hold at this time since they were found a short while ago."""
    active = {reason: limit for reason, limit in memory.learned_limits.items() if at < _growth_retry_at(limit)}
    if not active:
        return ()
    keys = {job.key: job.anchor for job in jobs}
    running: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        if task.state is not TaskState.ASKED and task.job in keys:
            running[keys[task.job]].append(task.demand)
    limits = []
    for reason, limit in active.items():
        holds = Resources.total(demand for anchor in limit.anchors for demand in running[anchor])
        # Negative where they hold more by now: withdrawn tasks that have not ended count as well.
        left = {name: had - holds.get(name) for name, had in limit.had.items()}
        limits.append(GrowthLimit(frozenset(limit.anchors), left, reason))
    return tuple(limits)


def node_sets(
    jobs: Iterable[Job],
    listing: RmListing,
    refused: Mapping[JobKey, Mapping[str, NodeRefusal]],
    placement: Placement,
    at: float,
) -> tuple[NodeSet, ...]:
    """The nodes that each job may use, as the resource manager says and without those that it refused lately.

    Nodes on which a task of the job lately failed or did not start are left out as well. Where the others, when empty,
    do not hold its smallest size and a task of each of its roles, of these nodes as many are used again as it takes,
    those with the fewest and oldest failures first. Jobs that may use all nodes are in no set.
    """
    if not listing.eligible_nodes and not refused:
        return ()
    all_nodes = frozenset(node.name for node in listing.nodes)
    everywhere = EligibleNodes(all_nodes, "")
    known = {
        key: {name: found for name, found in nodes.items() if at < _node_retry_at(found)}
        for key, nodes in refused.items()
    }
    failing = _failing_nodes(known)
    empty = _EmptyNodes(listing.nodes, placement)
    #: The nodes that are left, by what may be used and is avoided.
    left: dict[tuple[EligibleNodes, frozenset[str]], frozenset[str]] = {}
    #: Jobs by what they may use, and which of these nodes they avoid; most jobs of a partition share one record.
    alike: dict[tuple[EligibleNodes, frozenset[str]], list[JobKey]] = defaultdict(list)
    for job in jobs:
        eligible = listing.eligible_nodes.get(job.anchor, everywhere)
        refusals = known.get(job.key, {})
        refusing = frozenset(name for name, found in refusals.items() if not found.failed)
        avoided = refusing | failing.get(job.key, frozenset())
        for name in sorted(avoided - refusing, key=lambda name: refusals[name][:2]):
            if (eligible, avoided) not in left:
                left[eligible, avoided] = eligible.nodes - avoided
            if empty.hold(job, left[eligible, avoided]):
                break
            avoided -= {name}
        if eligible is not everywhere or avoided:
            alike[eligible, avoided].append(job.key)
    sets = []
    for (eligible, avoided), keys in alike.items():
        reasons = [eligible.reason] if eligible.reason else []
        reasons += [f"not {name}, {_common_reason(name, [known[key] for key in keys])}" for name in sorted(avoided)]
        nodes = (eligible.nodes & all_nodes) - avoided
        if nodes != all_nodes:
            sets.append(NodeSet(tuple(keys), nodes, "; ".join(reasons)))
    return tuple(sets)


class _EmptyNodes:
    """The nodes that accept tasks, as if nothing ran on them."""

    def __init__(self, nodes: Iterable[Node], placement: Placement) -> None:
        self._nodes = [
            Node(node.name, node.capacity, NO_RESOURCES, node.state) for node in nodes if node.state is NodeState.UP
        ]
        self._placement = placement
        #: Names of the nodes with room for a demand, and how many of some nodes these are.
        self._with_room: dict[Resources, frozenset[str]] = {}
        self._counts: dict[tuple[frozenset[str], Resources], int] = {}
        self._packings: dict[frozenset[str], Packing] = {}
        self._answers: dict[tuple[frozenset[str], Resources, Resources, Allocation], bool] = {}

    def hold(self, job: Job, names: frozenset[str]) -> bool:
        """Whether the nodes with these names hold the smallest size of a job, and a task of each of its roles.

        Few packings are made in a tick, since each costs as much as there are nodes; beyond these the answer is no.
        None is made where so many nodes have room for any task of the job that each task finds one without another.
        """
        request, least = job.request, _least_allocation(job)
        demands = (request.worker, request.ps) if least.ps else (request.worker,)
        if self._placement.keeps_bundles:
            demands = (Resources.total(demands),)
        if not self._placement.head_only and all(self._count(names, each) >= sum(least) for each in demands):
            return True
        key = names, request.worker, request.ps, least
        if key not in self._answers:
            packing = self._packings.get(names)
            if packing is None:
                if len(self._packings) == _MAX_PACKINGS:
                    return False
                packing = Packing([node for node in self._nodes if node.name in names], self._placement)
                self._packings[names] = packing
            self._answers[key] = packing.fits(job, least)
        return self._answers[key]

    def _count(self, names: frozenset[str], demand: Resources) -> int:
        """How many of the nodes with these names have room for a demand."""
        if demand not in self._with_room:
            self._with_room[demand] = frozenset(node.name for node in self._nodes if demand.fits_in(node.capacity))
        if (names, demand) not in self._counts:
            self._counts[names, demand] = len(self._with_room[demand] & names)
        return self._counts[names, demand]


def _least_allocation(job: Job) -> Allocation:
    """The smallest size of a job, with one parameter server at least if it may have some."""
    smallest = job.request.min_size
    return smallest._replace(ps=max(smallest.ps, min(job.request.max_ps, 1)))


def _common_reason(name: str, refused: Sequence[Mapping[str, NodeRefusal]]) -> str:
    """Why jobs avoid a node, given what each knows of its nodes: no job is shown what became of another one's task."""
    found = refused[0][name]
    if any(each[name].failed != found.failed for each in refused):
        return "a task failed there, was not started or was refused"
    reason = found.reason if found.failed else f"refused: {found.reason}"
    if all(each[name].reason == found.reason for each in refused):
        return reason
    return "a task failed there or was not started" if found.failed else "refused"


def _failing_nodes(refused: Mapping[JobKey, Mapping[str, NodeRefusal]]) -> dict[JobKey, frozenset[str]]:
    """The nodes on which tasks of each job failed: of these the ones that most jobs have, at most ``_MAX_AVOIDED``.

    Jobs beyond as many combinations of such nodes avoid the one only that most jobs avoid.
    """
    failing = {
        job: frozenset(name for name, found in nodes.items() if found.failed)
        for job, nodes in refused.items()
        if any(found.failed for found in nodes.values())
    }
    counts = Counter(name for nodes in failing.values() for name in nodes)
    worst = [name for name, _ in counts.most_common(_MAX_AVOIDED)]
    failing = {job: nodes.intersection(worst) for job, nodes in failing.items()}
    kept = dict(Counter(failing.values()).most_common(_MAX_AVOIDED))
    return {job: nodes if nodes in kept else nodes.intersection(worst[:1]) for job, nodes in failing.items()}
