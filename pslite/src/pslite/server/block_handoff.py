"""Hand-off: moves blocks to their owners under a new plan when they enter it, while workers go on.

A block is sent when all blocks of this server have reached the plan's first version and the answers to workers have
been sent, so that moving state does not delay them.  Meanwhile the next owner keeps the pushes of the block's next
step; it applies them when the state has arrived.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from pslite.job.membership_plan import holders_of
from pslite.net.messages import Failed, Moved
from pslite.net.tensor_frames import INIT, STATE, Header
from pslite.server.block_state import BlockState
from pslite.server.data_connections import Connections
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
    to_send: deque[BlockState] = field(default_factory=deque)
    #: blocks that the next owner has not acknowledged: those in `to_send`, and those on their way
    unacknowledged: dict[int, BlockState] = field(default_factory=dict)

    # --- sending --------------------------------------------------------------------------------------------------

    def activate_due_plan(self, block: BlockState) -> None:
        """Put an owned block under the announced plan, if it has reached the plan's first version."""
        announced = self.state.activation.announced
        if announced is None or block.version != announced.first or block.plan_number == announced.plan_number:
            return
        state, number = self.state, block.number
        prepared = state.plans[announced.plan_number]
        prepared.note_entered()
        block.enter_plan(announced.plan_number, announced.first, prepared.reduction.leaves)
        if prepared.plan.owner(number).task == state.task:
            self.assign_backup(block, moved=False)
        else:
            del state.owned[number]
            self.to_send.append(block)
            self.unacknowledged[number] = block
        self.report_moved_if_complete()

    def can_send(self) -> bool:
        """Return whether `send` would send something now.

        Over a connection on which data waits it would not: the loop is woken when that data has been sent.
        """
        if self._can_send_seed():
            return True
        block = self._next_to_send()
        link = self.connections.opened.get(self._next_owner(block)) if block is not None else None
        return link is not None and not link.unsent

    def _next_to_send(self) -> BlockState | None:
        """Return the first block to send, if its state may be sent now.

        It may when all owned blocks are under the new plan and all answers to workers have been sent.
        """
        announced = self.state.activation.announced
        if not self.to_send or announced is None:
            return None
        if (
            any(block.plan_number != announced.plan_number for block in self.state.owned.values())
            or not self.connections.all_answers_sent
        ):
            return None
        # Wait for the backup's acknowledgement: under the new owner it may be the backup again, and needs this step.
        return None if self.to_send[0].awaits_backup else self.to_send[0]

    def _next_owner(self, block: BlockState) -> str:
        """Return the server that owns a block under the plan that the block has entered."""
        return self.state.prepared_of(block).plan.owner(block.number).task

    def _can_send_seed(self) -> bool:
        return self.replica_sender.can_send_seed() and self.connections.all_answers_sent

    def send(self) -> None:
        """Send the seeds that are due and the first block to send, unless answers to workers are still to be sent."""
        while self._can_send_seed():
            self.replica_sender.seed_next()
            self.report_moved_if_complete()  # nothing is left to seed if the backup has died
        block = self._next_to_send()
        if block is None:
            return
        owner = self._next_owner(block)
        link = self.connections.opened.get(owner)
        if link is None:
            self.connections.note_missing(owner)
            self.to_send.rotate(-1)  # meanwhile the blocks of other owners are sent
        elif not link.unsent:
            self.to_send.popleft()
            payload = block.weights_and_slots
            steps = block.progress.applied if self.state.spec.asynchronous else block.uncounted_steps
            link.send(block.state_header(STATE, payload, steps), payload)
            self.state.prepared_of(block).sent_bytes += payload.nbytes

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
        self.to_send = deque(block for block in self.to_send if block.number != number)
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
        block.progress.highest_sent = header.version
        if self.state.spec.asynchronous:
            block.progress.applied = header.gradients_applied
        else:
            # the optimizer does not count the steps before the block was added
            block.uncounted_steps = header.version if header.kind == INIT else header.uncounted_steps
        self.state.version = max(self.state.version, block.version)
        prepared = self.state.prepared_of(block)
        prepared.note_entered()
        self.state.owned[block.number] = block
        del prepared.gained[block.number]
        return True

    def assign_backup(self, block: BlockState, *, moved: bool) -> None:
        """Give an owned block the backup that its plan names, with a seed if that server has no replica yet.

        Parameters
        ----------
        block
            the block.
        moved
            whether its state has just arrived from another owner.

        """
        prepared = self.state.prepared_of(block)
        backup = prepared.plan.backup(block.number)
        if backup is None:
            block.backup = block.next_backup = ""
        elif not moved:
            if backup.task != block.backup:
                self.replica_sender.seed_later(block, backup.task)
        elif backup.task in holders_of(prepared.previous, block.number):
            block.backup = backup.task  # it has been the owner or the backup, and keeps the state as a replica
        else:
            # Sent at once, since no other server has this state: the next answer to workers waits for the backup.
            self.replica_sender.seed(block, backup.task)

    # --- the end of a move ----------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether this server expects states of blocks, or acknowledgements of those that it hands off."""
        return bool(self.unacknowledged) or any(prepared.gained for prepared in self.state.plans.values())

    def report_moved_if_complete(self) -> None:
        """Tell the coordinator, once, that this server has moved to the newest plan that a block has entered."""
        number = max((n for n, prepared in self.state.plans.items() if prepared.entered_at), default=0)
        if not number:
            return
        prepared = self.state.plans[number]
        if prepared.moved_sent or prepared.gained or self.unacknowledged or not self.replica_sender.all_seeded:
            return
        if any(block.plan_number != number for block in self.state.owned.values()):
            return
        prepared.moved_sent = True
        self.state.activation.forget_announcement(number)
        move_ms = (time.monotonic() - prepared.entered_at) * 1e3
        self.state.send(Moved(plan=number, sent_bytes=prepared.sent_bytes, move_ms=move_ms))
