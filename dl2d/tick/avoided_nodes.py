"""Nodes that a job avoids for a while: a task of it failed or did not start there, or the node was refused to it.

The same may happen to each further task there, and as the node stays empty it would be chosen again and again. What was
refused or failed is remembered, so that the next tasks are asked for elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.cluster import Node, NodeSet, Snapshot, Task, TaskState
from dl2d.core.jobs import Allocation, FailureCause, Job, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement, keeps_bundles
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.core.resize_guard_state import GuardState, NodeTrouble
from dl2d.core.resource_manager import EligibleNodes, RmJob, RmListing
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.core.store import TaskChange
from dl2d.tick.count_failed_starts import gave_up_unconnected

#: How long a job avoids a node that was refused to it, or on which a task of it failed; doubled with each further
#: refusal or failure there, up to the second value.
_AVOID_SECONDS = 300.0
_MAX_AVOID_SECONDS = 3600.0
#: A refusal is remembered for this long after its retry time; a further one until then doubles the delay.
_FORGET_SECONDS = 3600.0
#: Maximum number of nodes that are avoided since tasks failed there.
_MAX_FAILING_NODES = 16
#: Maximum number of combinations of such nodes: each makes a set of nodes, and with many sets packing is slow.
_MAX_FAILING_COMBINATIONS = 16
#: Maximum number of sets of nodes without failures for which one tick works out what fits on them.
_MAX_PACKINGS = 32


def _retry_at(refusal: NodeTrouble) -> float:
    """When the job may ask for its next task on the node, seconds since 1970."""
    return refusal.at + doubled(_AVOID_SECONDS, refusal.attempts, _MAX_AVOID_SECONDS)


def avoided_of_queued(plan: Plan, snapshot: Snapshot, listing: RmListing) -> dict[JobKey, tuple[str, ...]]:
    """The nodes that jobs with starts without a node avoid at present, of those that they may use."""
    may_use, all_nodes = snapshot.may_use(), frozenset(node.name for node in listing.nodes)
    anchors = {job.key: job.anchor for job in snapshot.jobs}
    avoided = {}
    for key in {start.job for start in plan.starts if not start.node} & may_use.keys():
        eligible = listing.eligible_nodes.get(anchors[key])
        nodes = all_nodes if eligible is None else eligible.nodes & all_nodes
        avoided[key] = tuple(sorted(nodes - may_use[key]))
    return avoided


def remember_failing_nodes(
    guard_state: GuardState,
    jobs: Iterable[Job],
    tasks: Iterable[Task],
    changes: Iterable[TaskChange],
    withdrawn: Mapping[str, RmJob],
    at: float,
) -> GuardState:
    """Guard state with the nodes on which tasks failed or did not start in this tick, or were refused and withdrawn.

    ``changes`` are those that the tick makes to ``tasks``; ``withdrawn`` as ``withdrawn_tasks`` has it. What is
    remembered of jobs that are not among the live ones, ``jobs``, is dropped.
    """
    before = {(task.job, task.id): task for task in tasks}
    refused: dict[JobKey, dict[str, str]] = defaultdict(dict)
    failed: dict[JobKey, dict[str, str]] = defaultdict(dict)
    for change in changes:
        task = before[change.job, change.task]
        found = withdrawn.get(task.tag)
        if _failed_on_node(task, change):
            failed[change.job].setdefault(change.node or task.node, f"a task failed there: {change.note}")
        if gave_up_unconnected(task, change):
            failed[change.job].setdefault(change.node or task.node, f"a task {change.note}")
        if found is None or found.limit is not None:
            continue
        if found.node_refused:
            refused[change.job].setdefault(task.node, found.reason)
        elif not found.any_node:
            failed[change.job].setdefault(task.node, f"a task was {change.note}")
    kept = _avoided_nodes(guard_state.avoided_nodes, refused, [job.key for job in jobs], at, failed)
    return replace(guard_state, avoided_nodes=kept)


def _failed_on_node(task: Task, change: TaskChange) -> bool:
    """Whether a change is the end of a task that ran, but had not joined, by itself or with its node.

    One that was requeued counts: Slurm does that with a task that its node cannot launch.
    """
    cause = change.cause
    is_cause = cause is not None and (cause.is_own or cause in (FailureCause.NODE_LOST, FailureCause.REQUEUED))
    return change.state is TaskState.FAILED and is_cause and task.state in (TaskState.ASKED, TaskState.GRANTED)


def remember_refused_starts(guard_state: GuardState, outcome: Outcome, at: float) -> GuardState:
    """Guard state after the starts of a tick, of which the resource manager has refused some because of their node."""
    refused: dict[JobKey, dict[str, str]] = defaultdict(dict)
    for failure in outcome.failures:
        if failure.node:
            refused[failure.job].setdefault(failure.node, failure.error)
    if not refused:
        return guard_state
    jobs = guard_state.avoided_nodes.keys() | refused.keys()
    return replace(guard_state, avoided_nodes=_avoided_nodes(guard_state.avoided_nodes, refused, jobs, at))


def _avoided_nodes(
    known: Mapping[JobKey, Mapping[str, NodeTrouble]],
    refused: Mapping[JobKey, Mapping[str, str]],
    jobs: Iterable[JobKey],
    at: float,
    failed: Mapping[JobKey, Mapping[str, str]] = MappingProxyType({}),
) -> dict[JobKey, Mapping[str, NodeTrouble]]:
    """The next ``GuardState.avoided_nodes`` of ``jobs``, with the nodes that were ``refused`` and those where tasks
    ``failed`` or did not start, and why, by name.
    """
    kept: dict[JobKey, Mapping[str, NodeTrouble]] = {}
    for job in jobs:
        nodes = dict(known.get(job, {}))
        for is_failed, reasons in ((True, failed), (False, refused)):
            for node, reason in reasons.get(job, {}).items():
                before = nodes.get(node)
                nodes[node] = NodeTrouble(1 if before is None else before.attempts + 1, at, reason, is_failed)
        remembered = {
            # A time in the future means that the clock was set back.
            node: found._replace(at=min(found.at, at))
            for node, found in nodes.items()
            if at < _retry_at(found) + _FORGET_SECONDS
        }
        if remembered:
            kept[job] = remembered
    return kept


def node_sets(
    jobs: Iterable[Job],
    listing: RmListing,
    avoided_nodes: Mapping[JobKey, Mapping[str, NodeTrouble]],
    placement: Placement,
    at: float,
) -> tuple[NodeSet, ...]:
    """The nodes that each job may use, as the resource manager says and without those that it refused lately.

    Nodes on which a task of the job lately failed or did not start are left out as well. Where the others, when empty,
    do not hold its smallest size and a task of each of its roles, as many of the nodes with failures as needed are used
    again, those with the fewest and oldest failures first. Jobs that may use all nodes are in no set.
    """
    if not listing.eligible_nodes and not avoided_nodes:
        return ()
    all_nodes = frozenset(node.name for node in listing.nodes)
    everywhere = EligibleNodes(all_nodes, "")
    known = {
        key: {name: found for name, found in nodes.items() if at < _retry_at(found)}
        for key, nodes in avoided_nodes.items()
    }
    failing = _failing_nodes(known)
    empty = EmptyNodes(listing.nodes, placement)
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


class EmptyNodes:
    """The nodes that accept tasks, as if nothing ran on them."""

    def __init__(self, nodes: Iterable[Node], placement: Placement) -> None:
        self._nodes = [Node(node.name, node.capacity, NO_RESOURCES, node.state) for node in nodes if node.is_open]
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
        if keeps_bundles(self._placement, request):
            demands = (Resources.total(demands),)
        if not self._placement.first_node_only and all(self._count(names, each) >= sum(least) for each in demands):
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


def _common_reason(name: str, refused: Sequence[Mapping[str, NodeTrouble]]) -> str:
    """Why jobs avoid a node, given what each knows of its nodes: no job is shown what became of another one's task."""
    found = refused[0][name]
    if any(each[name].failed != found.failed for each in refused):
        return "a task failed there, was not started or was refused"
    reason = found.reason if found.failed else f"refused: {found.reason}"
    if all(each[name].reason == found.reason for each in refused):
        return reason
    return "a task failed there or was not started" if found.failed else "refused"


def _failing_nodes(refused: Mapping[JobKey, Mapping[str, NodeTrouble]]) -> dict[JobKey, frozenset[str]]:
    """Each job's failing nodes, limited to the ``_MAX_FAILING_NODES`` that most jobs have.

    Only the ``_MAX_FAILING_COMBINATIONS`` most frequent combinations are kept; a job with another one avoids just the
    most frequent node.
    """
    failing = {
        job: frozenset(name for name, found in nodes.items() if found.failed)
        for job, nodes in refused.items()
        if any(found.failed for found in nodes.values())
    }
    counts = Counter(name for nodes in failing.values() for name in nodes)
    worst = [name for name, _ in counts.most_common(_MAX_FAILING_NODES)]
    failing = {job: nodes.intersection(worst) for job, nodes in failing.items()}
    kept = dict(Counter(failing.values()).most_common(_MAX_FAILING_COMBINATIONS))
    return {job: nodes if nodes in kept else nodes.intersection(worst[:1]) for job, nodes in failing.items()}
