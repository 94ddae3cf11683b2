"""Preparation of a plan: allocates memory for the blocks that it gives to a server, and opens the connections it needs.

It runs in a thread of its own, so that workers are answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pslite.errors import PsliteError, Unreachable
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.job.membership_plan import Plan, reduction
from pslite.job.weight_blocks import Block, cut
from pslite.net.authentication import Identity
from pslite.net.messages import Nack, Prepare
from pslite.net.server_connections_with_retry import ServerConnections
from pslite.net.shared_memory import Arena
from pslite.server.block_state import BlockState, BufferPool, state_bytes
from pslite.server.server_state import PreparedPlan

#: the highest number that a region of shared memory can have in a frame
_MAX_REGION_NUMBER = (1 << 16) - 1


def prepare(
    message: Prepare,
    owned: Collection[int],
    replicas: Collection[int],
    *,
    identity: Identity,
    connector: ServerConnections,
    pool: BufferPool,
    faults: FaultPoints,
) -> PreparedPlan | Nack:
    """Allocate (and touch) the memory that a plan needs, and connect to the servers that get blocks and replicas.

    Parameters
    ----------
    message
        the plan, and the one that it follows.
    owned
        numbers of the blocks that the server owns.
    replicas
        numbers of the blocks of which it keeps the replica.
    identity
        of the server.
    connector
        opens connections.
    pool
        the server's, in which buffers are reserved.
    faults
        of the server.

    Returns
    -------
    PreparedPlan | Nack
        the plan; or why it cannot be prepared, for the coordinator.

    """
    plan, previous = message.plan, message.previous
    try:
        faults.reached(FaultPoint.PREPARE, plan)
        tree = reduction(message.spec, len(plan.workers), plan.shares)
        pushers = {node: worker.task for worker, nodes in zip(plan.workers, tree.nodes, strict=True) for node in nodes}
        planned = set(plan.blocks_of(identity.task))
        definitions = cut(message.spec)
        gained = _gained_blocks(plan, [definitions[n] for n in sorted(planned.difference(owned))], tree.leaves)
        # A block that is owned here now, or is already a replica, needs no other memory for its replica.
        new_replicas = [definitions[n] for n in plan.replicas_of(identity.task) if n not in replicas and n not in owned]
        replica_memory = {
            definition.number: BlockState(definition, plan.number, tree.leaves) for definition in new_replicas
        }
        pool.reserve([block.definition for block in gained.values()], len(plan.workers))
        pool.reserve(new_replicas, 1)
        receivers = [plan.owner(number) for number in owned if number not in planned]
        receivers += [backup for number in planned if (backup := plan.backup(number)) is not None]
        for member in {member.task: member for member in receivers}.values():
            connector.reach(member, identity)
        # In the first plan, the first worker has the initial weights: it is no newcomer.
        present = previous.workers if previous is not None else plan.workers[:1]
        newcomers = {member.task for member in plan.workers} - {member.task for member in present}
        faults.reached(FaultPoint.PREPARED, plan)
    except (PsliteError, MemoryError, ValueError) as error:
        about = error.task if isinstance(error, Unreachable) else ""
        return Nack(plan=plan.number, reason=str(error) or type(error).__name__, about=about)
    return PreparedPlan(plan, previous, tree, pushers, gained, newcomers, replica_memory)


def _gained_blocks(plan: Plan, definitions: Sequence[Block], leaves: int) -> dict[int, BlockState]:
    """Return the blocks that a plan gives to this server, in memory that workers of this machine may read."""
    arena = None
    if definitions and plan.number <= _MAX_REGION_NUMBER:
        arena = Arena(plan.number, {definition.number: state_bytes(definition) for definition in definitions})
        if arena.region.fd < 0:
            arena = None  # there is no shared memory on this machine
    return {definition.number: BlockState(definition, plan.number, leaves, arena) for definition in definitions}
