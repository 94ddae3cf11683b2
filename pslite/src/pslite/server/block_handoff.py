"""Hand-off: moves blocks to their owners under a new plan, at the version at which it takes effect; workers never stop.

Each block leaves when all of this server's blocks have reached that version and the answers to workers are on their
way, so that moving state competes with nothing.  Its next owner takes pushes of the coming step meanwhile, and applies
them when the state has come.
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
    """Moves blocks to the owners of a new plan, takes over those that come, and reports when all have moved."""

    state: ServerState
    connections: Connections
    backups: ReplicaSender
    replicas: ReplicaStore
    #: blocks that have to leave
    outgoing: deque[BlockState] = field(default_factory=deque)
    #: blocks that are not acknowledged by their next owner
    unacknowledged: dict[int, BlockState] = field(default_factory=dict)
    #: where nothing is kept, blocks of others whose last sums workers may lack until all have moved to their plan
    released: dict[int, BlockState] = field(default_factory=dict)

    # --- what leaves ----------------------------------------------------------------------------------------------

    def activate_due_plan(self, block: BlockState) -> None:
        """Have the coming plan rule a block that has reached the plan's first version."""
        stamp = self.state.clock.stamp
        if stamp is None or block.version != stamp[1] or block.plan == stamp[0]:
            return
        state, (number, first) = self.state, stamp
        prepared = state.plans[number]
        prepared.begin()
        block.enter_plan(number, first, prepared.reduction.leaves)
        if prepared.plan.owner(block.number).task == state.task:
            self.assign_backup(block, moved=False)
        else:
            del state.owned[block.number]
            if state.sums_only:
                self.released[block.number] = block
            else:
                self.outgoing.append(block)
                self.unacknowledged[block.number] = block
        self.report()

    @property
    def can_send(self) -> bool:
        """Whether a state can be sent at once; the selector wakes the loop when a full connection takes more."""
        if self._can_seed():
            return True
        if not self.outgoing or not self._may_move():
            return False
        block = self.outgoing[0]
        link = self.connections.peers.get(self.state.plan_of(block).plan.owner(block.number).task)
        return not block.awaits_backup and link is not None and link.open and not link.unsent

    def _may_move(self) -> bool:
        """Whether state may leave: every block is under the new plan, and every answer to workers is on its way."""
        stamp = self.state.clock.stamp
        if stamp is None or any(block.plan != stamp[0] for block in self.state.owned.values()):
            return False
        return self.connections.idle

    def _can_seed(self) -> bool:
        return self.backups.may_seed and self.connections.idle

    def send(self) -> None:
        """Send states to new replicas, and one to a new owner: moving gives way to answering workers."""
        while self._can_seed():
            self.backups.seed_next()
            self.report()  # whom it was for may be gone, and then nothing is to be awaited
        if not self.outgoing or not self._may_move():
            return
        block = self.outgoing[0]
        if block.awaits_backup:
            return  # who keeps its replica may be that of the new owner too
        prepared = self.state.plan_of(block)
        owner = prepared.plan.owner(block.number).task
        link = self.connections.peers.get(owner)
        if link is None or not link.open:
            self.connections.note_missing(owner)
            self.outgoing.rotate(-1)
        elif not link.unsent:
            self.outgoing.popleft()
            whole = block.whole
            link.send(block.header(STATE, whole.nbytes, crc=zlib.crc32(whole)), whole)
            prepared.moved_bytes += whole.nbytes

    def acknowledged(self, block: int) -> None:
        """A block is where it should be; what is left of it here may serve as its replica."""
        state = self.unacknowledged.pop(block)
        if self.state.replicated:
            self.backups.release(state)
            self.replicas.keep(state)

    def withdraw(self, block: int) -> None:
        """Neither send nor expect a block any more: it has another owner under every plan."""
        state = self.unacknowledged.pop(block, None)
        if state is not None:
            self.backups.release(state)
        self.outgoing = deque(state for state in self.outgoing if state.number != block)
        for prepared in self.state.plans.values():
            prepared.gained.pop(block, None)

    # --- what comes -----------------------------------------------------------------------------------------------

    def receive(self, block: BlockState, header: Header) -> None:
        """Own a block whose state has come."""
        if block.version not in (-1, header.version):
            reason = f"block {header.block} came at version {header.version}, but workers push step {block.version}"
            self.state.send(Failed(reason=reason))
        block.arrive(header)
        block.progress.highest = header.version
        self.state.version = max(self.state.version, block.version)
        self.own(block)

    def own(self, block: BlockState) -> None:
        """Own a block from now on that a plan gives to this server."""
        prepared = self.state.plan_of(block)
        prepared.begin()
        self.state.owned[block.number] = block
        del prepared.gained[block.number]

    def assign_backup(self, block: BlockState, *, moved: bool) -> None:
        """See to it that an owned block, just `moved` here from another owner or not, has the backup of its plan."""
        prepared = self.state.plan_of(block)
        backup = prepared.plan.backup(block.number)
        if backup is None:
            block.backup = block.next_backup = ""
        elif moved and backup.task in holders_of(prepared.previous, block.number):
            block.backup = backup.task
        elif moved:
            # nobody else has what has just come: the workers' next answer waits until the backup has it
            self.backups.seed(block, backup.task)
        elif backup.task != block.backup:
            self.backups.seed_later(block, backup.task)

    # --- the end of a move ----------------------------------------------------------------------------------------

    @property
    def moving(self) -> bool:
        """Whether states of blocks are awaited, or acknowledgements of such."""
        return bool(self.unacknowledged) or any(prepared.gained for prepared in self.state.plans.values())

    def report(self) -> None:
        """Tell the coordinator once every block is where the newest plan wants it."""
        number = max((n for n, prepared in self.state.plans.items() if prepared.began), default=0)
        if not number:
            return
        prepared = self.state.plans[number]
        if prepared.reported or prepared.gained or self.unacknowledged or not self.backups.settled:
            return
        if any(block.plan != number for block in self.state.owned.values()):
            return
        prepared.reported = True
        self.state.clock.passed(number)  # not that of a plan to come: a newcomer reports the plan in force, too
        move_ms = (time.monotonic() - prepared.began) * 1e3
        self.state.send(Moved(plan=number, sent_bytes=prepared.moved_bytes, move_ms=move_ms))

    def plan_done(self, plan: int) -> None:
        """All have moved to a plan: nobody lacks sums of before."""
        self.released = {number: block for number, block in self.released.items() if block.plan > plan}
