"""A worker's progress, and what it reports of its training: progress, times of steps, throughput, suspensions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from pslite.job.step_time_and_usage_statistics import ResizeSteps, StepTimer, ThroughputMeter
from pslite.net.messages import Beat, Drained, Finished, Message, Pushed
from pslite.worker.training_session import Stopwatch


class Progress:
    """Versions of a worker's weights; of the sums of gradients, where the workers update.

    Workers on parameter servers receive a version block by block; all-reduce workers use `version` and `entered` alone.
    """

    def __init__(self) -> None:
        #: completed updates
        self.version = 0
        #: whether the script computes: it does not wait for others
        self.computes = False
        #: whether it waits for something that can be done when the last version is there
        self.patient = False
        #: whether the first weights are here, so that a script that ends now leaves the job in its middle
        self.entered = False
        #: whether the job has begun with weights of this worker
        self.began = False
        #: the version whose blocks are awaited, and those of them that have not come
        self.awaited = -1
        self.missing: set[int] = set()
        #: whether they are awaited at any version: at the one that their server has
        self.any_version = False
        #: segments of which the first worker had a gradient in the last step
        self.first_worker_segments: set[int] = set()
        #: by block, version and plan of the weights that have come
        self.arrived: dict[int, tuple[int, int]] = {}

    def expect(self, version: int, blocks: int) -> None:
        """Wait for all blocks of a version."""
        self.missing, self.first_worker_segments = set(range(blocks)), set()
        self.awaited = version

    def expect_newest(self, blocks: int) -> None:
        """Wait for all blocks at whichever version servers have them."""
        self.missing, self.any_version, self.first_worker_segments = set(range(blocks)), True, set()

    def wants(self, block: int, version: int) -> bool:
        """Whether that version of a block is awaited."""
        return block in self.missing and (self.any_version or version == self.awaited)

    def may_leave_after(self, version: int) -> bool:
        """Whether nothing is to be done before the worker leaves an open job whose last version that is; -1: any."""
        return version < 0 or (self.awaited > version and not self.patient)

    def newest(self, block: int) -> int:
        """Return the version that is here of a block; -1 if there is none."""
        if block not in self.missing:
            return self.awaited
        if self.entered:
            return self.awaited - 1
        return self.awaited if self.began else -1

    def unanswered(self, blocks: Iterable[int]) -> list[int]:
        """Return those of some blocks of which there is no answer to this step's push."""
        return [block for block in blocks if self.newest(block) <= self.version]


#: the least time between two progress reports of a fast loop
_PROGRESS_SECONDS = 0.1


class ProgressReports:
    """Sums up what the script's thread does, and sends reports of it; `report` may be called by any thread.

    Parameters
    ----------
    progress
        the worker's.
    send
        takes messages for the coordinator.

    """

    def __init__(self, progress: Progress, send: Callable[[Message], None]) -> None:
        self._progress = progress
        self._send = send
        #: the work of the script's thread
        self.meter = ThroughputMeter()
        #: waiting for a new plan, and whether this worker was a member of the plan before
        self.suspension = Stopwatch()
        self.was_member = False
        self._lock = threading.Lock()
        self._steps = StepTimer()
        self._loss = 0.0
        self._samples = 0
        self._reported = 0.0

    def add_loss(self, loss: float, samples: int) -> None:
        """Add the sum of the losses of some samples."""
        with self._lock:
            self._loss += loss
            self._samples += samples

    def step_ended(self) -> None:
        """Note the end of a step."""
        with self._lock:
            resize = self._steps.step_ended(time.monotonic())
        self.report(resize=resize)

    def resize_began(self) -> None:
        """Note that a plan is prepared."""
        with self._lock:
            self._steps.resize_began(time.monotonic())

    def resize_done(self, plan: int) -> None:
        """Note that all members have moved to a plan."""
        with self._lock:
            self._steps.resize_done(plan)

    def report(self, *, force: bool = False, resize: ResizeSteps | None = None) -> None:
        """Report the version and the losses, unless that was done just before."""
        now = time.monotonic()
        if force or resize is not None or now - self._reported >= _PROGRESS_SECONDS:
            self._reported = now
            with self._lock:
                loss, samples, self._loss, self._samples = self._loss, self._samples, 0.0, 0
                steps = self._steps.take() if force else None
            pace = self.meter.take() if force else None
            version = self._progress.version
            self._send(Beat(version=version, loss=loss, samples=samples, steps=steps, pace=pace, resize=resize))

    def first_push(self, plan: int) -> None:
        """Report with the first push under a plan how long the worker has waited for it."""
        self._send(Pushed(plan=plan, suspension_ms=self.suspension.total_ms if self.was_member else None))

    def drained(self, plan: int) -> None:
        """Report that this worker has done its last step, as it is not in a plan."""
        self.report(force=True)
        self._send(Drained(plan=plan))

    def finished(self, *, chief: bool = False) -> None:
        """Report that this worker has the last version."""
        self._send(Finished(version=self._progress.version, chief=chief))
