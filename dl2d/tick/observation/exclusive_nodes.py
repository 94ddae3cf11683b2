"""Whole nodes for each task, where the resource manager gives the tasks of some jobs nodes of their own.

Slurm does so in partitions with ``OverSubscribe=EXCLUSIVE``. Policies and placing count nodes there as they count any
other resource, so that no two such tasks are given one node.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from msgspec import structs

from dl2d.core.jobs import Job
from dl2d.core.resource_manager import RmListing
from dl2d.core.resources import NO_RESOURCES, WHOLE_NODE, Resources
from dl2d.tick.observation.allocated_resources import held_by_handle
from dl2d.tick.observation.observe import LiveJobs

#: What a node has, and what a task that has its node to itself demands and holds.
_WHOLE = Resources.of({WHOLE_NODE: 1})
#: What any other task demands, and what all jobs of others on a node hold together.
_PART = Resources.of({WHOLE_NODE: 0.001})


def with_whole_nodes(live: LiveJobs, listing: RmListing) -> tuple[LiveJobs, RmListing]:
    """Jobs, tasks, nodes and claims with the resource ``WHOLE_NODE``, if tasks of any of the jobs have whole nodes.

    Tasks of static jobs, and those of jobs that have ended, count as sharing their nodes.
    """
    anchors = listing.whole_nodes
    whole = {job.key for job in live.jobs if job.anchor in anchors and not job.static} if anchors else ()
    if not whole:
        return live, listing
    jobs = tuple(_demanding(job, _WHOLE if job.key in whole else _PART) for job in live.jobs)
    tasks = tuple(
        structs.replace(task, demand=task.demand + (_WHOLE if task.job in whole else _PART)) for task in live.tasks
    )
    listed = held_by_handle(live.jobs, listing)
    #: What tasks that run hold by the listing, and what of ``WHOLE_NODE`` they hold, by node.
    held: dict[str, list[Resources]] = defaultdict(list)
    more: dict[str, list[Resources]] = defaultdict(list)
    for task in live.tasks:
        if task.handle in listed:
            held[task.node].append(listed[task.handle] if listed[task.handle].thousandths else task.demand)
            more[task.node].append(_WHOLE if task.job in whole else _PART)
    # Whatever else uses a node that a task has to itself is a job that is ending there.
    to_themselves = {task.node for task in live.tasks if task.job in whole}
    nodes = []
    for node in listing.nodes:
        foreign = node.name not in to_themselves and node.used.minus(Resources.total(held[node.name])).thousandths
        used = Resources.total((node.used, *more[node.name], _PART if foreign else NO_RESOURCES))
        nodes.append(structs.replace(node, capacity=node.capacity + _WHOLE, used=used))
    claims = (
        claim if claim.whole else structs.replace(claim, demand=claim.demand + _PART * max(claim.nodes, 1))
        for claim in listing.claims
    )
    return LiveJobs(jobs, tasks), replace(listing, nodes=tuple(nodes), claims=tuple(claims))


def _demanding(job: Job, more: Resources) -> Job:
    request = job.request
    ps = request.ps + more if request.max_ps else request.ps
    return replace(job, request=replace(request, worker=request.worker + more, ps=ps))
