"""Measurements that members of a job report: resources used, times of steps, throughput."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from pslite.job.message_base_class import WireRecord

#: so many steps are looked at in one report; a faster loop is judged by its last ones
MAX_STEPS = 4096


class GpuUsage(WireRecord, kw_only=True):
    """One device of a task; others may use it too."""

    name: str
    #: share of the driver's last period in which something ran on it
    percent: float
    memory_bytes: int
    memory_total: int


class Usage(WireRecord, kw_only=True):
    """What the processes of a task, with all their descendants, use."""

    #: the time to which `cpu_percent` applies: since the report before, or of the whole life of the task
    seconds: float
    #: user and system time since the task began
    cpu_seconds: float
    #: 100 is one core
    cpu_percent: float
    #: resident; what processes share is counted once
    memory_bytes: int
    #: the most that was seen
    memory_peak: int
    processes: int
    gpus: tuple[GpuUsage, ...] = ()


class StepTimes(WireRecord, kw_only=True):
    """How long a worker's steps took since its report before, from the end of one to the end of the next."""

    steps: int
    mean_ms: float
    p95_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> StepTimes | None:
        """Sum up steps; None where there are none."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        # nearest rank: a time that a step really took
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return cls(steps=len(ordered), mean_ms=1e3 * statistics.fmean(ordered), p95_ms=1e3 * p95)


class ResizeSteps(WireRecord, kw_only=True):
    """How long a worker's steps took around a resize, from the end of one to the end of the next."""

    plan: int
    #: the longest one that ended after the resize was begun, up to the first one that ended after it was done
    longest_ms: float
    #: the median of those before
    median_ms: float


class StepTimer:
    """Takes the times of a worker's steps; not safe for several threads."""

    def __init__(self) -> None:
        self._last = 0.0
        #: times at which steps have ended, and how long they took
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)
        #: how many of them, the last ones, `take` has not returned yet
        self._new = 0
        #: when the plan was prepared around which times are to be reported; 0: there is none
        self._resize_began = 0.0
        #: number of that plan once it is done; 0 before
        self._plan_done = 0

    def step_ended(self, now: float) -> ResizeSteps | None:
        """Note the end of a step; return what is to be reported of a resize that is done, or None."""
        if self._last:
            self._ended.append((now, now - self._last))
            self._new += 1
        self._last = now
        return self._around_resize() if self._plan_done else None

    def resize_began(self, now: float) -> None:
        """Note that a plan is prepared."""
        self._resize_began = self._resize_began or now

    def resize_done(self, plan: int) -> None:
        """Note that all members have moved to a plan."""
        self._plan_done = plan

    def take(self) -> StepTimes | None:
        """Return the times of the steps that have ended since the last time; None where there are none."""
        steps = [seconds for _, seconds in itertools.islice(reversed(self._ended), self._new)]
        self._new = 0
        return StepTimes.of(steps)

    def _around_resize(self) -> ResizeSteps | None:
        plan, began = self._plan_done, self._resize_began
        self._plan_done, self._resize_began = 0, 0.0
        before = [seconds for end, seconds in self._ended if end <= began]
        since = [seconds for end, seconds in self._ended if end > began]
        if not began or not before or not since:
            return None
        return ResizeSteps(plan=plan, longest_ms=1e3 * max(since), median_ms=1e3 * statistics.median(before))


class Throughput(WireRecord, kw_only=True):
    """Work done: by a worker, logical shards computed; by a server, bytes of weights updated."""

    seconds: float
    amount: int


class ThroughputMeter:
    """Adds up work until it is taken, perhaps by another thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since = 0.0
        self._seconds = 0.0
        self._amount = 0

    def begin(self) -> None:
        """Be busy from now on."""
        self._since = self._clock()

    def end(self) -> None:
        """Be busy no longer."""
        if self._since:
            with self._lock:
                self._seconds += self._clock() - self._since
            self._since = 0.0

    def add(self, amount: int) -> None:
        """So much has been done."""
        with self._lock:
            self._amount += amount

    def take(self) -> Throughput | None:
        """Return the work since the last time; None if nothing was done."""
        with self._lock:
            if not self._amount:
                return None  # time spent on it is told with it
            pace = Throughput(seconds=self._seconds, amount=self._amount)
            self._seconds, self._amount = 0.0, 0
        return pace


def in_words(usage: Usage) -> str:
    """Say in a line what a task has used."""
    parts = [f"{usage.cpu_seconds:.1f} s of CPU time", f"at most {size_in_words(usage.memory_peak)} of memory"]
    parts += [f"{gpu.name}: {gpu.percent:.0f} %, {size_in_words(gpu.memory_bytes)}" for gpu in usage.gpus]
    return ", ".join(parts)


def size_in_words(count: float) -> str:
    """Say how many bytes, in three digits or so."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"
