"""Contract of membership sources, which say which tasks should be members of a job: dl2d, a schedule, or MXNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from pslite.job.job_status import Status


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What the source of members asks for. `members` None: everybody who joins becomes a member."""

    members: frozenset[str] | None = None
    stop: bool = False
    #: why the job ends (`stop`), where it was not cancelled
    reason: str = ""
    heartbeat_seconds: float = 1.0


class MembershipSource(Protocol):
    """Decides which tasks should be members of a job, and takes the reports of its coordinator."""

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:
        """The coordinator listens at `address`. `wake` may be called from any thread to have `exchange` called soon."""

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Take the status without waiting; return the newest request, None if there is none yet.

        `status` has every plan ever finished and every member that ever left; `urgent` says that something has changed
        that must be reported at once.
        """

    def close(self, status: Status) -> None:
        """The job is over; may wait a bounded time until the last status is delivered."""
