"""Preparation of a plan: memory for the blocks that it gives to a server, and connections to where others go.

It takes a thread of its own, so that answers to workers go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pslite.errors import PsliteError, Unreachable
from pslite.fault_points import FaultPoint
from pslite.job.blocks import Block
from pslite.job.job_spec import Sum
from pslite.job.membership_plan import Plan, reduction
from pslite.net.authentication import Identity
from pslite.net.messages import Nack, Prepare
from pslite.net.server_connections import ServerConnections
from pslite.net.shared_memory import Arena
from pslite.server.block_state import BlockState, state_bytes
from pslite.server.server_state import PreparedPlan, ServerState

#: the highest number of shared memory
_MAX_PLACE = (1 << 16) - 1


def prepare(
    message: Prepare,
    state: ServerState,
    owned: Collection[int],
    replicas: Collection[int],
    *,
    identity: Identity,
    connector: ServerConnections,
) -> PreparedPlan | Nack:
    """Allocate (and touch) the memory that a plan needs, and connect to servers that blocks and replicas go to.

    Parameters
    ----------
    message
        the plan, and the one that it follows.
    state
        of the server; only what follows from the job's description is read, and buffers are reserved.
    owned, replicas
        numbers of the blocks that it has.
    identity
        who it is.
    connector
        opens connections.

    """
    plan = message.plan
    try:
        state.faults.reached(FaultPoint.PREPARE, plan)
        how = reduction(message.spec, len(plan.workers), plan.shares)
        expected = {node: plan.workers[i].task for i, nodes in enumerate(how.nodes) for node in nodes}
        planned = set(plan.blocks_of(state.task))
        new = [_kept(state, number) for number in sorted(planned.difference(owned))]
        arena = _arena(plan, new)
        gained = {block.number: BlockState(block, plan.number, how.leaves, arena) for block in new}
        for block in gained.values():
            block.here = state.sums_only
        # whom a worker has to send its state: in the first plan all others
        first = (plan.workers[0],)
        old = {member.task for member in (message.previous.workers if message.previous is not None else first)}
        state.pool.reserve(new, len(plan.workers))
        # what was owned here, or another's replica, comes in place of that
        others = [state.blocks[b] for b in plan.replicas_of(state.task) if b not in replicas and b not in owned]
        replica_memory = {block.number: BlockState(block, plan.number, how.leaves) for block in others}
        state.pool.reserve(others, 1)
        targets = [plan.owner(b) for b in owned if b not in planned]
        targets += [backup for b in planned if (backup := plan.backup(b)) is not None]
        for member in {member.task: member for member in targets}.values():
            connector.reach(member, identity)
        newcomers = {member.task for member in plan.workers} - old
        state.faults.reached(FaultPoint.PREPARED, plan)
    except (PsliteError, MemoryError, ValueError) as error:
        about = error.task if isinstance(error, Unreachable) else ""
        return Nack(plan=plan.number, reason=str(error) or type(error).__name__, about=about)
    return PreparedPlan(plan, message.previous, how, expected, gained, newcomers, replica_memory)


def _kept(state: ServerState, number: int) -> Block:
    """Return a block as it is kept here: without an optimizer, if the workers have that."""
    block = state.blocks[number]
    return replace(block, optimizer=Sum()) if state.sums_only else block


def _arena(plan: Plan, blocks: Collection[Block]) -> Arena | None:
    """Allocate the memory for blocks that a plan gives to this server, if workers may look at it."""
    if not blocks or plan.number > _MAX_PLACE:
        return None
    arena = Arena(plan.number, {block.number: state_bytes(block) for block in blocks})
    return arena if arena.region.fd >= 0 else None
