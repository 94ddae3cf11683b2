"""Activation of plans: the version at which a plan takes effect, and how all members learn it without stopping.

When the coordinator commits a plan, the server that owns block 0 chooses the plan's first version.  It announces plan
and version to the workers together with weights of block 0 that precede that version; the workers repeat the
announcement in their pushes to all servers.  So everybody knows it before a step under the new plan can be pushed.
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

    plan: int
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
    #: number of versions of the job
    total_versions: int = 0
    #: the plan that the coordinator has committed and that is not announced yet; 0: none
    _committed: int = 0
    #: plans that are over or given up, which workers that have not heard of it may still announce
    _finished: set[int] = field(default_factory=set)

    def commit(self, plan: int) -> None:
        """Have a plan announced with the next weights of block 0 (synchronous jobs: that another step makes)."""
        if self.announced is not None and self.announced.plan == plan:
            self._repeat_announcement(self.announced)
        else:
            self._committed = plan

    def _repeat_announcement(self, announced: Announcement) -> None:
        """Tell the coordinator about an announcement that the former owner of block 0 made, perhaps without telling."""
        self.send(Announced(plan=announced.plan, first=announced.first))

    def is_due(self, block: BlockState) -> bool:
        """Return whether a committed plan is still to be announced with block 0."""
        return bool(self._committed) and block.plan < self._committed

    def announce(self, first: int) -> None:
        """Announce the committed plan for version `first`, unless the job ends before, and tell the coordinator."""
        plan, self._committed = self._committed, 0
        if first >= self.total_versions:
            first = JOB_ENDS_BEFORE
        else:
            self.announced = Announcement(plan, first)
        self.send(Announced(plan=plan, first=first))
        self.faults.reached(FaultPoint.PLAN_ANNOUNCED, plan)

    def announce_if_due(self, block: BlockState) -> None:
        """Announce a committed plan, in a synchronous job, when a step has been applied to block 0.

        `block.version` is still v, the version before the step.  Workers get the announcement with version v + 1, the
        result of the step, and the plan begins with version v + 2.  To be called before the step is sent to the
        replica, so that the replica has the announcement before any worker.
        """
        if self.is_due(block):
            if self.announced is not None and self.announced.plan == self._committed:
                self._repeat_announcement(self.announced)
                self._committed = 0
            else:
                self.announce(block.version + 2)

    def learn(self, plan: int, first: int, *, prepared: bool) -> None:
        """Take the announcement that a worker repeats in a push; nothing if `plan` is 0 or given up.

        Raises
        ------
        ProtocolError
            the plan was never `prepared` on this server.

        """
        if plan and self.announced is None and plan not in self._finished:
            if not prepared:
                raise ProtocolError(f"a push announces plan {plan}, which was never prepared on this server")
            self.announced = Announcement(plan, first)

    def plan_at(self, block: BlockState, version: int) -> int:
        """Return the plan under which the step from a version of a block is pushed."""
        return self.announced.plan if self.announced is not None and version >= self.announced.first else block.plan

    def for_replica(self, block: BlockState) -> Announcement:
        """Return the announcement that a block's replica has to know with a step.

        The step has just been applied; `block.version` is still the version before it.

        For a plan with first version v + 2:

        ============= =================================================================
        step v        the replica of block 0 gets the announcement
        version v + 1 workers get it with the new weights of block 0, the result of step v
        step v + 1    the replicas of other blocks get it
        ============= =================================================================

        If a replica had it earlier and the owner died, the replica would act on an announcement that no worker has.
        """
        announced, ahead = self.announced, 2 if block.number == 0 else 1
        return announced if announced is not None and announced.first <= block.version + ahead else NO_ANNOUNCEMENT

    def for_workers(self, block: BlockState) -> Announcement:
        """Return the announcement that is sent to workers with a block's present weights."""
        announced = self.announced
        if announced is None or block.number or announced.first != block.version + 1:
            return NO_ANNOUNCEMENT
        return announced

    def forget_plan(self, plan: int) -> None:
        """Forget a plan that is given up or over, announced or not; workers' later announcements of it are ignored."""
        self._finished.add(plan)
        if self._committed == plan:
            self._committed = 0
        if self.announced is not None and self.announced.plan == plan:
            self.announced = None

    def forget_announcement(self, plan: int) -> None:
        """Drop the announcement of a plan to which this server has moved, or an earlier one; a later plan's stays."""
        if self.announced is not None and self.announced.plan <= plan:
            self.announced = None
