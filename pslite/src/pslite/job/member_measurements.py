"""Measurements that members of a job report: resources used, times of steps, throughput."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

#: so many steps are looked at in one report; a faster loop is judged by its last ones
MAX_STEPS = 4096


class GpuUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device of a task; others may use it too."""

    name: str
    #: share of the driver's last period in which something ran on it
    percent: float
    memory_bytes: int
    memory_total: int


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class StepTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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


class Throughput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
