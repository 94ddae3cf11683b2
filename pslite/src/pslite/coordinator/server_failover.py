"""Failover of servers: blocks of a server that died go on from their replicas.

The servers that are left say which versions they have of these blocks, the newest copy of each becomes the block, in
the plan in force and in one that is just taking its place, and workers push the present step to it again.  Where a
block may have no copy of its newest version the job goes back to its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pslite.coordinator.checkpoints import Rollback
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated, Succession
from pslite.job.plan import Plan, holders_of
from pslite.net.messages import Census, Commit, Copies, Promote, Promoted


class ServerFailover:
    """Has other servers own the blocks of those that are gone.

    Parameters
    ----------
    record, voice
        the job's.
    rollback
        goes back where blocks have no copy.

    """

    def __init__(self, record: Record, voice: Voice, rollback: Rollback) -> None:
        self._record = record
        self._voice = voice
        self._rollback = rollback

    def begin(self) -> None:
        """Ask the servers that are left what they have of the blocks of those that are gone."""
        record = self._record
        assert record.spec is not None
        plans, gone = record.plans_in_force(), tuple(record.lost_servers)
        blocks = sorted({block for plan in plans for task in gone for block in plan.blocks_of(task)})
        record.succession = None
        if record.spec.durability == "none":
            self._rollback.go_back(self._why())
        elif not record.able_servers() or exposed(plans, blocks, gone):
            self._rollback.go_back(f"{self._why()}, and so did what had its replicas")
        else:
            record.successions += 1
            servers = set(record.servers_there())
            record.succession = Succession(record.successions, tuple(blocks), servers)
            self._voice.tell(servers, Census(number=record.successions, gone=gone, blocks=tuple(blocks)))
            self._voice.hurry()

    def _why(self) -> str:
        return next(reversed(self._record.lost_servers.values()))

    def take_copies(self, member: Seated, message: Copies) -> None:
        """Take what a server has of the blocks; with the last one's their owners can be chosen."""
        record, succession = self._record, self._record.succession
        if succession is None or message.number != succession.number or succession.phase != "counting":
            return  # another one has died since
        succession.waits_for.discard(member.task)
        for block, version in message.versions.items():
            succession.copies.setdefault(block, {})[member.task] = version
        if succession.waits_for:
            return
        chosen = choose(succession.blocks, succession.copies, record.newest_plan, record.servers_there())
        if chosen is None:
            self._rollback.go_back(f"{self._why()}, and parts of the model had no replica yet")
            return
        owners = {block: record.members[task].record() for block, task in chosen.items()}
        record.heirs.update(owners)
        gone = tuple(record.lost_servers)
        record.go_to(gone, owners)
        for plan in record.plans_in_force():
            for server in plan.servers:
                # one that was to leave may be needed for longer
                record.members[server.task].state = "active"
        succession.phase = "promoting"
        succession.waits_for = {m.task for plan in record.plans_in_force() for m in plan.servers}
        self._voice.tell(succession.waits_for.copy(), Promote(number=succession.number, gone=gone, owners=owners))

    def promoted(self, member: Seated, message: Promoted) -> bool:
        """A server owns its new blocks; returns whether workers go on with that."""
        record, succession, pending = self._record, self._record.succession, self._record.pending
        if pending is not None:
            pending.moved.pop(member.task, None)  # said before it had other blocks
        if succession is None or message.number != succession.number or succession.phase != "promoting":
            return False
        succession.waits_for.discard(member.task)
        if succession.waits_for:
            return False
        record.succession = None
        gone = tuple(record.lost_servers)
        self._voice.tell(record.workers_there(), Promote(number=succession.number, gone=gone, owners=record.heirs))
        if 0 in record.heirs and pending is not None and pending.previous is not None:
            self._voice.tell({pending.previous.owner(0).task}, Commit(plan=pending.plan.number))
        record.heirs = {}
        self._voice.hurry()
        return True


def exposed(plans: Sequence[Plan], blocks: Collection[int], gone: Collection[str]) -> bool:
    """Whether a block may have lost its newest version: two of those that may have it are gone.

    While one plan takes another's place a replica may be old that the coming plan does without.
    """
    return any(len(frozenset[str]().union(*(holders_of(p, b) for p in plans)) & set(gone)) > 1 for b in blocks)


def choose(
    wanted: Collection[int], copies: Mapping[int, Mapping[str, int]], plan: Plan, servers: Sequence[str]
) -> dict[int, str] | None:
    """Return who owns each block whose owner is gone: who has the newest copy; None if one has no copy.

    Parameters
    ----------
    wanted
        the blocks.
    copies
        block -> server -> version of the copy that it has.
    plan
        the newest one; of equals its owners are chosen, then its members.
    servers
        those that are there, in the order in which they are chosen.

    """
    members = plan.tasks()
    owners: dict[int, str] = {}
    for block in wanted:
        found, present = copies.get(block, {}), plan.owner(block).task
        newest = max(found.values(), default=-1)
        holders = [task for task in servers if found.get(task, -1) == newest >= 0]
        if not holders:
            return None
        owners[block] = max(holders, key=lambda task, present=present: (task == present, task in members))  # type: ignore[misc]
    return owners
