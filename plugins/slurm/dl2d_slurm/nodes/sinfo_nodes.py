"""Nodes and partitions, from sinfo."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from msgspec.structs import replace

from dl2d.core.cluster import Node, NodeState
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.squeue_and_sinfo_records import records
from dl2d_slurm.commands.values_in_command_output import count, limit_seconds, parse_gres, resources_of, value_or_empty
from dl2d_slurm.jobs.gres_shard_and_mps import with_shared_gpus
from dl2d_slurm.jobs.slurm_states import ASLEEP, RESERVED, is_drained, node_state
from dl2d_slurm.jobs.squeue_jobs import Jobs
from dl2d_slurm.submission.partitions import Partition

#: Names are those of ``sinfo --Format``.
NODE_FIELDS = (
    *("NodeList", "StateLong", "CPUsState", "Memory", "AllocMem", "Gres", "GresUsed"),
    *("PartitionName", "Time", "Available", "features_act", "Reason"),
)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Parsed answer of sinfo."""

    nodes: tuple[Node, ...]
    #: Slurm's own spelling of generic resources, by dl2d's lower-case names.
    spelling: Mapping[str, str]
    #: Partitions with their nodes, by name.
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    #: Features that each node has now.
    features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Nodes that take no tasks only because they are reserved.
    reserved: frozenset[str] = frozenset()
    #: Idle nodes that take no tasks only because of power saving.
    asleep: frozenset[str] = frozenset()
    #: Nodes that an administrator has drained, and that answer.
    drained: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def parse_nodes(text: str, terminator: str, chosen: Collection[str] = ()) -> Nodes:
    """Read sinfo's answer. A node that is in several partitions is listed several times and counts once.

    ``chosen`` are the partitions whose nodes dl2d sees; all if empty.
    """
    nodes: dict[str, Node] = {}
    partitions: dict[str, tuple[list[str], str, str]] = {}
    features: dict[str, frozenset[str]] = {}
    reserved: set[str] = set()
    asleep: set[str] = set()
    drained: set[str] = set()
    unknown: list[str] = []
    unreadable: list[str] = []
    spelling: dict[str, str] = {}
    for record in records(text, NODE_FIELDS, terminator):
        if isinstance(record, str) or not record["NodeList"]:
            unreadable.append(f"sinfo: cannot read {str(record)[:200]!r}")
            continue
        name = record["NodeList"]
        partitions.setdefault(record["PartitionName"], ([], record["Time"], record["Available"]))[0].append(name)
        if name in nodes or (chosen and record["PartitionName"] not in chosen):
            continue
        found = node_state(record["StateLong"])
        if not found.known:
            unknown.append(f"sinfo: unknown node state {record['StateLong'][:60]!r}, nothing is put there")
        if record["StateLong"] in RESERVED:
            reserved.add(name)
        if record["StateLong"] in ASLEEP:
            asleep.add(name)
        if is_drained(record["StateLong"]):
            drained.add(name)
        features[name] = frozenset(value_or_empty(record["features_act"]).split(","))
        gres = parse_gres(record["Gres"])
        spelling.update({key.lower(): key for key in gres})
        cpus = record["CPUsState"].split("/")
        if len(cpus) != 4 or count(cpus[3]) is None:
            unreadable.append(f"sinfo: cannot read the CPUs of {name} from {record['CPUsState'][:60]!r}")
            continue
        why = value_or_empty(record["Reason"])
        remark = found.remark
        if why and found.state is not NodeState.UP:
            remark = f"{remark}: {why}" if remark else why
        capacity = _node_room(cpus[3], record["Memory"], record["Gres"])
        used = _node_room(cpus[0], record["AllocMem"], record["GresUsed"])
        nodes[name] = Node(
            name=name,
            capacity=capacity,
            used=with_shared_gpus(used, capacity, record["GresUsed"]),
            state=found.state,
            remark=remark,
        )
    found_partitions = {
        name: Partition(name, frozenset(members), limit_seconds(limit), down="" if state == "up" else state)
        for name, (members, limit, state) in partitions.items()
    }
    return Nodes(
        tuple(nodes.values()), spelling, found_partitions, features,
        frozenset(reserved), frozenset(asleep), frozenset(drained),
        tuple(dict.fromkeys(unknown)),
        tuple(unreadable),
    )  # fmt: skip


@lru_cache(16_384)
def _node_room(cpus: str, memory: str, gres: str) -> Resources:
    return resources_of(cpus, memory, parse_gres(gres))


def with_ending_jobs(nodes: Iterable[Node], jobs: Jobs) -> tuple[Node, ...]:
    """Nodes with the room of ending jobs counted as used.

    While the processes of a job are still being killed, or its epilog runs, sinfo shows its room as free already,
    though Slurm gives it to nobody until they are gone. A job with a tag that ran when squeue was asked, and had begun
    to end when sinfo was, holds its room, too: what such jobs hold is the least that is used.
    """
    ending, running = _by_node(jobs.ending), _by_node(jobs.running)
    return tuple(
        replace(node, used=_used(node, ending.get(node.name, NO_RESOURCES), running.get(node.name, NO_RESOURCES)))
        if node.name in ending or node.name in running
        else node
        for node in nodes
    )


def _by_node(rooms: Iterable[tuple[str, Resources]]) -> dict[str, Resources]:
    sums: dict[str, Resources] = {}
    for name, room in rooms:
        sums[name] = sums.get(name, NO_RESOURCES) + room
    return sums


def _used(node: Node, ending: Resources, running: Resources) -> Resources:
    names = {*node.used.as_dict(), *ending.as_dict(), *running.as_dict()}
    used = {name: max(node.used.get(name), running.get(name)) + ending.get(name) for name in names}
    return Resources.of({name: min(amount, node.capacity.get(name)) for name, amount in used.items()})
