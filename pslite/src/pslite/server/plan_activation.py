"""The version at which a plan takes effect, announced by the owner of block 0 with the weights that it sends.

Workers hear of it before they can push a step under the new plan, so nobody ever stops.  The pair (plan, its first
version) is called a stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pslite.errors import ProtocolError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.net.messages import Message, Stamped
from pslite.server.block_state import BlockState


@dataclass(eq=False)
class PlanClock:
    """Holds which plan takes effect at which version; on the owner of block 0, chooses that version."""

    #: sends a message to the coordinator
    send: Callable[[Message], None]
    faults: FaultPoints
    #: the coming plan and its first version, once announced
    stamp: tuple[int, int] | None = None
    #: versions of the whole job
    total_versions: int = 0
    #: a plan that is to take effect as soon as possible, 0 for none
    _committed: int = 0

    def commit(self, plan: int) -> None:
        """Have a plan take effect as soon as possible, as the coordinator says."""
        if self.stamp is not None and self.stamp[0] == plan:
            # the server that was told first is gone, and may not have reported the version
            self.send(Stamped(plan=plan, first=self.stamp[1]))
        else:
            self._committed = plan

    def waits(self, block: BlockState) -> bool:
        """Whether a committed plan waits for its first version to be chosen."""
        return bool(self._committed) and block.plan < self._committed

    def choose(self, first: int) -> None:
        """Have the committed plan take effect at a version, or say that the job ends before."""
        plan, self._committed = self._committed, 0
        if first >= self.total_versions:
            first = -1
        else:
            self.stamp = plan, first
        self.send(Stamped(plan=plan, first=first))
        self.faults.reached(FaultPoint.STAMPED, plan)

    def before_step(self, block: BlockState) -> None:
        """Block 0 is about to reach a version: a committed plan is announced with it, and rules from the next one on.

        Replicas hear of it before any worker does.
        """
        if self.waits(block):
            if self.stamp is not None and self.stamp[0] == self._committed:
                # an owner of the block that is gone has announced it to workers already
                self.commit(self._committed)
                self._committed = 0
            else:
                self.choose(block.version + 2)

    def learn_stamp(self, plan: int, first: int, *, prepared: bool) -> None:
        """Take a stamp that a worker has been told, by the owner of block 0.

        Raises
        ------
        ProtocolError
            the plan was never prepared here.

        """
        if plan and self.stamp is None:
            if not prepared:
                raise ProtocolError(f"plan {plan} is announced but was never prepared")
            self.stamp = plan, first

    def plan_at(self, block: BlockState, version: int) -> int:
        """Return the plan under which a version of a block is pushed."""
        return self.stamp[0] if self.stamp is not None and version >= self.stamp[1] else block.plan

    def for_replica(self, block: BlockState) -> tuple[int, int]:
        """Return the stamp that a replica has to know with the step under way, or (0, 0).

        Of block 0 from the step on whose answer carries it; of others when workers have heard of it for certain.
        Otherwise a stamp could outlive its maker that no worker knows.
        """
        ahead = 2 if block.number == 0 else 1
        return self.stamp if self.stamp is not None and self.stamp[1] <= block.version + ahead else (0, 0)

    def for_workers(self, block: BlockState) -> tuple[int, int]:
        """Return the stamp that goes to workers with the weights of a block, or (0, 0)."""
        due = self.stamp is not None and block.number == 0 and self.stamp[1] == block.version + 1
        return self.stamp if self.stamp is not None and due else (0, 0)

    def forget(self, plan: int) -> None:
        """A plan is given up."""
        if self._committed == plan:
            self._committed = 0

    def passed(self, plan: int) -> None:
        """A plan has taken effect everywhere here; the stamp of one that is to come stays."""
        if self.stamp is not None and self.stamp[0] <= plan:
            self.stamp = None
