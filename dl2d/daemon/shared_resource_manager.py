"""The resource manager, shared by ticks and requests of the job API: one of them uses it at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from dl2d.core.cluster import Task
from dl2d.core.errors import Unavailable
from dl2d.core.resource_manager import (
    AccountingManager,
    Anchor,
    ContainerManager,
    RequeuingManager,
    ResourceManager,
    RmIdentity,
    RmJob,
    RmListing,
    TaskSpec,
)

_BUSY = "the daemon is busy with the resource manager; try again in a few seconds"


class ManagerAccess:
    """The resource manager for ticks and requests: one call of a tick, or one request, uses it at a time.

    Implements ``TickManager``. Tasks are submitted and anchors authenticated beside other calls, if the manager allows
    it, so that nothing waits for them. A request waits at most ``wait_seconds``, and at most ``max_waiting`` requests
    wait at once: the threads that serve heartbeats must never all be taken up by it.
    """

    def __init__(
        self,
        manager: ResourceManager,
        *,
        parallel_submits: int = 0,
        parallel_authentication: bool = False,
        max_waiting: int = 8,
    ) -> None:
        self.manager = manager
        #: Held while the manager is called.
        self.lock = threading.Lock()
        self.wait_seconds = 10.0
        self._submit_lock: AbstractContextManager[object] = nullcontext() if parallel_submits else self.lock
        #: The last complete listing, for requests that need to know little of it.
        self.last_complete: RmListing | None = None
        self._waiting = threading.BoundedSemaphore(max_waiting)
        self._parallel_authentication = parallel_authentication
        self._authenticating = threading.BoundedSemaphore(max_waiting)

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        """See ``TickManager.listing``."""
        with self.lock:
            found = self.manager.listing(ended_since, tasks)
        if not found.incomplete:
            self.last_complete = found
        return found

    def submit(self, task: TaskSpec) -> str:
        """See ``TickManager.submit``."""
        with self._submit_lock:
            return self.manager.submit(task)

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """See ``TickManager.stop``."""
        with self.lock:
            self.manager.stop(jobs, grace)

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """Authenticate an anchor, beside other calls if the manager allows it: then it may take long.

        Raises
        ------
        Unavailable
            As ``for_request``, or too many are being authenticated.
        Denied, NotFound
            See ``ResourceManager.authenticate``.
        """
        if not self._parallel_authentication:
            with self.for_request() as manager:
                return manager.authenticate(rm_id, proof)
        if not self._authenticating.acquire(blocking=False):
            raise Unavailable(_BUSY)
        try:
            return self.manager.authenticate(rm_id, proof)
        finally:
            self._authenticating.release()

    @contextmanager
    def for_request(self) -> Iterator[ResourceManager]:
        """The manager, for one request.

        Raises
        ------
        Unavailable
            Too many requests wait, or this one waited too long.
        """
        if not self._waiting.acquire(blocking=False):
            raise Unavailable(_BUSY)
        try:
            if not self.lock.acquire(timeout=self.wait_seconds):
                raise Unavailable(_BUSY)
            try:
                yield self.manager
            finally:
                self.lock.release()
        finally:
            self._waiting.release()

    def final_states(self, handles: Collection[str]) -> Sequence[RmJob]:
        """See ``AccountingManager.final_states``; nothing from a manager without accounting."""
        if not isinstance(self.manager, AccountingManager):
            return ()
        with self.lock:
            return self.manager.final_states(handles)

    @property
    def requeue(self) -> Callable[[RmIdentity, float], None] | None:
        """See ``RequeuingManager.requeue``; None where the manager cannot do that."""
        manager = self.manager
        if not isinstance(manager, RequeuingManager):
            return None

        def locked(anchor: RmIdentity, seconds: float) -> None:
            with self.lock:
                manager.requeue(anchor, seconds)

        return locked

    def allow_changes(self, seconds: float) -> None:
        """See ``ContainerManager.allow_changes``; nothing happens where the manager has no containers."""
        if isinstance(self.manager, ContainerManager):
            self.manager.allow_changes(seconds)
