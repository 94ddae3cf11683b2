"""Monitor of a task's processes: processor time, memory and GPUs, read from /proc and the GPU driver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from pslite.job.step_time_and_usage_statistics import Usage
from pslite.launch.gpus import Gpus

#: share of a core that sampling may take: the next sample is delayed accordingly
MAX_SHARE = 0.001


@dataclass(eq=False)
class ProcessMonitor:
    """Samples the resources that a process and its descendants use."""

    pid: int
    #: the shortest time between two samples, in seconds
    interval: float
    #: its devices, if any
    gpus: Gpus | None = None
    #: seconds, of the day and of this thread's processor time
    clock: Callable[[], float] = time.monotonic
    busy: Callable[[], float] = time.thread_time
    peak: int = 0
    _cpu: float = 0.0

    def __post_init__(self) -> None:
        self._before = self.clock()
        #: seconds until the next sample
        self.pause = self.interval

    def sample(self) -> Usage | None:
        """Return what the task uses now; None if its process has ended."""
        began, now = self.busy(), self.clock()
        cpu, private, shared, count = 0.0, 0, 0, 0
        for process in family(self.pid):
            try:
                with process.oneshot():
                    times, memory = process.cpu_times(), process.memory_info()
            except psutil.Error:
                continue  # it has ended meanwhile; its parent has its time
            # of children that have ended, and been waited for, too
            cpu += sum(times[:4])
            private += memory.rss - memory.shared
            shared = max(shared, memory.shared)
            count += 1
        if not count or not private + shared:
            return None  # gone, or dead and not waited for yet
        memory_bytes = private + shared
        self.peak = max(self.peak, memory_bytes)
        # time of processes that nobody waited for is lost; it never goes back
        cpu = max(cpu, self._cpu)
        seconds = max(now - self._before, 1e-6)
        usage = Usage(
            seconds=seconds,
            cpu_seconds=cpu,
            cpu_percent=100 * (cpu - self._cpu) / seconds,
            memory_bytes=memory_bytes,
            memory_peak=self.peak,
            processes=count,
            gpus=self.gpus.sample() if self.gpus is not None else (),
        )
        self._before, self._cpu = now, cpu
        self.pause = max(self.interval, (self.busy() - began) / MAX_SHARE)
        return usage


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, by the kernel's own lists where it keeps them (Linux, proc(5))."""
    try:
        process = psutil.Process(pid)
        if not Path(f"/proc/{pid}/task/{pid}/children").exists():
            return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
    found, waiting = [process], [pid]
    while waiting:
        for child in _children(waiting.pop()):
            try:
                found.append(psutil.Process(child))
            except psutil.Error:
                continue
            waiting.append(child)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text(encoding="ascii").split())
    except OSError:
        pass
    return found
