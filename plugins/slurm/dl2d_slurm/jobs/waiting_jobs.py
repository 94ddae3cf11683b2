"""Jobs that wait for room beside dl2d's, as squeue shows them, and the site's rules on giving room up to them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from msgspec.structs import replace

from dl2d.core.cluster import Node, NodeState, Task
from dl2d.core.resource_manager import Claim, EligibleNodes, GrowthLimit, RmJob, RmJobState
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.values_in_command_output import (
    EXCLUSIVE_FIELDS,
    has_whole_nodes,
    hosts,
    limit_seconds,
    timestamp,
    value_or_empty,
)
from dl2d_slurm.jobs.allocation_beyond_demand import AllocationRules, CpuUnit
from dl2d_slurm.jobs.cpus_of_waiting_jobs import CPU_FIELDS, RequestedCpus
from dl2d_slurm.jobs.gres_shard_and_mps import has_shares, with_gpus_of_shares
from dl2d_slurm.jobs.job_reason_codes import waits_for_room, waits_for_running_jobs
from dl2d_slurm.settings import SharingRule
from dl2d_slurm.submission.partitions import Partition
from dl2d_slurm.submission.sbatch_options import AnchorOptions

#: Fields of squeue from which claims are made, beside ``ANCHOR_FIELDS``.
WAITING_FIELDS = (
    *("PriorityLong", "StartTime", "TimeLimit", "SchedNodes", "ReqNodes", "NumNodes", *CPU_FIELDS),
    *("tres-per-task", "tres-per-job", *EXCLUSIVE_FIELDS),
)
#: Maximum number of claims in a listing, and of those of one user; those of the highest priority are kept.
_MAX_WAITING = 2048
_MAX_OF_USER = 512
#: Maximum number of claims of the tasks of one job array.
_MAX_OF_ARRAY = 64
#: The id of the tasks of a job array that wait, as squeue shows them together, and one range of them.
_ARRAY = re.compile(r"[0-9]+_\[([0-9,:.-]+)(?:%([0-9]{1,9}))?\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_MAX_NODES = 100_000
_MAX_PRIORITY = 2**62
#: Slurm's reason of a job that waits because jobs of higher priority wait for the same nodes.
_BEHIND_OTHERS = "Priority"


#: The rule of partitions that no rule names.
DEFAULT_RULE = SharingRule()


def sharing_rule(partition: str, rules: Sequence[SharingRule]) -> SharingRule:
    """The first rule that matches a partition, or one of a comma-separated list."""
    names = partition.split(",")
    return next((rule for rule in rules if any(fnmatchcase(name, rule.partition) for name in names)), DEFAULT_RULE)


def priority(record: Mapping[str, str]) -> int:
    """Priority of a job in a record of squeue; 0 for one that is held."""
    text = record["PriorityLong"]
    return min(int(text), _MAX_PRIORITY) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits for room, and its options, which say on which nodes."""

    #: Its claim, without nodes that are given by name.
    claim: Claim
    options: AnchorOptions
    #: Id by which its user knows it (``RmJob.shown_id``).
    shown_id: str
    #: Its time limit in seconds; None if it has none of its own.
    limit: float | None
    #: Node lists of squeue: nodes that it needs, and those that Slurm has planned for it. Only claims have them read,
    #: since a user may make them long.
    required: str
    planned: str
    cpus: RequestedCpus
    #: The reason for which it waits where that is a limit of running jobs; "" where it waits for room on nodes.
    limit_reason: str = ""


