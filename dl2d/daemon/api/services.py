"""What the API works with: the store, the resource manager for one request at a time, credentials and health."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from dl2d.core.credentials import Credentials
from dl2d.core.daemon_mode import Mode
from dl2d.core.errors import Unavailable
from dl2d.core.resource_manager import Anchor, Capabilities, ResourceManager, RmIdentity, RmListing, TaskSpec
from dl2d.core.site_store import SiteStore
from dl2d.daemon.api.answered_heartbeats import AnsweredHeartbeats
from dl2d.daemon.api.heartbeat_deduplication import TakenHeartbeats
from dl2d.daemon.api.job_admission import Admission, RefusedJobs
from dl2d.daemon.api.request_limits import MAX_HEARTBEATS, PUBLIC_SECONDS, FairTurns, RateLimiter, UserTurns
from dl2d.daemon.health import Health
from dl2d.tick.task_specs import TaskSpecs

_BUSY: Final = "the daemon is busy with the resource manager; try again in a few seconds"


class SharedManager:
    """The resource manager for ticks while requests are served: locked in each call, except in a parallel ``submit``.

    Implements ``ResourceManager``.
    """

    def __init__(
        self, manager: ResourceManager, lock: AbstractContextManager[object], *, parallel_submits: bool
    ) -> None:
        self._manager = manager
        self._lock = lock
        self._submit_lock = nullcontext() if parallel_submits else lock

    def capabilities(self) -> Capabilities:
        """See ``ResourceManager.capabilities``."""
        with self._lock:
            return self._manager.capabilities()

    def listing(self, ended_since: float | None = None) -> RmListing:
        """See ``ResourceManager.listing``."""
        with self._lock:
            return self._manager.listing(ended_since)

    def submit(self, task: TaskSpec) -> str:
        """See ``ResourceManager.submit``."""
        with self._submit_lock:
            return self._manager.submit(task)

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """See ``ResourceManager.stop``."""
        with self._lock:
            self._manager.stop(jobs, grace)

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """See ``ResourceManager.authenticate``."""
        with self._lock:
            return self._manager.authenticate(rm_id, proof)

    def close(self) -> None:
        """See ``ResourceManager.close``."""
        self._manager.close()


class ManagerAccess:
    """The resource manager for requests: one request, or one call of a tick, uses it at a time.

    Starts are submitted and anchors authenticated beside other calls, if the manager allows it, so that nothing waits
    for them. A request waits at most ``wait_seconds``, and at most ``max_waiting`` requests wait at once: the threads
    that serve heartbeats must never all be taken up by it.
    """

    def __init__(
        self,
        manager: ResourceManager,
        *,
        parallel_submits: int = 0,
        parallel_authentication: bool = False,
        wait_seconds: float = 10.0,
        max_waiting: int = 8,
    ) -> None:
        self.manager = manager
        #: Held while the manager is called.
        self.lock = threading.Lock()
        self.wait_seconds = wait_seconds
        self._waiting = threading.BoundedSemaphore(max_waiting)
        self._parallel_authentication = parallel_authentication
        self._authenticating = threading.BoundedSemaphore(max_waiting)
        #: The manager for ticks.
        self.shared = SharedManager(manager, self.lock, parallel_submits=parallel_submits > 0)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the API works with."""

    cluster: str
    #: Base URL of this API as its address file has it, for which users make their credentials.
    url: str
    store: SiteStore
    manager: ManagerAccess
    #: Checks requests of jobs by the present settings.
    admission: Callable[[], Admission]
    credentials: Credentials
    #: Makes the commands and environments of tasks.
    task_specs: TaskSpecs
    #: Seconds since 1970.
    clock: Callable[[], float]
    #: Time from a heartbeat of a coordinator to its next one, seconds.
    heartbeat_seconds: Callable[[], float]
    starts_anchors: bool
    #: The daemon's present mode.
    mode: Callable[[], Mode]
    health: Health
    #: Limits requests without a valid credential, by address.
    rate: RateLimiter
    #: Limits heartbeats, by job, and apart from them reports of its containers.
    heartbeat_rate: RateLimiter
    #: Asks for a tick soon, because something happened that it should see.
    wake: Callable[[], None]
    user_turns: UserTurns
    #: Turns of requests without a valid credential, by address.
    public_turns: FairTurns = field(default_factory=lambda: FairTurns(1, pause=PUBLIC_SECONDS))
    #: Turns of refusals of requests with one, by job. While the store is away, the heartbeats of all jobs are refused:
    #: whoever asks for the daemon's health is not to wait for them.
    refusal_turns: FairTurns = field(default_factory=lambda: FairTurns(1, pause=PUBLIC_SECONDS))
    #: Turns of jobs in which their heartbeats are served.
    heartbeat_turns: FairTurns = field(default_factory=lambda: FairTurns(MAX_HEARTBEATS))
    #: Names of users who see the jobs of all users, besides root and the daemon's account.
    operators: Callable[[], frozenset[str]] = frozenset
    #: Name of the user with an id; raises ``KeyError`` where there is none.
    user_name: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name
    taken: TakenHeartbeats = field(default_factory=TakenHeartbeats)
    refused: RefusedJobs = field(default_factory=RefusedJobs)
    answered: AnsweredHeartbeats = field(default_factory=AnsweredHeartbeats)
