"""Rate of RPCs to slurmctld: how many commands send, what may be sent now, and the pause after an overload."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.errors import Waiting
from dl2d.core.resource_manager import CallStatistics, StartAllowance

log = structlog.get_logger(__name__)

#: A call of pyslurm, in the statistics.
PYSLURM_SUBMIT = "pyslurm submit"
#: Maximum number of RPCs that a command sends, as `sdiag` shows it; scancel sends one more for each job.
_RPCS = {"squeue": 3, "sinfo": 2, "scontrol": 2, "sbatch": 1, "scancel": 2} | dict.fromkeys(
    ("slurmrestd job/submit", "slurmrestd jobs", "slurmrestd ping", PYSLURM_SUBMIT), 1
)
_SUBMISSIONS = frozenset({"sbatch", "slurmrestd job/submit", PYSLURM_SUBMIT})
_CANCELLATIONS = frozenset({"scancel", "slurmrestd jobs"})
#: RPCs of a listing, and the maximum: with excluded nodes, reservations, limits and slurm.conf.
_LISTING_RPCS = _RPCS["squeue"] + _RPCS["sinfo"]
_MAX_LISTING_RPCS = _LISTING_RPCS + _RPCS["squeue"] + 5 * _RPCS["scontrol"]
#: Maximum number of RPCs of a registration: for the job and the nodes that it excludes, its script, the partitions and
#: the configuration.
_MAX_REGISTRATION_RPCS = 2 * _RPCS["squeue"] + 3 * _RPCS["scontrol"]
#: Parts of the maximum: starts and registrations are sent while fewer RPCs than this were sent in the last minute, or
#: while they alone had less than their own part.
_SHARED_SHARE, _RESERVED_SHARE = 1 / 2, 1 / 6
#: Registrations of a user wait when these alone had this part, which is less than ``_RESERVED_SHARE``: some of that is
#: left to other users.
_USER_SHARE = 1 / 8
#: While no other user's jobs have tried to register in the last minute, they only wait when this part was sent in all:
#: another one's then still find room in ``_SHARED_SHARE``.
_LONE_USER_SHARE = _SHARED_SHARE - _USER_SHARE
#: Listings may use this part, whatever else was sent up to the maximum.
_LISTING_SHARE = 1 / 3
_SPAN_SECONDS = 60.0
#: What Slurm's commands say when slurmctld has too much to do, or limits the caller's rate.
_OVERLOADED = re.compile(
    r"rate limit|temporarily unable|temporarily unavailable|temporarily disabled|job queue full|maxjobcount"
    r"|socket timed out",
    re.IGNORECASE,
)
#: Seconds of the first pause after an overload, doubled with each further one, and the longest.
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 5.0, 60.0
#: An overload so long after a pause is the first one again.
_CALM_SECONDS = 60.0


#: Pause reason when Slurm itself reports overload.
OVERLOADED = "Slurm is overloaded or limits the rate of RPCs"


@dataclass(slots=True, eq=False)
class _Activity:
    """A registration or a listing, for which a thread sends RPCs."""

    #: Whose job registers; None for a listing.
    user: int | None
    #: How many RPCs it may still send.
    left: int


class _Sent(NamedTuple):
    """RPCs that a command has sent."""

    at: float
    rpcs: int
    command: str
    #: For what, if it was for a registration or a listing.
    activity: _Activity | None


class RpcRate:
    """Counts RPCs to slurmctld and limits those that can wait. Thread-safe.

    No more than ``per_minute`` RPCs are sent in any minute, apart from those that stop jobs, which never wait.
    Starts and registrations wait while half of ``per_minute`` were sent in the last minute, but a sixth is reserved for
    starts, a sixth for registrations and a third for listings. A registration or a listing begins only if all RPCs that
    it may send are allowed. Registrations of one user wait when they have used an eighth and other users register, too,
    or three eighths were sent in all. While slurmctld is overloaded all of these wait, 5 s at first, then twice as long
    each time, up to 60 s.

    Parameters
    ----------
    per_minute
        Maximum number of RPCs in a minute.
    timer
        Seconds on a monotonic clock.
    """

    def __init__(self, per_minute: int, timer: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._timer = timer
        self._lock = threading.Lock()
        self._sent: deque[_Sent] = deque()
        #: What runs in each thread, by its identifier.
        self._running: dict[int, _Activity] = {}
        #: When a job of each user last tried to register, by user id.
        self._tried: dict[int, float] = {}
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._overloads = self._overloads_in_a_row = 0
        self._paused_until, self._pause_reason = -math.inf, ""

    def begins(self, argv: Sequence[str]) -> float:
        """Count a command that begins; returns when that is, by the timer."""
        command = argv[0]
        rpcs = 0 if "--version" in argv else _RPCS.get(command, 0)
        if command == "scancel":
            rpcs += sum(word[:1].isdecimal() for word in argv[1:])
        with self._lock:
            now = self._timer()
            self._calls[command] += 1
            activity = self._running.get(threading.get_ident())
            if activity is not None:
                activity.left = max(activity.left - rpcs, 0)
            self._sent.append(_Sent(now, rpcs, command, activity))
            return now

    def ended(self, command: str, begin: float, *, overloaded: bool, why: str = OVERLOADED) -> None:
        """Note that a command that began then has ended. ``overloaded``: pause; ``why``: the reason shown."""
        with self._lock:
            now = self._timer()
            self._seconds[command] += now - begin
            if command not in _RPCS or not overloaded:
                return
            self._overloads += 1
            if now < self._paused_until:
                return
            if now - self._paused_until >= _CALM_SECONDS:
                self._overloads_in_a_row = 0
            self._overloads_in_a_row += 1
            pause = doubled(_PAUSE_SECONDS, self._overloads_in_a_row, _MAX_PAUSE_SECONDS)
            self._paused_until, self._pause_reason = now + pause, why
        log.warning("starts, registrations and listings wait", why=why, seconds=pause)

    def start_allowance(self) -> StartAllowance:
        """How many tasks may be submitted now."""
        with self._lock:
            return StartAllowance(*self._left(self._last_minute(lambda sent: sent.command in _SUBMISSIONS)))

    def check_registrations(self) -> None:
        """Raise ``Waiting`` where no job can be authenticated now."""
        with self._lock:
            self._check_registrations()

    @contextmanager
    def registration(self, user: int) -> Iterator[None]:
        """Count what this thread sends meanwhile as the registration of a job of a user id.

        Raises
        ------
        Waiting
            The user's jobs have registered too often in the last minute, or no job can be authenticated now.
        """
        with self._lock:
            now = self._timer()
            self._tried = {each: at for each, at in self._tried.items() if now - at < _SPAN_SECONDS} | {user: now}
            alone = len(self._tried) == 1
            sent, in_all = self._by_user()[user], self._last_minute() + self._expected()
            if sent >= self._per_minute * _USER_SHARE and not (alone and in_all < self._per_minute * _LONE_USER_SHARE):
                raise Waiting(f"jobs of user {user} have registered too often in the last minute: this took {sent} "
                              f"RPCs to slurmctld (rpcs_per_minute={self._per_minute})")  # fmt: skip
            self._check_registrations()
            self._running[threading.get_ident()] = _Activity(user, _MAX_REGISTRATION_RPCS)
        with self._until_end():
            yield

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Count what this thread sends meanwhile as a listing.

        Raises
        ------
        Waiting
            It cannot begin now.
        """
        with self._lock:
            if reason := self._pause():
                raise Waiting(reason)
            wait = max(
                self._seconds_until(self._per_minute * _LISTING_SHARE - _LISTING_RPCS, _is_of_listing),
                self._seconds_until(self._per_minute - self._expected() - _MAX_LISTING_RPCS, _is_limited),
            )
            if wait:
                listings = self._last_minute(_is_of_listing)
                raise Waiting(f"{self._last_minute()} RPCs were sent to slurmctld in the last minute, {listings} of "
                              f"them for listings (rpcs_per_minute={self._per_minute}); listed again in {wait:.0f} s"
                              )  # fmt: skip
            self._running[threading.get_ident()] = _Activity(None, _MAX_LISTING_RPCS)
        with self._until_end():
            yield

    def statistics(self) -> CallStatistics:
        """What was sent so far."""
        with self._lock:
            return CallStatistics(dict(self._calls), dict(self._seconds), self._last_minute(), self._overloads)

    def _pause(self) -> str:
        left = self._paused_until - self._timer()
        # Rounded up: 0 s would be no wait.
        return f"{self._pause_reason}; dl2d asks again in {math.ceil(left)} s" if left > 0 else ""

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Forget at the end what runs in this thread."""
        try:
            yield
        finally:
            with self._lock:
                del self._running[threading.get_ident()]

    def _left(self, own: int, least: int = 1) -> tuple[int, str]:
        """RPCs of one kind that may be sent now, and why not more; 0 if fewer than ``least`` are left in all.

        ``own`` of the kind were sent in the last minute.
        """
        if reason := self._pause():
            return 0, reason
        sent, expected = self._last_minute(), self._expected()
        reason = f"{sent} RPCs were sent to slurmctld in the last minute (rpcs_per_minute={self._per_minute})"
        in_all = self._per_minute - self._last_minute(_is_limited) - expected
        shared = int(self._per_minute * _SHARED_SHARE) - sent - expected
        left = max(shared, int(self._per_minute * _RESERVED_SHARE) - own, 0)
        return min(left, in_all) if in_all >= least else 0, reason

    def _check_registrations(self) -> None:
        of_each = int(self._per_minute * _USER_SHARE)
        own = sum(min(rpcs, of_each) for rpcs in self._by_user().values())
        left, reason = self._left(own, _MAX_REGISTRATION_RPCS)
        if not left:
            raise Waiting(reason)

    def _by_user(self) -> Counter[int]:
        """RPCs of registrations in the last minute, and those that are expected, by user id."""
        users = Counter[int]()
        sent = ((each.activity, each.rpcs) for each in self._recent())
        for activity, rpcs in (*sent, *((activity, activity.left) for activity in self._running.values())):
            if activity is not None and activity.user is not None:
                users[activity.user] += rpcs
        return users

    def _expected(self) -> int:
        """How many RPCs registrations and listings that run may still send."""
        return sum(activity.left for activity in self._running.values())

    def _seconds_until(self, most: float, counts: Callable[[_Sent], bool]) -> float:
        """In how many seconds no more than so many RPCs of a kind will have been sent in the last minute."""
        sent, wait = self._last_minute(counts), 0.0
        for each in self._recent():
            if sent <= most:
                break
            if counts(each):
                sent, wait = sent - each.rpcs, each.at + _SPAN_SECONDS - self._timer()
        # So many may be expected that they are too many already.
        return wait if sent <= most else max(wait, 1.0)

    def _last_minute(self, counts: Callable[[_Sent], bool] | None = None) -> int:
        return sum(sent.rpcs for sent in self._recent() if counts is None or counts(sent))

    def _recent(self) -> deque[_Sent]:
        """What was sent in the last minute; what is older is forgotten."""
        now = self._timer()
        while self._sent and now - self._sent[0].at >= _SPAN_SECONDS:
            self._sent.popleft()
        return self._sent


def _is_of_listing(sent: _Sent) -> bool:
    return sent.activity is not None and sent.activity.user is None


def _is_limited(sent: _Sent) -> bool:
    return sent.command not in _CANCELLATIONS


def is_overloaded(said: str) -> bool:
    """Whether a command's complaint says that slurmctld has too much to do or limits the rate of RPCs."""
    return _OVERLOADED.search(said) is not None
