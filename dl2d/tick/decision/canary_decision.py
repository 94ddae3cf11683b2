"""Mode canary: one decision of two policies, each of which decides on the jobs of its group.

1. The fallback decides on all jobs. What it gives to the jobs outside of the policy's group is kept for these jobs.
2. The policy decides on the jobs of its group, with the remainder of the cluster.
3. The fallback decides again on the other jobs, with all that the policy has left.

For example, the fallback gives 6 of 10 GPUs to the policy's group and 4 to the others. The policy uses 5 of the 6, so
the others can get 5. Each group has at least what the fallback alone would give to it, and both together never exceed
the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from msgspec import structs

from dl2d.core.cluster import Snapshot, Task
from dl2d.core.decision import CANARY, Decider, Decision
from dl2d.core.jobs import TASK_ROLES, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.tick.limits.shared_limits import without_jobs
from dl2d.tick.tick_context import Context

#: Demands of the tasks of one group, with the nodes that they are on.
_Taken = Iterable[tuple[str, Resources]]


def canary_jobs(context: Context, snapshot: Snapshot) -> frozenset[JobKey] | None:
    """The jobs on which the policy decides; None if these are all. A job stays in the group that it is recorded in.

    Raises ``StoreError`` if the groups of new jobs cannot be recorded.
    """
    canary = context.canary
    if canary is None:
        return None
    return context.store.assign_canary(canary.number, {job.key: canary.includes(job) for job in snapshot.jobs})


def decide_in_groups(
    snapshot: Snapshot,
    group: Collection[JobKey],
    ask_policy: Callable[[Snapshot], Decision],
    ask_fallback: Callable[[Snapshot], Decision],
    placement: Placement,
) -> Decision:
    """The decision of the policy on the jobs of its group together with that of the fallback on the others."""
    ours = frozenset(job.key for job in snapshot.jobs if job.key in group)
    others = frozenset(job.key for job in snapshot.jobs) - ours
    if not others:
        return _together(snapshot, ask_policy(snapshot))
    if not ours:
        return _together(snapshot, ask_fallback(snapshot))
    whole = ask_fallback(snapshot)
    of_policy = ask_policy(_without(snapshot, others, whole, placement))
    of_fallback = ask_fallback(_without(snapshot, ours, of_policy, placement))
    return _together(snapshot, of_policy, of_fallback)


def _together(snapshot: Snapshot, *decisions: Decision) -> Decision:
    """One decision in the snapshot's order; each job's entry names the policy that decided on it."""
    entries = {
        entry.job: replace(entry, by=Decider(decision.policy, decision.policy_version))
        for decision in decisions
        for entry in decision.jobs
    }
    measures = {decision.measure for decision in decisions}
    return Decision(
        policy=CANARY,
        policy_version=" beside ".join(f"{decision.policy} {decision.policy_version}" for decision in decisions),
        jobs=tuple(entries[job.key] for job in snapshot.jobs),
        measure=measures.pop() if len(measures) == 1 else "",
        actions=tuple(action for decision in decisions for action in decision.actions),
        nodes=tuple(node for decision in decisions for node in decision.nodes),
    )


def _without(snapshot: Snapshot, jobs: Collection[JobKey], decision: Decision, placement: Placement) -> Snapshot:
    """The snapshot without these jobs: what ``decision`` gives to them counts as used by others."""
    theirs = [task for task in snapshot.tasks if task.job in jobs]
    used: dict[str, list[Resources]] = defaultdict(list)
    for node, demand in _taken(snapshot, jobs, decision, placement):
        used[node].append(demand)
    allocations = decision.allocations()
    given = {job.key: job.request.demand_of(allocations[job.key]) for job in snapshot.jobs if job.key in jobs}
    held: dict[str, list[Resources]] = defaultdict(list)
    for task in theirs:
        held[task.node].append(task.room)

    def seen(before: Resources, node: str) -> Resources:
        return Resources.total((before.minus(Resources.total(held.get(node, (NO_RESOURCES,)))), *used.get(node, ())))

    return structs.replace(
        snapshot,
        nodes=tuple(structs.replace(node, used=seen(node.used, node.name)) for node in snapshot.nodes),
        jobs=tuple(job for job in snapshot.jobs if job.key not in jobs),
        tasks=tuple(task for task in snapshot.tasks if task.job not in jobs),
        floors=tuple(floor for floor in snapshot.floors if floor[0] not in jobs),
        job_speeds=tuple(each for each in snapshot.job_speeds if each.job not in jobs),
        losses=tuple(each for each in snapshot.losses if each.job not in jobs),
        limits=tuple(without_jobs(snapshot.limits, given)),
    )


def _taken(snapshot: Snapshot, jobs: Collection[JobKey], decision: Decision, placement: Placement) -> _Taken:
    """Where the tasks of these jobs would be: those that they keep where they are, new ones where they have room.

    The tasks of all jobs of the decision are placed, first where no running task of another job has to leave. A new
    task that fits on no node is charged to several nodes in parts, so that the sum is right.
    """
    allocations, by_key = decision.allocations(), {job.key: job for job in snapshot.jobs}
    kept, incumbents, leaving = list[Task](), list[Task](), list[Task]()
    left = {(key, role): allocation.count(role) for key, allocation in allocations.items() for role in TASK_ROLES}
    for task in sorted(snapshot.tasks, key=lambda task: task.number):
        if task.state.wanted and task.job in by_key and task.job not in allocations:
            incumbents.append(task)
            continue
        leaving.append(task)  # it is placed again if it is kept
        if task.state.wanted and left.get(task.group, 0) > 0:
            left[task.group] -= 1
            kept.append(task)
    packing = Packing(
        snapshot.nodes, placement, incumbents=incumbents, leaving=leaving, counted=True, node_sets=snapshot.node_sets,
    )  # fmt: skip
    for task in kept:
        packing.place_on(task.node, task.room)
    taken = [(task.node, task.room) for task in kept if task.job in jobs]
    scattered: list[Resources] = []
    for key, role in ((key, role) for key in allocations for role in TASK_ROLES):
        demand = by_key[key].request.demand(role)
        nodes, _ = packing.place_all(demand, role, left[key, role], key)
        if key in jobs:
            taken += [(node, demand) for node in nodes]
            scattered += [demand] * (left[key, role] - len(nodes))
    return [*taken, *_scattered(scattered, packing.room())]


def _scattered(demands: Iterable[Resources], room: Mapping[str, Resources]) -> _Taken:
    """Parts of the demands on the nodes in their order, as far as these have room."""
    free = dict(room)
    for demand in demands:
        missing = demand
        for node, there in list(free.items()):
            part = missing.minimum(there)
            if part.thousandths:
                free[node], missing = there.minus(part), missing.minus(part)
                yield node, part
