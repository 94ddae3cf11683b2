"""The process groups of a job's plans: each is made in a thread beside the computation, and closed with its plan."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pslite.errors import ProtocolError, PsliteError, UsageError
from pslite.job.job_spec import JobSpec
from pslite.job.membership_plan import Plan
from pslite.job.reduction_tree import held
from pslite.net.messages import (
    Abort,
    Commit,
    Complete,
    FromCoordinator,
    Message,
    Nack,
    PlanDone,
    Prepare,
    Publish,
    Published,
    Ready,
)
from pslite.numeric.gradient_sums import Supply
from pslite.worker.allreduce.gradient_summing import Division, room
from pslite.worker.allreduce.process_group import CLOSE_SECONDS, FAIL_SECONDS, Bytes, Group, RelayStore

_LOOK_SECONDS = 1.0


class GroupBroken(Exception):
    """The group in use cannot go on; the coordinator makes another one."""


@dataclass(frozen=True)
class ReadyPlan:
    """A plan that this worker is ready for; without a group if it is not in it."""

    plan: Plan
    group: Group | None
    #: whether nobody has had weights yet, so that the first worker begins
    fresh: bool
    #: memory that its steps need, by round
    room: list[Bytes]


class PlanGroups:
    """What the coordinator says of plans, and their groups; the script's thread waits here for either.

    Parameters
    ----------
    task
        of this worker.
    spec
        the job.
    nbytes
        bytes of a bundle.
    supply
        gets memory for the gradients of each plan.
    send
        takes messages for the coordinator.
    check
        looks at what the control thread has heard, in the script's thread; may raise.

    """

    #: name or address under which other workers reach this one; set before it joins
    host: str

    def __init__(
        self,
        task: str,
        spec: JobSpec,
        nbytes: int,
        supply: Supply,
        send: Callable[[Message], None],
        check: Callable[[], None],
    ) -> None:
        self._task = task
        self._spec = spec
        self._nbytes = nbytes
        self._supply = supply
        self._send = send
        self._check = check
        #: the plan in use; 0: there is none
        self.current = 0
        #: the last plan that takes effect when its first version is announced
        self.committed = 0
        #: the worker that writes files, once all have the last version
        self.chief: str | None = None
        #: the newest plan that takes the place of a broken one
        self._recovery = 0
        self._bell = threading.Event()
        self._lock = threading.Lock()
        self._ready: dict[int, ReadyPlan] = {}
        self._stores: dict[int, RelayStore] = {}
        #: groups that are there (they take a moment to close), and threads that make some
        self._made: list[Group] = []
        self._making: list[threading.Thread] = []

    # --- the script's thread --------------------------------------------------------------------------------------

    @property
    def superseded(self) -> bool:
        """Whether another plan is to take the place of the one in use, whose group is broken."""
        return 0 < self.current < self._recovery

    def look(self) -> None:
        """Look at what the control thread has heard; raises `GroupBroken` if the group in use cannot go on."""
        self._check()
        if self.superseded:
            raise GroupBroken

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done`; raises as `look`."""
        while not done():
            self.look()
            self.rest()

    def rest(self) -> None:
        """Wait until something happens, or for a moment."""
        self._bell.wait(_LOOK_SECONDS)
        self._bell.clear()

    def ready(self, number: int) -> ReadyPlan:
        """Return a plan that all members are ready for."""
        return self._ready[number]

    def replacement(self, *, any_plan: bool) -> ReadyPlan:
        """Wait for a plan after the one in use that takes the place of a broken one, or for any."""
        while True:
            self._check()
            with self._lock:
                number = self._recovery
                if number <= self.current:
                    number = max(self._ready, default=0) if any_plan else 0
                found = self._ready.get(number)
            if found is not None and found.plan.number > self.current and found.group is not None:
                return found
            self.rest()

    def close(self) -> None:
        """Close all groups; nothing of them comes back to Python any more."""
        self.close_before(sys.maxsize)
        began = time.monotonic()
        with self._lock:
            making, made = [*self._making], [*self._made]
        for thread in making:
            thread.join(max(0.0, began + FAIL_SECONDS - time.monotonic()))
        for group in made:
            group.join(max(0.0, began + CLOSE_SECONDS - time.monotonic()))

    # --- any thread -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make the script's thread look at what there is."""
        self._bell.set()

    def close_before(self, plan: int) -> None:
        """Close what belongs to plans before one."""
        self._forget([number for number in [*self._stores] if number < plan])

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            with self._lock:
                store, ready = self._stores.pop(number, None), self._ready.pop(number, None)
            if store is not None:
                store.close()
            if ready is not None and ready.group is not None:
                ready.group.close()

    # --- the control thread ---------------------------------------------------------------------------------------

    def waits_for(self) -> tuple[str, ...]:
        """Return nothing: all members wait for each other."""
        return ()

    def hear(self, message: FromCoordinator) -> None:
        """Take a message of the coordinator."""
        if isinstance(message, Prepare):
            number = message.plan.number
            store = RelayStore(lambda key, value: self._send(Publish(plan=number, key=key, value=value)))
            making = threading.Thread(target=self._make, args=(message, store), name="pslite-prepare", daemon=True)
            with self._lock:
                self._stores[number] = store
                self._making = [thread for thread in self._making if thread.is_alive()] + [making]
                making.start()
            if message.recover:
                self._recovery = number
        elif isinstance(message, Published):
            with self._lock:
                receiver = self._stores.get(message.plan)
            if receiver is not None:
                receiver.take(message.key, message.value)
        elif isinstance(message, Abort):
            self._forget([message.plan])
        elif isinstance(message, Commit):
            self.committed = message.plan
        elif isinstance(message, PlanDone):
            self.close_before(message.plan)
        elif isinstance(message, Complete):
            self.chief = message.chief
        else:
            raise ProtocolError(
                f"the coordinator sent {type(message).__name__}, a message that no worker of an all-reduce job accepts"
            )

    def _make(self, message: Prepare, store: RelayStore) -> None:
        """Make the group of a plan; runs beside the computation."""
        plan = message.plan
        rank, size = plan.worker_index(self._task), len(plan.workers)
        group = None
        memory: list[Bytes] = []
        try:
            if message.spec != self._spec:
                raise UsageError("the plan's job description differs from that of this worker's script")
            if rank >= 0:
                group = Group(rank, size, store, self.host, self._bell.set, message.progress_seconds)
                with self._lock:
                    self._made = [other for other in self._made if not other.join(0.0)] + [group]
                how = Division(self._spec, size, range(size), self._nbytes)
                memory = room(self._spec, how, rank)
                self._supply.reserve(held(how.nodes[rank], how.leaves))
        except PsliteError as error:
            if not store.closed:
                self._send(Nack(plan=plan.number, reason=str(error) or type(error).__name__))
            return
        with self._lock:
            wanted = plan.number in self._stores
            if wanted:
                self._ready[plan.number] = ReadyPlan(plan, group, message.fresh, memory)
        if not wanted:
            if group is not None:
                group.close()
            return
        self.wake()
        self._send(Ready(plan=plan.number))
