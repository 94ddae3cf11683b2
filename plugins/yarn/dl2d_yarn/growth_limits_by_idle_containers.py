"""Limits that keep jobs from the idle containers of other jobs. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from dl2d.core.cluster import Node, NodeState
from dl2d.core.jobs import JobKey
from dl2d.core.resource_manager import GrowthLimit
from dl2d.core.resources import Resources
from dl2d_yarn.idle_and_busy_containers import IdleContainer
from dl2d_yarn.services import JobService


def idle_limits(
    services: Iterable[JobService], idle: Iterable[IdleContainer], nodes: Iterable[Node]
) -> Iterator[GrowthLimit]:
    """Limits from idle containers (without a task) of other jobs, which count as free on ``nodes``.

    One limit holds for all jobs without such containers, and one for each job that has some. Two of the latter may
    still be given the same free resources; then one waits for them.
    """
    up = {node.name: node for node in nodes if node.state is NodeState.UP}
    demands: dict[JobKey, list[Resources]] = defaultdict(list)
    for job, node, demand in idle:
        if node in up:
            demands[job].append(demand)
    idle_by_job = {job: Resources.total(each) for job, each in demands.items()}
    idle_total = Resources.total(idle_by_job.values())
    if not idle_total.thousandths:
        return
    free = Resources.total(node.capacity.minus(node.used) for node in up.values()).minus(idle_total)

    def limit(applications: Iterable[str], own_idle: Resources) -> GrowthLimit:
        left = {name: free.get(name) + own_idle.get(name) for name, _ in idle_total.thousandths}
        reason = "the containers without a task of other jobs are room for those jobs only"
        return GrowthLimit(frozenset(applications), left, reason)

    live = {service.job: service.application_id for service in services if service.is_live and service.application_id}
    yield limit((application for job, application in live.items() if job not in idle_by_job), Resources())
    for job, own_idle in idle_by_job.items():
        if job in live:
            yield limit((live[job],), own_idle)
