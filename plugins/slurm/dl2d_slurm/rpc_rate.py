"""Rate of RPCs to slurmctld: how many commands send, what may be sent now, and the pause after an overload."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import structlog

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.errors import Waiting
from dl2d.core.resource_manager import CallStatistics, StartAllowance

log = structlog.get_logger(__name__)

#: Maximum number of RPCs that a command sends, as `sdiag` shows it; scancel sends one more for each job.
_RPCS: Final = {"squeue": 3, "sinfo": 2, "scontrol": 2, "sbatch": 1, "scancel": 2} | dict.fromkeys(
    ("slurmrestd job/submit", "slurmrestd jobs", "slurmrestd ping"), 1
)
_SUBMISSIONS: Final = frozenset({"sbatch", "slurmrestd job/submit"})
_LISTING_RPCS: Final = _RPCS["squeue"] + _RPCS["sinfo"]
#: Parts of the maximum: starts and registrations are sent while fewer RPCs than this were sent in the last minute, or
#: while they alone had less than their own part.
_STARTS, _OWN_PART = 1 / 2, 1 / 6
#: Registrations of a user wait when these alone had this part. It is less than ``_OWN_PART``, for other users' sake.
_OF_USER: Final = 1 / 8
#: While no other user's jobs have tried to register in the last minute, they only wait when this part was sent in all:
#: another one's then still find room in ``_STARTS``.
_OF_LONE_USER: Final = _STARTS - _OF_USER
#: Listings may use this part whatever else was sent.
_LISTINGS: Final = 1 / 3
_SPAN_SECONDS: Final = 60.0
#: What Slurm's commands say when slurmctld has too much to do, or limits the caller's rate.
_OVERLOADED: Final = re.compile(
    r"rate limit|temporarily unable|temporarily unavailable|temporarily disabled|job queue full|socket timed out",
    re.IGNORECASE,
)
#: Seconds of the first pause after an overload, doubled with each further one, and the longest.
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 5.0, 60.0
#: An overload so long after a pause is the first one again.
_CALM_SECONDS: Final = 60.0


class _Sent(NamedTuple):
    """RPCs that a command has sent."""

    at: float
    rpcs: int
    #: Whether it has submitted a job.
    starts: bool
    #: Whose job it has authenticated, if any.
    user: int | None


class RpcRate:
    """Counts RPCs to slurmctld and limits those that can wait. Thread-safe.

    No more than ``per_minute`` RPCs are sent in any minute, not counting those that cancel jobs, which never wait.
    Starts and registrations wait while half of ``per_minute`` were sent in the last minute, but a sixth is reserved for
    starts, a sixth for registrations and a third for listings. Registrations of one user wait when they have used an
    eighth and other users register, too, or three eighths were sent in all. While slurmctld is overloaded all of these
    wait, 5 s at first, then twice as long each time, up to 60 s.

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
        #: In ``user``, for whose registration a thread sends RPCs.
        self._thread = threading.local()
        #: When a job of each user last tried to register, by user id.
        self._tried: dict[int, float] = {}
        self._listings: deque[float] = deque()
        self._calls: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._overloads = self._overloads_in_a_row = 0
        self._paused_until = -math.inf

    def begins(self, argv: Sequence[str]) -> float:
        """Count a command that begins; returns when that is, by the timer."""
        command = argv[0]
        rpcs = 0 if "--version" in argv else _RPCS.get(command, 0)
        if command == "scancel":
            rpcs += sum(word[:1].isdecimal() for word in argv[1:])
        with self._lock:
            now = self._timer()
            self._calls[command] += 1
            self._sent.append(_Sent(now, rpcs, command in _SUBMISSIONS, getattr(self._thread, "user", None)))
            return now

    def ended(self, command: str, begin: float, *, overloaded: bool) -> None:
        """Note that a command that began then has ended, and whether slurmctld had too much to do."""
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
            self._paused_until = now + pause
        log.warning("Slurm is overloaded or limits the rate of RPCs: starts, registrations and listings wait",
                    seconds=pause)  # fmt: skip

    def start_allowance(self) -> StartAllowance:
        """How many tasks may be submitted now."""
        with self._lock:
            return StartAllowance(*self._left(self._last_minute(lambda sent: sent.starts)))

    def check_registrations(self) -> None:
        """Raise ``Waiting`` where no job can be authenticated now."""
        with self._lock:
            left, reason = self._left(self._registrations())
        if not left:
            raise Waiting(reason)

    @contextmanager
    def registration(self, user: int) -> Iterator[None]:
        """Count what this thread sends meanwhile as the registration of a job of a user id.

        Raises
        ------
        Waiting
            The user's jobs have registered too often in the last minute.
        """
        with self._lock:
            now = self._timer()
            self._tried = {each: at for each, at in self._tried.items() if now - at < _SPAN_SECONDS} | {user: now}
            alone = len(self._tried) == 1
            sent, in_all = self._last_minute(lambda each: each.user == user), self._last_minute()
        if sent >= self._per_minute * _OF_USER and not (alone and in_all < self._per_minute * _OF_LONE_USER):
            raise Waiting(f"jobs of user {user} have registered too often in the last minute: this took {sent} RPCs "
                          f"to slurmctld (rpcs_per_minute={self._per_minute})")  # fmt: skip
        self._thread.user = user
        try:
            yield
        finally:
            self._thread.user = None

    def list(self) -> None:
        """Count a listing that begins.

        Raises
        ------
        Waiting
            It cannot begin now.
        """
        with self._lock:
            if reason := self._pause():
                raise Waiting(reason)
            now = self._timer()
            while self._listings and now - self._listings[0] >= _SPAN_SECONDS:
                self._listings.popleft()
            if (len(self._listings) + 1) * _LISTING_RPCS > self._per_minute * _LISTINGS:
                wait = self._listings[0] + _SPAN_SECONDS - now
                raise Waiting(f"Slurm was listed {len(self._listings)} times in the last minute, as often as "
                              f"rpcs_per_minute={self._per_minute} allows; again in {wait:.0f} s")  # fmt: skip
            self._listings.append(now)

    def statistics(self) -> CallStatistics:
        """What was sent so far."""
        with self._lock:
            return CallStatistics(dict(self._calls), dict(self._seconds), self._last_minute(), self._overloads)

    def _pause(self) -> str:
        left = self._paused_until - self._timer()
        return f"Slurm is overloaded or limits the rate of RPCs; asked again in {left:.0f} s" if left > 0 else ""

    def _left(self, own: int) -> tuple[int, str]:
        """How many RPCs may be sent of those of which ``own`` were sent in the last minute, and why not more."""
        if reason := self._pause():
            return 0, reason
        sent = self._last_minute()
        reason = f"{sent} RPCs were sent to slurmctld in the last minute (rpcs_per_minute={self._per_minute})"
        shared = int(self._per_minute * _STARTS) - sent
        return max(shared, int(self._per_minute * _OWN_PART) - own, 0), reason

    def _registrations(self) -> int:
        """RPCs of registrations in the last minute; of those of a user, no more than his part counts."""
        users = Counter[int]()
        for each in self._recent():
            if each.user is not None:
                users[each.user] += each.rpcs
        return sum(min(rpcs, int(self._per_minute * _OF_USER)) for rpcs in users.values())

    def _last_minute(self, counts: Callable[[_Sent], bool] | None = None) -> int:
        return sum(sent.rpcs for sent in self._recent() if counts is None or counts(sent))

    def _recent(self) -> deque[_Sent]:
        """What was sent in the last minute; what is older is forgotten."""
        now = self._timer()
        while self._sent and now - self._sent[0].at >= _SPAN_SECONDS:
            self._sent.popleft()
        return self._sent


def is_overloaded(said: str) -> bool:
    """Whether a command's complaint says that slurmctld has too much to do or limits the rate of RPCs."""
    return _OVERLOADED.search(said) is not None
