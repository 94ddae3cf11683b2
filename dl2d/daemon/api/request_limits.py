"""Limits of the job API's requests: rates, sizes of bodies, and turns of clients.

Heartbeats come first: requests without a job's credential begin one after the other, and their connections make way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import numpy as np
from starlette.exceptions import HTTPException

from dl2d.core.job_request_parser import MAX_LAUNCH_BYTES
from dl2d.daemon.api.connection_limits import AcceptedSocket, Connection, client_gone, client_group
from dl2d.daemon.api.limited_size_dict import NewestEntries

#: Requests without a credential that an address may send at once, in seconds of its rate.
BURST_SECONDS = 5.0
#: Heartbeats that a job may send. A coordinator sends one every few seconds, and one when something has changed.
HEARTBEATS_PER_SECOND = 50.0
#: A job with so many tasks at most may send as many reports of containers as heartbeats; a larger one more.
TASKS_PER_RATE = 10
#: Heartbeats of all coordinators together in a second: each costs the daemon some milliseconds.
MAX_HEARTBEATS_PER_SECOND = 100
#: Average time between two messages of one kind in the log on requests of one job, and of one address, seconds.
JOB_LOG_SECONDS, ADDRESS_LOG_SECONDS = 4.0, 1.0
#: Ticks that a job may ask for by what becomes of its tasks, and how many of them at once.
WAKES_PER_SECOND, MAX_WAKES = 0.2, 2.0
#: Requests that each user may send with credentials of their own.
VIEWS_PER_SECOND = 2.0
_MAX_AUTHENTICATING, _MAX_VIEWING = 2, 1
#: Time from the answer to one user to the beginning of the next one, seconds.
_VIEW_PAUSE_SECONDS = 0.02
#: Requests of users of one address that may wait to be authenticated.
_MAX_WAITING = 64
#: Time from the beginning of one request without a job's credential, or one refusal, to the next, seconds. Each takes
#: the event loop one to three milliseconds, in which no heartbeat is read.
PUBLIC_SECONDS = 0.01
#: Heartbeats that are served at once, each of another job. The server has 40 threads.
MAX_HEARTBEATS = 16
#: The same of the jobs of one user. Others are served between them, however many jobs the user has.
MAX_HEARTBEATS_OF_USER = 2
#: Heartbeats of one job that may wait for its turn. A coordinator sends the next one after the answer.
MAX_WAITING_HEARTBEATS = 4
#: Largest body of a request with a credential, in bytes: a heartbeat of a job with thousands of tasks.
MAX_BODY_BYTES = 4 * 1024 * 1024
#: In the rate of its job, a heartbeat counts as one more for each full multiple of this size, bytes.
BYTES_PER_HEARTBEAT = 64 * 1024
#: In the rate of its job, a heartbeat counts as one more for so many membership changes that it reports: each is
#: written into the store, which has one writer.
PLANS_PER_HEARTBEAT = 10
#: Largest ``parsing_cost`` of a body. A heartbeat of 20,000 members that all have ended costs about 65,000.
MAX_PARSING_COST = 100_000
#: The same for a request without a credential. For a command and an environment of 10,000 words each it is 4,000.
MAX_PUBLIC_PARSING_COST = 8000
#: In the rate of its job or address, a request counts as one more for each full multiple of this cost.
COST_PER_REQUEST = 1000
#: Bytes of a body in which brackets are counted at a time: what fits in the cache of a core.
_COUNTED_BYTES = 64 * 1024
#: Largest body of a container's report, in bytes.
MAX_REPORT_BYTES = 16 * 1024
#: Largest body of a request without one, in bytes: a registration, whose strings JSON may have lengthened by escapes.
MAX_PUBLIC_BODY_BYTES = 2 * MAX_LAUNCH_BYTES


def heartbeat_interval(configured: float, jobs: int, silent_seconds: float) -> float:
    """Time from a heartbeat of a coordinator to its next one, seconds.

    It is longer than configured where so many jobs would send more than ``MAX_HEARTBEATS_PER_SECOND``, but so that a
    job does not count as silent.
    """
    return min(max(configured, jobs / MAX_HEARTBEATS_PER_SECOND), silent_seconds / 3)


def parsing_cost(body: bytes) -> int:
    """An estimate, without parsing it, of what JSON costs to parse and check, in objects of 1 to 4 microseconds each.

    A body of 3 bytes for each object takes as long as one of many times its length with long strings. Brackets and
    commas within strings do not count: the last output of a task may be full of them. The estimate itself takes 10 to
    30 ms for 4 MiB.
    """
    if b"\0" in body:  # UTF-16 or UTF-32, in which the byte of a quotation mark may be part of another character
        return body.count(b"{") + body.count(b"[") + body.count(b",") // 5
    if b"\\" in body:
        # What is left of quotation marks begins or ends a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = np.frombuffer(body, np.uint8)
    brackets, commas, within = 0, 0, False
    for at in range(0, len(text), _COUNTED_BYTES):
        part = text[at : at + _COUNTED_BYTES]
        within_string = np.logical_xor.accumulate(part == ord('"'))
        within_string ^= within
        within = bool(within_string[-1])
        brackets += int(np.count_nonzero((part | 0x20 == ord("{")) > within_string))  # "[" is "{" without that bit
        commas += int(np.count_nonzero((part == ord(",")) > within_string))
    return brackets + commas // 5


class RateLimiter:
    """A token bucket for each address; the bucket that was used longest ago is dropped when there are too many."""

    def __init__(
        self, per_second: float, burst: float, timer: Callable[[], float], *, max_addresses: int = 10_000
    ) -> None:
        self._per_second, self._burst, self._timer = per_second, burst, timer
        #: By address, the tokens that were left and when, in seconds of the timer.
        self._buckets = NewestEntries[str, tuple[float, float]](max_addresses)

    def take(self, host: str, tokens: float = 1.0, *, taken: float = 0.0) -> bool:
        """Take tokens of an address; false where it has fewer.

        So many were taken for the same request before; together they count as the burst where they are more, so that
        no request is refused for ever.
        """
        tokens = min(tokens, max(0.0, self._burst - taken))
        group, now = client_group(host), self._timer()
        left, at = self._buckets.get(group, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        allowed = left >= tokens
        self._buckets[group] = (left - tokens * allowed, now)
        return allowed


@dataclass(eq=False)
class FairTurns:
    """Limit on the number of requests or connections that are served at a time, which is fair between clients.

    Clients that wait are served in turn, one request each, however many requests each of them has.

    For the thread of the event loop.
    """

    #: Turns at a time.
    at_once: int
    #: Turns of one client at a time.
    each: int = 1
    #: Seconds from the end of a turn to the one that takes its place.
    pause: float = 0.0
    #: Whether the newest request of a client is served first. If a client sends more requests than can be served, some
    #: are then served soon; with the oldest first, each would wait for all before it.
    newest_first: bool = False

    def __post_init__(self) -> None:
        self._free = self.at_once
        self._held: Counter[str] = Counter()
        #: Those who wait, by client, in order of their turns.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, client: str) -> int:
        """How many requests of a client wait."""
        return len(self._waiting.get(client, ()))

    @contextlib.asynccontextmanager
    async def turn(
        self, client: str, connection: AcceptedSocket | Connection, seconds: float | None = None
    ) -> AsyncIterator[None]:
        """A turn; raises HTTPException if the client closes its connection while it waits, or waits for so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._take(client, connection)
        except TimeoutError:
            raise _later(503, "the daemon answers many users now") from None
        try:
            yield
        finally:
            self._give_back(client)

    async def _take(self, client: str, connection: AcceptedSocket | Connection) -> None:
        if connection.closing:
            raise client_gone()
        if self._free and self._held[client] < self.each:
            self._hold(client)
            return
        granted = connection.turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(granted)
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self._give_back(client)  # granted, and cancelled before it was noticed
            else:
                self._forget(client, granted)
            raise

    def _give_back(self, client: str) -> None:
        if self.pause:
            asyncio.get_running_loop().call_later(self.pause, self._end, client)
        else:
            self._end(client)

    def _hold(self, client: str) -> None:
        self._free -= 1
        self._held[client] += 1

    def _end(self, client: str) -> None:
        self._free += 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        while self._free:
            following = next((each for each in self._waiting if self._held[each] < self.each), None)
            if following is None:
                return
            requests = self._waiting.pop(following)
            granted = requests.pop() if self.newest_first else requests.popleft()
            if not granted.done():  # it waits still
                self._hold(following)
                granted.set_result(None)
            if requests:
                self._waiting[following] = requests  # behind the others

    def _forget(self, client: str, granted: asyncio.Future[None]) -> None:
        requests = self._waiting.get(client)
        if requests is None or granted not in requests:
            return
        requests.remove(granted)
        if not requests:
            del self._waiting[client]


