"""Activation of plans: the version at which a plan takes effect, and how all members get to know it without stopping.

When the coordinator commits a plan, the server that owns block 0 chooses the plan's first version.  It announces plan
and version to the workers together with weights of block 0 that precede that version; the workers repeat the
announcement in their pushes to all servers.  So all members have it before a step under the new plan can be pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.net.messages import Announced, Message
from pslite.server.block_state import BlockState


class Announcement(NamedTuple):
    """A plan that is about to take effect, and its first version; (0, 0) in a frame that announces nothing."""

    plan_number: int
    first: int


NO_ANNOUNCEMENT = Announcement(0, 0)
#: first version that is reported of a plan that does not take effect, since the job ends before
JOB_ENDS_BEFORE = -1


@dataclass(eq=False)
class PlanActivation:
    """The announcement that a server knows; on the owner of block 0, also the choice of the first version."""

    #: sends a message to the coordinator
    send: Callable[[Message], None]
    faults: FaultPoints
    #: None before the first announcement, and from when this server has moved to the announced plan until the next one
    announced: Announcement | None = None
    #: of the job
    total_versions: int = 0
    #: number of the plan that the coordinator has committed and that is not announced yet; 0: none
    _committed: int = 0
    #: numbers of plans that are over or aborted; workers may still announce them, until they know that
    _finished: set[int] = field(default_factory=set)

    def commit(self, plan_number: int) -> None:
        """Have a plan announced with the next weights of block 0 that are sent."""
        if self.announced is not None and self.announced.plan_number == plan_number:
            self._report_former_owners(self.announced)
        else:
            self._committed = plan_number

    def _report_former_owners(self, announced: Announcement) -> None:
        """Report an announcement of the former owner of block 0, which may have died before it reported it."""
        self.send(Announced(plan=announced.plan_number, first=announced.first))

    def is_due(self, block: BlockState) -> bool:
        """Return whether a committed plan is still to be announced with block 0."""
        return bool(self._committed) and block.plan_number < self._committed

    def announce(self, first: int) -> None:
        """Announce the committed plan for version `first`, unless the job ends before; report it to the coordinator."""
        plan_number, self._committed = self._committed, 0
        if first >= self.total_versions:
            first = JOB_ENDS_BEFORE
        else:
            self.announced = Announcement(plan_number, first)
        self.send(Announced(plan=plan_number, first=first))
        self.faults.reached(FaultPoint.PLAN_ANNOUNCED, plan_number)

    def announce_if_due(self, block: BlockState) -> None:
        """Announce a committed plan, in a synchronous job, when a step has been applied to block 0.

        `block.version` is still v, the version before the step.  Workers get the announcement with version v + 1, the
        result of the step, and the plan begins with version v + 2.  To be called before the step is sent to the
        replica, so that the replica has the announcement before any worker.
        """
        if self.is_due(block):
            if self.announced is not None and self.announced.plan_number == self._committed:
                self._report_former_owners(self.announced)
                self._committed = 0
            else:
                self.announce(block.version + 2)

    def take(self, plan_number: int, first: int, *, prepared: bool) -> None:
        """Take the announcement that a worker repeats in a push; nothing if the number is 0, or the plan aborted.

        Raises
        ------
        ProtocolError
            the plan was never `prepared` on this server.

        """
        if plan_number and self.announced is None and plan_number not in self._finished:
            if not prepared:
                raise ProtocolError(f"a push announces plan {plan_number}, which was never prepared on this server")
            self.announced = Announcement(plan_number, first)

    def plan_number_at(self, block: BlockState, version: int) -> int:
        """Return the number of the plan under which the step from a version of a block is pushed."""
        announced = self.announced
        return announced.plan_number if announced is not None and version >= announced.first else block.plan_number

    def for_replica(self, block: BlockState) -> Announcement:
        """Return the announcement that a block's replica has to know with a step.

        The step has just been applied; `block.version` is still the version before it.

        For a plan with first version v + 2:

        ============= =================================================================
        step v        the replica of block 0 gets the announcement
        version v + 1 workers get it with the new weights of block 0, the result of step v
        step v + 1    the replicas of other blocks get it
        ============= =================================================================

        If a replica had it earlier and the owner died, the plan would begin on the new owner although no worker has the
        announcement.
        """
        announced, ahead = self.announced, 2 if block.number == 0 else 1
        return announced if announced is not None and announced.first <= block.version + ahead else NO_ANNOUNCEMENT

    def for_workers(self, block: BlockState) -> Announcement:
        """Return the announcement that is sent to workers with a block's present weights."""
        announced = self.announced
        if announced is None or block.number or announced.first != block.version + 1:
            return NO_ANNOUNCEMENT
        return announced

    def forget_plan(self, plan_number: int) -> None:
        """Forget a plan that is aborted or over, announced or not; workers' later announcements of it are ignored."""
        self._finished.add(plan_number)
        if self._committed == plan_number:
            self._committed = 0
        if self.announced is not None and self.announced.plan_number == plan_number:
            self.announced = None

    def forget_announcement(self, plan_number: int) -> None:
        """Drop the announcement of a plan to which this server has moved, or an earlier one; a later plan's stays."""
        if self.announced is not None and self.announced.plan_number <= plan_number:
            self.announced = None
