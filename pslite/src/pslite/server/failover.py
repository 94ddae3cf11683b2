"""Failover: what a server does when other servers are gone, so that their blocks go on from replicas.

The coordinator asks every server which versions it has of their blocks (`Census`), and then says who owns them
(`Promote`): who has the newest copy.  Workers push the step again that was under way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field

from pslite.errors import PeerLost, ProtocolError
from pslite.fault_points import FaultPoint
from pslite.net.data_frames import Receiver
from pslite.net.messages import Census, Copies, Promote, Promoted
from pslite.server.block_handoff import Handoff
from pslite.server.block_state import BlockState
from pslite.server.connections import Connections
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.rounds import Rounds
from pslite.server.server_state import ServerState


@dataclass(eq=False)
class Failover:
    """Says what copies this server has, and makes it the owner of blocks of servers that are gone."""

    state: ServerState
    connections: Connections
    backups: ReplicaSender
    replicas: ReplicaStore
    handoff: Handoff
    #: set when the job is known
    rounds: Rounds = field(init=False)

    def count_copies(self, message: Census, receiver: Receiver) -> None:
        """Say which versions this server has of blocks; what servers that are gone send counts no more from now on."""
        self._receive_the_rest(message.gone, receiver)
        self.connections.give_up(message.gone)
        blocks = [*self.state.owned.values(), *self.handoff.unacknowledged.values()]
        for block in self.backups.servers_lost(message.gone, blocks):
            self.rounds.broadcast(block)
        self.state.frozen.update(message.blocks)
        found = {number: self._newest(number) for number in message.blocks}
        versions = {number: block.version for number, block in found.items() if block is not None}
        self.state.send(Copies(number=message.number, versions=versions))
        self.handoff.report()

    def _receive_the_rest(self, gone: Collection[str], receiver: Receiver) -> None:
        """Take what has come over connections before they are given up."""
        for task in gone:
            for link in self.connections.of(task):
                with contextlib.suppress(PeerLost, ProtocolError):
                    while link.receive(receiver):
                        pass

    def _newest(self, block: int) -> BlockState | None:
        """Return what there is of a block: owned, on its way to another owner, or as a replica."""
        places = (self.state.owned, self.handoff.unacknowledged, self.replicas.kept)
        return max((place[block] for place in places if block in place), key=lambda s: s.version, default=None)

    def promote(self, message: Promote) -> None:
        """Blocks have another owner under every plan in force: this server, or one that has a newer copy."""
        state = self.state
        for number in message.owners:
            state.former_owners.setdefault(number, set()).update(p.owner(number).task for p in state.plans_in_force())
        for prepared in state.plans.values():
            prepared.plan = prepared.plan.without(message.gone, message.owners)
            prepared.previous = prepared.previous and prepared.previous.without(message.gone, message.owners)
            # the plan in force is done with; one that takes its place may have to move something else
            prepared.reported = prepared.plan.number <= state.settled
        # what is reported as moved from here on takes account of it
        self.state.send(Promoted(number=message.number))
        ours = []
        for number, owner in message.owners.items():
            newest = self._newest(number)
            block = state.owned.pop(number, None)
            if block is not None:
                self.backups.release(block)
            self.handoff.withdraw(number)
            self.replicas.remove(number)
            if owner.task == state.task:
                assert newest is not None
                ours.append(newest)
        # all of them first: nothing is reported as moved as long as one is not
        state.owned.update({block.number: block for block in ours})
        for block in ours:
            self._own(block)
        self._thaw(set(message.owners))
        self.rounds.answer_requests()
        self.handoff.report()

    def _own(self, block: BlockState) -> None:
        """Own a block, from the version on at which it is here; workers push the step again that was under way."""
        self.state.faults.reached(FaultPoint.TAKE_BLOCK, block.number)
        state, clock = self.state, self.state.clock
        if clock.stamp is None and block.stamp[0] > state.settled and block.stamp[0] in state.plans:
            clock.stamp = block.stamp
        block.rows = None  # workers have to be sent everything
        prepared = state.plan_of(block)
        if block.plan > state.settled:
            prepared.begin()
        block.begin_step(prepared.reduction.leaves)
        self.handoff.activate_due_plan(block)
        self.rounds.broadcast(block)

    def _thaw(self, owned: set[int]) -> None:
        """Apply steps again to blocks of a `Census` before that go back to an owner which has always been there.

        That is so where the plan is given up under which they would have had another one.
        """
        state = self.state
        thawed, state.frozen = state.frozen - owned, set()
        coming = [block for prepared in state.plans.values() for block in prepared.gained.values()]
        for block in [*state.owned.values(), *coming]:
            if block.number in thawed:
                self.rounds.proceed(block)