class UserTurns:
    """Bounds the requests of users that are served at once, so that they leave threads and time for heartbeats.

    Others wait, those of each address in order of arrival and the addresses in turn. For the thread of the event loop.

    Parameters
    ----------
    rate
        Limits the requests of each user.
    seconds
        How long a request waits for a turn.
    """

    def __init__(self, rate: RateLimiter, *, seconds: float = 10.0) -> None:
        self._rate = rate
        self._seconds = seconds
        self._authenticating = FairTurns(_MAX_AUTHENTICATING, each=_MAX_AUTHENTICATING)
        self._viewing = FairTurns(_MAX_VIEWING, pause=_VIEW_PAUSE_SECONDS)
        self._users: set[int] = set()

    @contextlib.asynccontextmanager
    async def authenticating(self, address: str, connection: Connection) -> AsyncIterator[None]:
        """A turn to verify a credential; raises HTTPException, with the time after which to try again."""
        if self._authenticating.waiting(address) >= _MAX_WAITING:
            raise too_many("requests of users of this address")
        async with self._authenticating.turn(address, connection, self._seconds):
            yield

    @contextlib.asynccontextmanager
    async def viewing(self, uid: int, connection: Connection) -> AsyncIterator[None]:
        """A turn to read what a user sees, one at a time for each; raises as ``authenticating``."""
        if uid in self._users:
            raise _later(503, "another request of this user is being answered")
        if not self._rate.take(str(uid)):
            raise too_many("requests of this user")
        self._users.add(uid)
        try:
            async with self._viewing.turn(str(uid), connection, self._seconds):
                yield
        finally:
            self._users.remove(uid)


def too_many(what: str) -> HTTPException:
    """The refusal of a request that exceeds a rate or a number."""
    return _later(429, f"too many {what}")


def _later(status: int, problem: str) -> HTTPException:
    return HTTPException(status, f"{problem}; try again in a few seconds", {"Retry-After": "1"})