def waiting_job(
    record: Mapping[str, str], demand: Resources, shown_id: str, *, is_task: bool = False
) -> WaitingJob | None:
    """The job of a record of squeue that waits, if it waits for room, on nodes or in a limit that other jobs fill;
    ``demand`` is that on all its nodes, and ``is_task`` says whether it is dl2d's.

    A job with a reservation waits for the nodes of that, where others run nothing.
    """
    number, reason = priority(record), record["Reason"]
    for_limit = waits_for_running_jobs(reason)
    for_room = waits_for_room(reason) and not value_or_empty(record["Reservation"])
    if not number or not (for_limit or for_room):
        return None
    cpus = RequestedCpus.of(record)
    claim = Claim(
        handle=record["JobID"],
        user=record["UserName"],
        priority=number,
        nodes=min(cpus.nodes, _MAX_NODES),
        demand=demand,
        whole=has_whole_nodes(record),
        expected_start=float(timestamp(record["StartTime"])),
        behind_others=reason == _BEHIND_OTHERS,
        is_task=is_task,
    )
    # The end that Slurm has planned is no limit: the job would end earlier if it started earlier.
    options = replace(AnchorOptions.of(record), ends=0)
    lists = value_or_empty(record["ReqNodes"]), value_or_empty(record["SchedNodes"])
    return WaitingJob(
        claim,
        options,
        shown_id,
        limit_seconds(record["TimeLimit"]),
        *lists,
        cpus,
        reason if for_limit else "",
    )


def each_task(waiting: Mapping[tuple[str, str], WaitingJob], running: Mapping[str, int]) -> Iterator[WaitingJob]:
    """The jobs, and of a job array one for each task that may start now, ``_MAX_OF_ARRAY`` at most.

    Only the first task of an array has planned nodes: squeue shows the same ones for all of them.

    Parameters
    ----------
    waiting
        Jobs by handle and id as squeue shows it. Tasks of an array that wait share a handle; without ``--array`` they
        are one job: ``12_[3-99%5]``, of which five at most run at once.
    running
        How many tasks of each array run.
    """
    tasks: Counter[str] = Counter()
    most: dict[str, int] = {}
    first: dict[str, WaitingJob] = {}
    for (handle, id_), job in waiting.items():
        first.setdefault(handle, job)
        together = _ARRAY.fullmatch(id_)
        tasks[handle] += _number_of_tasks(together[1]) if together else 1
        if together and together[2]:
            most[handle] = max(1, int(together[2]) - running.get(id_.partition("_")[0], 0))
    for handle, job in first.items():
        claim = replace(job.claim, waiting=tasks[handle])
        yield dataclasses.replace(job, claim=claim)
        other = dataclasses.replace(job, claim=replace(claim, expected_start=0.0), planned="")
        yield from [other] * (min(tasks[handle], most.get(handle, _MAX_OF_ARRAY), _MAX_OF_ARRAY) - 1)


