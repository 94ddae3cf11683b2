"""Failover: when servers have died, the servers with the newest copies of their blocks become the owners.

The coordinator asks every server which versions of these blocks it has (`Census`), and then says which servers own them
(`Promote`).  Workers push the gradients of the step in progress again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pslite.errors import PeerLost, ProtocolError
from pslite.fault_points import FaultPoint
from pslite.job.membership_plan import Member
from pslite.net.messages import Census, Copies, Promote, Promoted
from pslite.net.tensor_frames import Receiver
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import BlockState
from pslite.server.data_connections import Connections
from pslite.server.plan_activation import Announcement
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.server_state import ServerState
from pslite.server.training_rounds import Rounds


@dataclass(eq=False)
class Failover:
    """Reports this server's copies of blocks of dead servers, and makes it the owner of those it is given."""

    state: ServerState
    connections: Connections
    replica_sender: ReplicaSender
    replica_store: ReplicaStore
    handoff: Handoff
    #: set when the job's description is known
    rounds: Rounds = field(init=False)

    def report_copies(self, message: Census, receiver: Receiver) -> None:
        """Report which versions of blocks this server has, and do not change these blocks until `promote`.

        Frames of the dead servers that have arrived are taken by `receiver` first; later ones are not accepted.
        """
        self._receive_arrived(message.gone, receiver)
        self.connections.drop_dead(message.gone)
        blocks = [*self.state.owned.values(), *self.handoff.unacknowledged.values()]
        for block in self.replica_sender.servers_died(message.gone, blocks):
            self.rounds.answer_workers(block)
        self.state.frozen.update(message.blocks)
        copies = {number: self._newest_copy(number) for number in message.blocks}
        versions = {number: block.version for number, block in copies.items() if block is not None}
        self.state.send(Copies(number=message.number, versions=versions))
        self.handoff.report_moved_if_complete()

    def _receive_arrived(self, dead: Collection[str], receiver: Receiver) -> None:
        """Receive the frames of dead members that have arrived."""
        for task in dead:
            for link in self.connections.with_member(task):
                with contextlib.suppress(PeerLost, ProtocolError):
                    while link.receive(receiver):
                        pass

    def _newest_copy(self, number: int) -> BlockState | None:
        """Return the newest copy of a block: owned, handed off but not acknowledged, or a replica."""
        holders = (self.state.owned, self.handoff.unacknowledged, self.replica_store.kept)
        copies = (blocks[number] for blocks in holders if number in blocks)
        return max(copies, key=lambda block: block.version, default=None)

    def promote(self, message: Promote) -> None:
        """Give blocks new owners under every plan; own those that this server is given."""
        state, new_owners = self.state, message.owners
        for number in new_owners:
            owners = {plan.owner(number).task for plan in state.known_plans() if plan.has(number)}
            state.former_owners.setdefault(number, set()).update(owners)
        for prepared in state.plans.values():
            prepared.plan = prepared.plan.without(message.gone, new_owners)
            prepared.previous = prepared.previous and prepared.previous.without(message.gone, new_owners)
            # A plan that is not completed may have more to move now; it is reported again.
            prepared.moved_sent = prepared.plan.number <= state.completed_plan_number
        # before any `Moved`, which must refer to the new owners
        state.send(Promoted(number=message.number))
        promoted = []
        for number, owner in new_owners.items():
            newest = self._newest_copy(number)
            owned = state.owned.pop(number, None)
            if owned is not None:
                self.replica_sender.release(owned)
            self.handoff.withdraw(number)
            self.replica_store.remove(number)
            if owner.task == state.task:
                assert newest is not None
                promoted.append(newest)
        # all of them before `_become_owner`, which reports `Moved` when every owned block has entered the plan
        state.owned.update({block.number: block for block in promoted})
        for block in promoted:
            self._become_owner(block)
        self._unfreeze(new_owners)
        self.rounds.answer_requests()
        self.handoff.report_moved_if_complete()

    def _become_owner(self, block: BlockState) -> None:
        """Continue with a block as its new owner, at the version that is here."""
        self.state.faults.reached(FaultPoint.TAKE_BLOCK, block.number)
        state, activation = self.state, self.state.activation
        # the former owner may have announced a plan to workers that no other server knows of yet
        plan_number, first = block.announced
        if activation.announced is None and plan_number > state.completed_plan_number and plan_number in state.plans:
            activation.announced = Announcement(plan_number, first)
        # workers need all weights, since they may have missed answers of the former owner
        block.step_rows, block.unchanged = None, False
        prepared = state.prepared_of(block)
        if block.plan_number > state.completed_plan_number:
            prepared.note_entered()  # on the former owner, the block had entered it
        block.begin_step(prepared.reduction.leaves)
        self.handoff.activate_due_plan(block)
        self.rounds.answer_workers(block)

    def _unfreeze(self, new_owners: Mapping[int, Member]) -> None:
        """Unfreeze all blocks, and continue with those that have no new owner (`new_owners`: by block number).

        A block was frozen and keeps its owner if the only plan that would have given it to a dead server was aborted.
        """
        state = self.state
        unfrozen, state.frozen = state.frozen - new_owners.keys(), set()
        for block in list(state.owned.values()):
            if block.number in unfrozen:
                self.rounds.proceed(block)
