"""Plans: numbered membership and key assignment, and the pure functions that make the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from pslite.job.job_spec import JobSpec
from pslite.job.message_base_class import WireRecord
from pslite.job.reduction_tree import cover
from pslite.job.shard_and_block_assignment import assign, consecutive_ranges, ranges
from pslite.job.weight_blocks import Block


class Member(WireRecord):
    """One process in a plan."""

    task: str
    incarnation: str
    host: str
    pid: int
    #: host:port on which a server takes data; empty for a worker
    address: str = ""
    #: name of the Unix socket on which it does so for processes of its machine, and which machine that is
    local: str = ""
    machine: str = ""


class Plan(WireRecord, kw_only=True, forbid_unknown_fields=False):
    """Who computes which shards and who owns which block, from the version on at which the plan takes effect.

    Unknown fields are ignored: logs of earlier versions have plans with `stop`.
    """

    number: int
    workers: tuple[Member, ...]
    servers: tuple[Member, ...]
    #: for each block the index of its owner in `servers`
    owners: tuple[int, ...]
    #: for each block the index of the server that keeps its replica, -1 for none; empty where no block has one
    backups: tuple[int, ...] = ()
    #: how many shards each worker computes; empty: almost equal numbers
    shares: tuple[int, ...] = ()

    def has(self, block: int) -> bool:
        """Whether `block` is there under this plan: those of keys that come late are not under earlier ones."""
        return block < len(self.owners)

    def owner(self, block: int) -> Member:
        """Return the server that owns `block`."""
        return self.servers[self.owners[block]]

    def backup(self, block: int) -> Member | None:
        """Return the server that keeps the replica of `block`, if there is one."""
        place = self.backups[block] if self.backups else -1
        return self.servers[place] if place >= 0 else None

    def without(self, gone: Collection[str], owners: Mapping[int, Member]) -> Plan:
        """Return the plan as it goes on when servers are gone: others own some blocks, of which there is no replica.

        Parameters
        ----------
        gone
            tasks of the servers; one that owns further blocks (in a plan that is not in force) stays.
        owners
            block -> its owner from now on.

        """
        heirs = [owners.get(b) or self.owner(b) for b in range(len(self.owners))]
        needed = {member.task for member in heirs}
        present = [m for m in self.servers if m.task in needed or m.task not in gone]
        known = {m.task for m in present}
        servers = (*present, *{m.task: m for m in heirs if m.task not in known}.values())
        place = {member.task: i for i, member in enumerate(servers)}
        kept = [None if b in owners else self.backup(b) for b in range(len(heirs))]
        return msgspec.structs.replace(
            self,
            servers=servers,
            owners=tuple(place[member.task] for member in heirs),
            backups=tuple(-1 if m is None else place.get(m.task, -1) for m in kept) if self.backups else (),
        )

    def worker_index(self, task: str) -> int:
        """Return the place of a worker in the plan, or -1."""
        return next((i for i, member in enumerate(self.workers) if member.task == task), -1)

    def blocks_of(self, task: str) -> list[int]:
        """Return the blocks that server `task` owns."""
        return [b for b, owner in enumerate(self.owners) if self.servers[owner].task == task]

    def replicas_of(self, task: str) -> list[int]:
        """Return the blocks of which server `task` keeps the replica."""
        return [b for b, backup in enumerate(self.backups) if backup >= 0 and self.servers[backup].task == task]

    def tasks(self) -> set[str]:
        """Return the ids of all members."""
        return {member.task for member in (*self.workers, *self.servers)}


class Reduction(msgspec.Struct, frozen=True):
    """How the gradients of one plan add up: the leaves of the tree and the nodes that each worker pushes."""

    leaves: int
    #: per worker its half-open range of logical shards
    shards: tuple[tuple[int, int], ...]
    #: per worker the tree nodes it pushes for every block
    nodes: tuple[tuple[int, ...], ...]


def reduction(spec: JobSpec, workers: int, shares: Sequence[int] = ()) -> Reduction:
    """Return how workers share the shards and the tree: `shares` are their numbers of shards; empty: almost equal.

    In `exact` mode the leaves are the logical shards; in `fast` mode each worker is one leaf.
    """
    shards = consecutive_ranges(shares) if shares else ranges(spec.shards, workers)
    if spec.mode == "exact":
        return Reduction(spec.shards, shards, tuple(cover(low, high, spec.shards) for low, high in shards))
    return Reduction(workers, shards, tuple(cover(i, i + 1, workers) for i in range(workers)))


def next_members(
    present: Sequence[str], joined: Sequence[str], target: frozenset[str] | None, limit: int
) -> tuple[str, ...]:
    """Return the members of one role in the next plan, in order.

    Present members stay where they are, newcomers follow.  A role is never emptied:
    with nobody left the present members stay.

    Parameters
    ----------
    present
        tasks in the plan now.
    joined
        tasks that have joined and are in no plan, in order.
    target
        tasks that should be members; None means everybody.
    limit
        the most members the role can use.

    """
    wanted = [task for task in (*present, *joined) if target is None or task in target]
    return tuple(wanted[:limit]) or tuple(present)


def make_plan(
    number: int,
    blocks: Sequence[Block],
    workers: Sequence[Member],
    servers: Sequence[Member],
    previous: Plan | None,
    *,
    shares: Sequence[int] = (),
    speeds: Sequence[float] = (),
    replicas: bool = False,
) -> Plan:
    """Make plan `number` for the given members; blocks move only as far as balance needs it.

    `shares` are the workers' numbers of shards, `speeds` the servers', where they are not alike.
    """
    before = {b: previous.owner(b).task for b in range(len(previous.owners))} if previous else {}
    owners = (
        assign([block.nbytes for block in blocks], before, [member.task for member in servers], speeds)
        if servers
        else ()
    )
    return Plan(
        number=number,
        workers=tuple(workers),
        servers=tuple(servers),
        owners=owners,
        backups=choose_backups(blocks, servers, owners, previous) if replicas else (),
        shares=tuple(shares),
    )


def choose_backups(
    blocks: Sequence[Block], servers: Sequence[Member], owners: Sequence[int], previous: Plan | None
) -> tuple[int, ...]:
    """Return for each block the index of the server that keeps its replica; -1 where its owner is the only server.

    On another host than the owner if there is one; then on a server that has the block already, as its owner or its
    backup under the previous plan; then on the one with the least to keep.
    """
    loads = [0] * len(servers)
    chosen = []
    if len(servers) == 1:
        return (-1,) * len(blocks)
    for block, owner in zip(blocks, owners, strict=True):
        holders = holders_of(previous, block.number)
        *_, best = min(
            (member.host == servers[owner].host, member.task not in holders, loads[place], place)
            for place, member in enumerate(servers)
            if place != owner
        )
        loads[best] += block.nbytes
        chosen.append(best)
    return tuple(chosen)


def holders_of(plan: Plan | None, block: int) -> frozenset[str]:
    """Return the servers that have a whole copy of a block once a plan is done: its owner and its backup."""
    if plan is None or not plan.has(block):
        return frozenset()
    return frozenset(member.task for member in (plan.owner(block), plan.backup(block)) if member is not None)