def _number_of_tasks(text: str) -> int:
    """How many tasks ``1,3,10-19,30-50:2`` are; a list that is too long for squeue ends with dots."""
    ranges = [match.groups() for part in text.split(",") if (match := _RANGE.match(part))]
    return sum(1 + max(0, int(last or first) - int(first)) // max(1, int(step or 1)) for first, last, step in ranges)


def highest_priority(waiting: Iterable[WaitingJob]) -> list[WaitingJob]:
    """The jobs of the highest priority, of which there are claims: each once, and further tasks of arrays if any places
    are left.
    """
    by_priority = sorted(waiting, key=lambda job: -job.claim.priority)
    of_user: Counter[str] = Counter()
    seen: set[str] = set()
    firsts: list[int] = []
    others: list[int] = []
    for place, job in enumerate(by_priority):
        (others if job.claim.handle in seen else firsts).append(place)
        seen.add(job.claim.handle)
    places: list[int] = []
    for place in (*firsts, *others):
        user = by_priority[place].claim.user
        if len(places) < _MAX_WAITING and of_user[user] < _MAX_OF_USER:
            of_user[user] += 1
            places.append(place)
    return [by_priority[place] for place in sorted(places)]


#: Says which nodes a job may use, by its options, time limit and user; None for all.
EligibleNodesOf = Callable[[AnchorOptions, float | None, str], EligibleNodes | None]


def with_given(
    waiting: Iterable[WaitingJob],
    eligible_nodes: EligibleNodesOf,
    capacities: Mapping[str, Resources],
    rules: AllocationRules,
    *,
    whole_tasks: bool = True,
) -> Iterator[WaitingJob]:
    """The jobs with demands of what Slurm will give them on their nodes; ``capacities`` are those of all nodes.

    Where nodes differ in what they give, this is the most on nodes that are large enough. ``whole_tasks``: on as many
    nodes as hold the tasks, with room for as many on each.
    """

    # Jobs with the same options share one answer.
    @cache
    def kinds_of(nodes: frozenset[str] | None) -> Collection[tuple[CpuUnit, Resources]]:
        names = capacities if nodes is None else nodes & capacities.keys()
        return sorted({(rules.unit(name), capacities[name]) for name in names}, key=lambda kind: kind[0], reverse=True)

    for job in waiting:
        found, claim = eligible_nodes(job.options, job.limit, job.claim.user), job.claim
        memory_of_cpu, demands = rules.default_memory_of_cpu(job.options.partition), dict[CpuUnit, Resources]()
        kinds, nodes = kinds_of(None if found is None else found.nodes), claim.nodes
        if whole_tasks and kinds:
            nodes = job.cpus.nodes_that_hold(claim.demand, nodes, [capacity for _, capacity in kinds])
        for unit, capacity in kinds:
            if unit not in demands:
                demands[unit] = job.cpus.given(
                    claim.demand, nodes, unit, rules, memory_of_cpu, whole_tasks=whole_tasks
                )  # fmt: skip
            if demands[unit].get("cpu") <= capacity.get("cpu") * nodes:
                break
        else:
            unit = min(demands, default=CpuUnit())
        more = job.cpus.larger_spreads(claim.demand, nodes) if whole_tasks and not claim.whole else ()
        spreads = tuple((count, job.cpus.given(claim.demand, count, unit, rules, memory_of_cpu)) for count in more)
        demand = demands.get(unit, claim.demand)
        claim = replace(claim, demand=demand, nodes=min(nodes, _MAX_NODES), spreads=spreads)
        yield dataclasses.replace(job, claim=claim)


def claims(
    waiting: Iterable[WaitingJob],
    eligible_nodes: EligibleNodesOf,
    capacities: Mapping[str, Resources],
    more: Callable[[str, float], Resources],
) -> Iterator[Claim]:
    """The claims of jobs with their nodes; ``capacities`` are those of all nodes. A job of a partition with so many
    CPUs demands ``more``.

    squeue shows for a job that gets all memory of its nodes (``--mem=0``, or no ``--mem`` where no default is set) the
    memory of one node that it may get, and a minimum of 0. Its claim demands none beside.
    """

    # Jobs with the same options share one answer.
    @cache
    def capacities_of(nodes: frozenset[str] | None) -> frozenset[Resources]:
        return frozenset(capacity for name, capacity in capacities.items() if nodes is None or name in nodes)

    sizes = {capacity.get("memory") for capacity in capacities.values()}
    for job in waiting:
        found, demand = eligible_nodes(job.options, job.limit, job.claim.user), job.claim.demand
        if has_shares(demand):
            demand = with_gpus_of_shares(demand, capacities_of(None if found is None else found.nodes))
        memory = demand.get("memory") / job.claim.nodes
        all_memory = len(sizes) > 1 and memory in sizes and not job.cpus.memory
        least, *spreads = (
            (without_memory(each) if all_memory else each) + more(job.options.partition, each.get("cpu"))
            for each in (demand, *(spread for _, spread in job.claim.spreads))
        )
        yield replace(
            job.claim, handle=handle_for_users(job), eligible=None if found is None else found.nodes,
            required=frozenset(hosts(job.required)), planned=hosts(job.planned), all_memory=all_memory,
            demand=least, spreads=tuple(zip((nodes for nodes, _ in job.claim.spreads), spreads, strict=True)),
        )  # fmt: skip


def with_tasks_behind_claims(
    jobs: Iterable[RmJob], tasks: Mapping[str, Task], waiting: Iterable[Claim]
) -> tuple[RmJob, ...]:
    """The jobs, with ``any_node`` set for tasks that wait behind a claim to which their job yields.

    ``tasks`` are dl2d's, by handle, or by tag where they have none; ``waiting`` are the claims of waiting jobs.
    """
    jobs, of_others = tuple(jobs), [claim for claim in waiting if not claim.is_task]
    anchors = {job.shown_id: job for job in jobs} if of_others else {}

    def waits_behind_claim(job: RmJob) -> bool:
        if not job.tag or job.state is not RmJobState.PENDING or job.reason != _BEHIND_OTHERS:
            return False
        task = tasks.get(job.handle) or tasks.get(job.tag)
        if task is None or (anchor := anchors.get(task.job.id)) is None:
            return False
        return any(
            anchor.yields_to(claim) and (claim.eligible is None or task.node in claim.eligible) for claim in of_others
        )

    return tuple(replace(job, any_node=True) if waits_behind_claim(job) else job for job in jobs)


def without_memory(demand: Resources) -> Resources:
    """A demand on all but memory."""
    return demand.minus(Resources.of(memory=demand.get("memory")))


def handle_for_users(job: WaitingJob) -> str:
    """The id of an array for its tasks that wait under it; a task that was requeued has a JobID that nobody knows."""
    handle = job.claim.handle
    return handle if job.shown_id.startswith(f"{handle}_") else job.shown_id


def standing_claims(
    partitions: Mapping[str, Partition], rules: Sequence[SharingRule], asleep: Collection[str] = ()
) -> Iterator[Claim]:
    """A claim for the nodes of each partition that are kept free, beside idle ones that are ``asleep``.

    If those did not count, each node that is kept free would fall asleep, and the next one be vacated. Small partitions
    come first: what is kept free of them counts for larger ones that have the same nodes.
    """
    for name, partition in sorted(partitions.items(), key=lambda each: (len(each[1].nodes), each[0])):
        kept = min(sharing_rule(name, rules).min_free, len(partition.nodes)) - len(partition.nodes.intersection(asleep))
        if kept > 0:
            yield Claim(
                handle=f"partition {name}", user="", priority=-1, nodes=kept, demand=NO_RESOURCES, whole=True,
                eligible=partition.nodes, standing=True,
            )  # fmt: skip


def drained_claims(drained: Collection[str]) -> Iterator[Claim]:
    """A standing claim for nodes that are drained: tasks leave them; no room is kept, since nothing starts there."""
    if nodes := frozenset(drained):
        yield Claim(
            handle="the drained nodes", user="", priority=-1, nodes=len(nodes), demand=NO_RESOURCES, whole=True,
            eligible=nodes, required=nodes, standing=True, members=frozenset(),
        )  # fmt: skip


def share_limits(
    nodes: Iterable[Node],
    anchors: Mapping[str, str],
    held: Iterable[tuple[str, Resources]],
    partitions: Mapping[str, Partition],
    rules: Sequence[SharingRule],
) -> Iterator[GrowthLimit]:
    """What the elastic jobs of each partition may have besides what they have, where that is limited.

    Parameters
    ----------
    nodes
        All nodes that dl2d sees.
    anchors
        Partitions of the tasks of each job that may be an anchor, as a comma-separated list, by handle.
    held
        What each task job holds, with its partition.
    """
    limited = {name: share for name in partitions if (share := sharing_rule(name, rules).max_share) < 1}
    if not limited:
        return
    members: dict[str, list[str]] = defaultdict(list)
    for handle, names in anchors.items():
        for name in names.split(","):
            members[name].append(handle)
    taken: dict[str, list[Resources]] = defaultdict(list)
    for name, room in held:
        taken[name].append(room)
    nodes = [node for node in nodes if node.state is not NodeState.DOWN]
    for name, share in limited.items():
        capacity = Resources.total(node.capacity for node in nodes if node.name in partitions[name].nodes)
        has = Resources.total(taken[name])
        left = {resource: amount * share - has.get(resource) for resource, amount in capacity.as_dict().items()}
        reason = f"elastic jobs may hold {100 * share:g} % of partition {name}"
        yield GrowthLimit(frozenset(members[name]), left, reason, enforced=False)
