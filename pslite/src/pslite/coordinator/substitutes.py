"""Who does the part of workers that are gone: questions about a record."""

from __future__ import annotations

from collections import Counter

from pslite.coordinator.job_state import Record
from pslite.job.plan import Plan, reduction
from pslite.net.messages import TakeOver


def share_out(record: Record, plan: Plan, before: dict[int, str]) -> dict[int, str] | None:
    """Which worker of a plan pushes each node of those that are gone; None where no worker is left.

    Who has begun with a node keeps it.  Workers that stay in the next plan come first: the others may have left.
    """
    assert record.spec is not None
    pending = record.pending
    there = [m.task for m in plan.workers if m.task not in record.dead and record.members[m.task].state != "left"]
    leaving = pending.leavers() if pending is not None else set()
    willing = [task for task in there if task not in leaving] or [
        task for task in there if pending is None or task not in pending.drained
    ]
    how = reduction(record.spec, len(plan.workers), plan.shares)
    nodes = [
        node for member, own in zip(plan.workers, how.nodes, strict=True) if member.task in record.dead for node in own
    ]
    if not nodes:
        return {}
    if not willing and pending is not None and plan.number != pending.plan.number and pending.pushed:
        return {}  # who has pushed under the next plan has the last version of this one
    if not willing:
        return None
    given = {node: task for node, task in before.items() if task in willing}
    load = Counter(given.values())
    for node in nodes:
        if node not in given:
            given[node] = min(willing, key=lambda task: load[task])
            load[given[node]] += 1
    return given


def news_for_servers(record: Record) -> TakeOver:
    """Return what servers have to know: which nodes others push than plans say."""
    nodes = {number: tuple(given) for number, given in record.substitutes.items()}
    return TakeOver(number=record.take_overs, gone=tuple(record.dead), nodes=nodes)


def news_for_worker(record: Record, task: str, number: int) -> TakeOver:
    """Return what a worker has to know of taking over `number`: which nodes it pushes in the place of others."""
    nodes = {
        plan: tuple(node for node, other in given.items() if other == task)
        for plan, given in record.substitutes.items()
    }
    return TakeOver(number=number, gone=tuple(record.dead), nodes=nodes)
