"""Repeats what may have been lost when a connection to a server broke, or when servers died."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pslite.fault_points import FaultPoint, FaultPoints
from pslite.net.messages import Promote
from pslite.net.tensor_frames import NEWEST, RESEND, Header
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.initial_state import InitialState
from pslite.worker.ps.known_plans import PlanTable
from pslite.worker.ps.state_fetch import StateFetch

#: How long a broken connection to a server may take to be open again, before the worker reports it to the coordinator.
RECONNECT_SECONDS = 10.0


@dataclass(eq=False)
class Recovery:
    """Sends again, and asks again, what a server may not have got or its answer may not have come."""

    _plans: PlanTable
    _progress: Progress
    _plane: DataPlane
    _sender: GradientSender
    _initial: InitialState
    _fetch: StateFetch
    _faults: FaultPoints

    def reconnected(self, server: str) -> None:
        """Go on with a server over a new connection: what was on the one before may be lost, in both directions."""
        plan, progress = self._plans.current, self._progress
        if plan is not None:
            numbers = plan.blocks_of(server)
            if progress.began and not progress.entered:
                self._initial.send_blocks(progress.missing.intersection(numbers))
            self._sender.push_again(progress.unanswered(numbers))
            self._fetch.ask(numbers)
            coming = self._plans.following(progress.awaited) if progress.entered else None
            if coming is not None and coming.added:
                self._initial.begin_added(coming, coming.plan.blocks_of(server))
        self._ask_again(progress.missing)
        self._faults.reached(FaultPoint.RESUMED, server)

    def follow(self, message: Promote) -> None:
        """Go on with the servers that own the blocks of dead ones: what was pushed in this step is pushed to them."""
        owners = message.owners
        self._plans.replace_owners(message.gone, owners)
        self._plane.forget(message.gone)
        self._plane.clear_doubts()
        if self._plans.current is not None:
            self._sender.push_again(owners)
            # a worker that is behind has been sent them, but perhaps over a connection that broke
            self._ask_again(owners.keys() & self._progress.missing)
            self._fetch.ask(owners)
        self._faults.reached(FaultPoint.OWNERS_CHANGED)

    def forget_beyond(self, blocks: int) -> None:
        """Wait for none but the first blocks: others were those of a plan that is given up."""
        if not self._progress.entered:
            self._progress.missing.intersection_update(range(blocks))

    def ask_for_missing(self) -> None:
        """Ask for the blocks that are missing."""
        self._ask_again(self._progress.missing)

    def _ask_again(self, numbers: Iterable[int]) -> None:
        """Ask all servers that may have them for blocks that are missing; what they have sent may be lost."""
        progress = self._progress
        version = progress.awaited if progress.entered or progress.began else -1
        version = NEWEST if progress.any_version else version
        for number in numbers:
            for owner in self._plans.may_own(number):
                self._plane.send(owner, Header(RESEND, 0, number, 0, 0, version, 0))
