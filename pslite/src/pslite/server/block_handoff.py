"""Hand-off: moves blocks to their owners under a new plan when it takes effect, while workers go on.

A block is sent when all blocks of this server have reached the plan's first version and the answers to workers have
been sent, so that moving state does not delay them.  Meanwhile the next owner keeps the pushes of the block's next
step; it applies them when the state has arrived.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from pslite.job.membership_plan import holders_of
from pslite.net.data_frames import STATE, Header
from pslite.net.messages import Failed, Moved
from pslite.server.block_state import BlockState
from pslite.server.connections import Connections
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.server_state import ServerState


@dataclass(eq=False)
class Handoff:
    """Sends blocks to their next owners, takes those that arrive, and reports when all blocks have moved."""

    state: ServerState
    connections: Connections
    replica_sender: ReplicaSender
    replica_store: ReplicaStore
    #: blocks that have to be sent to their next owners
    outgoing: deque[BlockState] = field(default_factory=deque)
    #: blocks that the next owner has not acknowledged: those in `outgoing`, and those on their way
    unacknowledged: dict[int, BlockState] = field(default_factory=dict)
    #: if this server only adds gradients (`sums_only`): blocks that have another owner now.  Until the plan is done
    #: workers may still ask for their last sums
    released: dict[int, BlockState] = field(default_factory=dict)

    # --- sending --------------------------------------------------------------------------------------------------

    def activate_due_plan(self, block: BlockState) -> None:
        """Put an owned block under the announced plan, if it has reached the plan's first version."""
        announced = self.state.activation.announced
        if announced is None or block.version != announced.first or block.plan == announced.plan:
            return
        state, number = self.state, block.number
        prepared = state.plans[announced.plan]
        prepared.note_entered()
        block.enter_plan(announced.plan, announced.first, prepared.reduction.leaves)
        if prepared.plan.owner(number).task == state.task:
            self.assign_backup(block, moved=False)
        else:
            del state.owned[number]
            if state.sums_only:
                self.released[number] = block
            else:
                self.outgoing.append(block)
                self.unacknowledged[number] = block
        self.report()

    @property
    def can_send(self) -> bool:
        """Whether `send` would send something now; when a full connection drains, the selector wakes the loop."""
        if self._can_send_seed():
            return True
        if not self.outgoing or not self._can_send_state():
            return False
        block = self.outgoing[0]
        link = self.connections.opened.get(self.state.plan_of(block).plan.owner(block.number).task)
        return not block.awaits_backup and link is not None and link.open and not link.unsent

    def _can_send_state(self) -> bool:
        """Return whether all owned blocks are under the new plan and all answers to workers have been sent."""
        announced = self.state.activation.announced
        if announced is None or any(block.plan != announced.plan for block in self.state.owned.values()):
            return False
        return self.connections.idle

    def _can_send_seed(self) -> bool:
        return self.replica_sender.can_send_seed() and self.connections.idle

    def send(self) -> None:
        """Send the seeds that are due and one outgoing block, unless answers to workers are still to be sent."""
        while self._can_send_seed():
            self.replica_sender.seed_next()
            self.report()  # if the backup has died no seed was sent, and none is due any more
        if not self.outgoing or not self._can_send_state():
            return
        block = self.outgoing[0]
        if block.awaits_backup:
            return  # the new owner may keep the same backup, which must have the last step
        prepared = self.state.plan_of(block)
        owner = prepared.plan.owner(block.number).task
        link = self.connections.opened.get(owner)
        if link is None or not link.open:
            self.connections.note_missing(owner)
            self.outgoing.rotate(-1)
        elif not link.unsent:
            self.outgoing.popleft()
            whole = block.whole
            link.send(block.header(STATE, whole.nbytes, crc=zlib.crc32(whole)), whole)
            prepared.moved_bytes += whole.nbytes

    def acknowledged(self, number: int) -> None:
        """Note that the next owner has a block; if the job has replicas, its state here becomes one."""
        block = self.unacknowledged.pop(number)
        if self.state.replicated:
            self.replica_sender.release(block)
            self.replica_store.keep(block)

    def withdraw(self, number: int) -> None:
        """Neither send nor expect a block: after a failover it has another owner under every plan."""
        block = self.unacknowledged.pop(number, None)
        if block is not None:
            self.replica_sender.release(block)
        self.outgoing = deque(block for block in self.outgoing if block.number != number)
        for prepared in self.state.plans.values():
            prepared.gained.pop(number, None)

    # --- receiving ------------------------------------------------------------------------------------------------

    def receive(self, block: BlockState, header: Header) -> bool:
        """Become the owner of a block whose state has arrived.

        Return False, and fail the job, if it has another version than the gradients that workers have pushed to it.
        """
        if block.version not in (-1, header.version):
            reason = (
                f"the state of block {header.block} arrived at version {header.version}, "
                f"but workers push gradients for version {block.version}"
            )
            self.state.send(Failed(reason=reason))
            return False
        block.state_arrived(header)
        block.progress.highest = header.version
        self.state.version = max(self.state.version, block.version)
        self.own(block)
        return True

    def own(self, block: BlockState) -> None:
        """Become the owner of a block that its plan gives to this server."""
        prepared = self.state.plan_of(block)
        prepared.note_entered()
        self.state.owned[block.number] = block
        del prepared.gained[block.number]

    def assign_backup(self, block: BlockState, *, moved: bool) -> None:
        """Give an owned block the backup that its plan names, with a seed if that server has no replica yet.

        Parameters
        ----------
        block
            the block.
        moved
            whether its state has just arrived from another owner.

        """
        prepared = self.state.plan_of(block)
        backup = prepared.plan.backup(block.number)
        if backup is None:
            block.backup = block.next_backup = ""
        elif moved and backup.task in holders_of(prepared.previous, block.number):
            block.backup = backup.task
        elif moved:
            # Sent at once, since no other server has this state: the next answer to workers waits for the backup.
            self.replica_sender.seed(block, backup.task)
        elif backup.task != block.backup:
            self.replica_sender.seed_later(block, backup.task)

    # --- the end of a move ----------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether this server expects states of blocks, or acknowledgements of those that it hands off."""
        return bool(self.unacknowledged) or any(prepared.gained for prepared in self.state.plans.values())

    def report(self) -> None:
        """Tell the coordinator, once, that all blocks of this server are where the newest plan in force wants them."""
        number = max((n for n, prepared in self.state.plans.items() if prepared.entered_at), default=0)
        if not number:
            return
        prepared = self.state.plans[number]
        if prepared.reported or prepared.gained or self.unacknowledged or not self.replica_sender.all_seeded:
            return
        if any(block.plan != number for block in self.state.owned.values()):
            return
        prepared.reported = True
        self.state.activation.plan_in_force(number)
        move_ms = (time.monotonic() - prepared.entered_at) * 1e3
        self.state.send(Moved(plan=number, sent_bytes=prepared.moved_bytes, move_ms=move_ms))

    def plan_done(self, plan: int) -> None:
        """Free the released blocks of plans up to `plan`, to which all members have moved."""
        self.released = {number: block for number, block in self.released.items() if block.plan > plan}
