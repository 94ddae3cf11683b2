"""Rate of RPCs to slurmctld: how many commands send, what may be sent now, and the pause after an overload."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from dl2d.core.errors import Waiting
from dl2d.core.guard_state import doubled
from dl2d.core.resource_manager import CallStatistics, StartAllowance

log = structlog.get_logger(__name__)

#: Maximum number of RPCs that a command sends, as `sdiag` shows it; scancel sends one more for each job.
_RPCS: Final = {"squeue": 3, "sinfo": 2, "scontrol": 2, "sbatch": 1, "scancel": 2} | dict.fromkeys(
    ("slurmrestd job/submit", "slurmrestd jobs", "slurmrestd ping"), 1
)
_LISTING_RPCS: Final = _RPCS["squeue"] + _RPCS["sinfo"]
#: Parts of the maximum: starts and registrations are sent while fewer RPCs than this were sent in the last minute.
_STARTS, _REGISTRATIONS = 1 / 2, 2 / 3
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


class RpcRate:
    """Counts RPCs to slurmctld and limits those that can wait. Thread-safe.

    Without the RPCs that cancel jobs, which never wait, no more than ``per_minute`` are sent in any minute: starts wait
    while half of that were sent in the last one, registrations while two thirds were, and listings have a third of
    their own. While slurmctld is overloaded all of them wait, 5 s at first, then twice as long each time up to 60 s.

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
        #: When RPCs were sent in the last minute, and how many.
        self._sent: deque[tuple[float, int]] = deque()
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
            self._sent.append((now, rpcs))
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
            return StartAllowance(*self._left(_STARTS))

    def register(self) -> None:
        """Raise ``Waiting`` where no job can be authenticated now."""
        with self._lock:
            left, reason = self._left(_REGISTRATIONS)
        if not left:
            raise Waiting(reason)

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

    def _left(self, part: float) -> tuple[int, str]:
        """How many RPCs may be sent by those who may use a part of the maximum, and why not more."""
        if reason := self._pause():
            return 0, reason
        sent = self._last_minute()
        reason = f"{sent} RPCs were sent to slurmctld in the last minute (rpcs_per_minute={self._per_minute})"
        return max(int(self._per_minute * part) - sent, 0), reason

    def _last_minute(self) -> int:
        now = self._timer()
        while self._sent and now - self._sent[0][0] >= _SPAN_SECONDS:
            self._sent.popleft()
        return sum(rpcs for _, rpcs in self._sent)


def is_overloaded(said: str) -> bool:
    """Whether a command's complaint says that slurmctld has too much to do or limits the rate of RPCs."""
    return _OVERLOADED.search(said) is not None
