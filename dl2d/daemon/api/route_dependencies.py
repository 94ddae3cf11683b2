"""What the routes of the API work with: store, resource manager, credentials, limits and health."""

from __future__ import annotations

import pwd
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.daemon.api.job_admission import Admission, RefusedJobs
from dl2d.daemon.api.recent_heartbeats import AnsweredHeartbeats, JobOwners, TakenHeartbeats
from dl2d.daemon.api.request_limits import (
    HEARTBEATS_PER_SECOND,
    JOB_LOG_SECONDS,
    MAX_HEARTBEATS,
    MAX_HEARTBEATS_OF_USER,
    MAX_WAKES,
    PUBLIC_SECONDS,
    WAKES_PER_SECOND,
    FairTurns,
    RateLimiter,
    UserTurns,
)
from dl2d.daemon.health_and_metrics import Health
from dl2d.daemon.shared_resource_manager import ManagerAccess
from dl2d.store.sql_store import SqlStore
from dl2d.tick.task_command_and_environment import TaskSpecs


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the API works with."""

    cluster: str
    #: Base URL of this API as its address file has it, for which users make their credentials.
    url: str
    store: SqlStore
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
    #: Limits how often it is asked for one by tasks of a job that have moved, or by their containers, by job.
    wakes: RateLimiter = field(default_factory=lambda: RateLimiter(WAKES_PER_SECOND, MAX_WAKES, time.monotonic))
    user_turns: UserTurns
    #: Turns of requests without a valid credential, by address.
    public_turns: FairTurns = field(default_factory=lambda: FairTurns(1, pause=PUBLIC_SECONDS))
    #: Turns of refusals of requests with one, by job. While the store is away, the heartbeats of all jobs are refused:
    #: whoever asks for the daemon's health is not to wait for them.
    refusal_turns: FairTurns = field(default_factory=lambda: FairTurns(1, pause=PUBLIC_SECONDS))
    #: Turns of heartbeats: of those of a job one is served or waits for a turn of its user.
    heartbeat_turns: FairTurns = field(default_factory=lambda: FairTurns(sys.maxsize))
    #: Turns of users in which the heartbeats of their jobs are served: the store has one writer.
    heartbeat_user_turns: FairTurns = field(
        default_factory=lambda: FairTurns(MAX_HEARTBEATS, each=MAX_HEARTBEATS_OF_USER)
    )
    #: Names of users who see the jobs of all users, besides root and the daemon's account.
    operators: Callable[[], frozenset[str]] = frozenset
    #: Name of the user with an id; raises ``KeyError`` where there is none.
    user_name: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name
    taken: TakenHeartbeats = field(default_factory=TakenHeartbeats)
    refused: RefusedJobs = field(default_factory=RefusedJobs)
    answered: AnsweredHeartbeats = field(default_factory=AnsweredHeartbeats)
    owners: JobOwners = field(default_factory=JobOwners)

    def may_log(self, event: str, whose: str, seconds: float = JOB_LOG_SECONDS) -> bool:
        """Whether an event that a user can cause is logged now: not each time, as it could fill the log."""
        return self.heartbeat_rate.take(f"{whose}/{event}", seconds * HEARTBEATS_PER_SECOND)
