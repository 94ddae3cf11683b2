"""Store in memory, for simulation: jobs, live tasks, measured speeds and losses."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from msgspec import structs

from dl2d.core.cluster import Task, TaskState, in_submit_order
from dl2d.core.errors import DuplicateJob, StoreError
from dl2d.core.jobs import Allocation, Job, JobKey, Progress, Role
from dl2d.core.measured_speeds_and_losses import (
    MAX_MEASUREMENTS,
    JobSpeeds,
    LossCurve,
    LossPoint,
    MeasuredLoss,
    MeasuredSpeeds,
    Tally,
    TrainingKind,
    count,
    mean_point,
)
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resize_guard_state import GuardState
from dl2d.core.store import JobChange, Slot, TaskChange, TaskReport


class MemoryStore:
    """Implements ``TickStore``; a whole store in memory is ``SqlStore("sqlite://")``.

    Ended tasks are forgotten, so that the memory does not grow with simulated time. Each report of progress counts,
    however close to the one before. Tasks are listed in the order in which they were asked for.
    """

    def __init__(self) -> None:
        self._jobs: dict[JobKey, Job] = {}
        self._live: dict[JobKey, Job] = {}
        #: Ended jobs, in the order in which they ended.
        self._ended: dict[JobKey, Job] = {}
        #: Whether jobs came in submit order, so that they need not be sorted.
        self._ordered = True
        self._tasks: dict[tuple[JobKey, str], Task] = {}
        self._speeds: dict[TrainingKind, dict[Allocation, Tally]] = defaultdict(dict)
        #: By live job: the size at which it is quarantined; times and speeds that it reported.
        self._quarantined: dict[JobKey, Allocation] = {}
        self._own: dict[JobKey, dict[Allocation, deque[tuple[float, float]]]] = defaultdict(dict)
        self._losses: dict[JobKey, LossCurve] = {}
        self._numbers = Counter[tuple[JobKey, Role]]()
        self._last_slot = 0
        self._guard_state = GuardState()
        #: By canary: whether each job is in its group.
        self._canary_groups: dict[int, dict[JobKey, bool]] = defaultdict(dict)

    def add_job(self, job: Job) -> None:
        """Keep a new job."""
        if job.key in self._jobs:
            raise DuplicateJob(f"job {job.key.slug} is known already")
        last = next(reversed(self._jobs.values()), None)
        self._ordered = self._ordered and (last is None or in_submit_order([last, job])[0] is last)
        self._jobs[job.key] = job
        if not job.state.ended:
            self._live[job.key] = job

    def job(self, key: JobKey) -> Job | None:
        """The job, ended or not."""
        return self._jobs.get(key)

    def known_jobs(self, keys: Collection[JobKey]) -> frozenset[JobKey]:
        """Those of these jobs that it has."""
        return frozenset(keys) & self._jobs.keys()

    def jobs(self, *, live: bool, limit: int | None = None) -> tuple[Job, ...]:
        """Live jobs, or the newest of all."""
        found = list(self._live.values()) if live else [*islice(reversed(self._jobs.values()), limit)][::-1]
        return tuple(found) if self._ordered else in_submit_order(found)

    def last_ended(self, limit: int) -> tuple[Job, ...]:
        """The elastic jobs that ended last, at most ``limit`` of them; the one that ended last comes first."""
        return tuple(islice((job for job in reversed(self._ended.values()) if not job.static), limit))

    def change_job(self, key: JobKey, change: JobChange, at: float) -> Job:
        """See ``TickStore.change_job``."""
        job = change.applied(self._known(key), at)
        self._keep(job)
        return job

    def report_progress(self, key: JobKey, progress: Progress, tasks: Sequence[TaskReport] = ()) -> None:
        """Set the job's progress, and count its speed and loss; reports of tasks are not kept."""
        del tasks
        job = self._known(key)
        progress = progress.finite()
        self._keep(replace(job, progress=progress))
        speed, size = progress.samples_per_second, Allocation(progress.workers, progress.ps)
        if speed is not None and size.workers:
            self._own[key].setdefault(size, deque(maxlen=MAX_MEASUREMENTS)).append((progress.at, speed))
        if speed and size.workers:
            sizes = self._speeds[TrainingKind.of(job.request)]
            counted = count(
                sizes.get(size), size, speed, job=key.slug, at=progress.at, quarantined=self._quarantined.get(key)
            )
            if counted.tally is not None:
                sizes[size] = counted.tally
            if counted.quarantined is not None:
                self._quarantined[key] = counted.quarantined
            else:
                self._quarantined.pop(key, None)
            if counted.mislabelled is not None:
                left = {size: tally.without(counted.mislabelled) for size, tally in sizes.items()}
                sizes.clear()
                sizes.update((size, tally) for size, tally in left.items() if tally is not None)
        if progress.loss is not None:
            curve = self._losses.get(key, LossCurve())
            self._losses[key] = curve.added(LossPoint(progress.epoch, progress.loss))

    def speeds(self, kinds: Collection[TrainingKind], *, others: int = 0) -> tuple[MeasuredSpeeds, ...]:
        """What was measured of these kinds so far, and of some others."""
        rest = sorted(
            (-max(tally.point.last_measured for tally in sizes.values()), kind)
            for kind, sizes in self._speeds.items()
            if others and sizes and kind not in kinds
        )
        return tuple(
            MeasuredSpeeds(kind, tuple(tally.point for _, tally in sorted(self._speeds[kind].items())))
            for kind in sorted({*kinds, *(kind for _, kind in rest[:others])})
            if self._speeds.get(kind)
        )

    def job_speeds(self, jobs: Collection[JobKey]) -> tuple[JobSpeeds, ...]:
        """What each of these jobs showed by itself."""
        return tuple(
            JobSpeeds(
                key, tuple(mean_point(size, measurements) for size, measurements in sorted(self._own[key].items()))
            )
            for key in sorted(jobs)
            if key in self._own
        )

    def losses(self, jobs: Collection[JobKey]) -> tuple[MeasuredLoss, ...]:
        """How the losses of these jobs fell."""
        return tuple(MeasuredLoss(key, self._losses[key].thinned()) for key in sorted(jobs) if key in self._losses)

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        """Keep new tasks, numbered on from the job's last of that role."""
        tasks = []
        for start in starts:
            self._known(start.job)
            number = self._numbers[start.job, start.role]
            self._numbers[start.job, start.role] += 1
            task = start.task(number, at)
            self._tasks[task.job, task.id] = task
            tasks.append(task)
        return tuple(tasks)

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        """Tasks that have not ended; ended ones are forgotten. In the order in which they were asked for."""
        del live
        if job is None:
            return tuple(self._tasks.values())
        return tuple(task for task in self._tasks.values() if task.job == job)

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        """Move tasks forward; see the contract."""
        moved = []
        for change in changes:
            key = change.job, change.task
            task = self._tasks.get(key)
            if task is None:
                continue
            after = change.applied(task, at)
            if after.state is not task.state:
                moved.append(after)
            if after.state.ended:
                del self._tasks[key]
            else:
                self._tasks[key] = after
        return tuple(moved)

    def confirm_tasks(self, at: float) -> tuple[Task, ...]:
        """Have all tasks that are wanted take part; returns those that are to leave."""
        leaving = []
        for place, task in self._tasks.items():
            if not task.state.wanted:
                leaving.append(task)
            elif task.state is not TaskState.CONFIRMED:
                self._tasks[place] = structs.replace(task, state=TaskState.CONFIRMED, since=at)
        return tuple(leaving)

    def forget_tasks(self, tasks: Iterable[Task]) -> None:
        """Drop tasks that have ended, without a word about how."""
        for task in tasks:
            self._tasks.pop((task.job, task.id), None)

    def record_slot(self, slot: Slot) -> None:
        """Keep the slot's number alone. Raises ``StoreError`` if a job is not known."""
        for decided in slot.decision.jobs:
            self._known(decided.job)
        self._last_slot = slot.number

    def last_slot_number(self) -> int:
        """Number of the newest slot; 0 if there is none."""
        return self._last_slot

    def assign_canary(self, canary: int, groups: Mapping[JobKey, bool]) -> frozenset[JobKey]:
        """See ``TickStore.assign_canary``."""
        known = self._canary_groups[canary]
        for key in groups:
            known.setdefault(self._known(key).key, groups[key])
        return frozenset(key for key in groups if known[key])

    def check_lease(self) -> None:
        """Nobody else can take it."""

    def keep_guard_state(self, guard_state: GuardState) -> None:
        """Replace the guard's state."""
        self._guard_state = guard_state

    def guard_state(self) -> GuardState:
        """The guard's state as it was kept last; empty if it never was."""
        return self._guard_state

    def _known(self, key: JobKey) -> Job:
        job = self._jobs.get(key)
        if job is None:
            raise StoreError(f"there is no job {key.slug}")
        return job

    def _keep(self, job: Job) -> None:
        self._jobs[job.key] = job
        if job.state.ended:
            self._ended[job.key] = job
            self._live.pop(job.key, None)
            self._losses.pop(job.key, None)
            self._own.pop(job.key, None)
            self._quarantined.pop(job.key, None)
        else:
            self._live[job.key] = job
