"""Replay check: whether a policy that was just trained starts and ends all jobs in replays, before it is kept.

The start check (``policy_starts_jobs_check``) looks at two intervals. Here jobs train, end and make room:
replayed are the days that a site recorded and a small load, generated from requests of its jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dl2d.core.cluster import Node
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import Architecture, JobRequest
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds, TrainingKind
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Count, uncounted
from dl2d.learning.site_records.digital_twin import Speeds, workload_of
from dl2d.learning.site_records.recorded_days import Day, DayJob
from dl2d.simulation.replay import IdleCluster, Rules, replay
from dl2d.simulation.workload.workload_file import Workload
from dl2d.throughput.gaussian_process import GaussianProcess
from dl2d.throughput.training_data import by_kind
from dl2d.tick.tick_context import GuardRules

#: Jobs of the generated load, the intervals in which they come, and how many intervals one takes at most at its minimum
#: size.
_JOBS = 30
_SLOTS = 20
_MAX_LENGTH = 6.0
#: Intervals after which a replay is given up.
_MAX_SLOTS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCheck:
    """Result of a replay check."""

    #: Why the policy must not be kept, in words that follow its name; empty if it may.
    problem: str
    #: Number of jobs that ended in the replays, and of all that were to be replayed: fewer where time was up.
    ended: int
    jobs: int
    #: The workloads that were not replayed to their ends since time was up.
    cut_short: tuple[str, ...] = ()

    @property
    def as_json(self) -> dict[str, int]:
        """For ``--json``."""
        return {"jobs": self.jobs, "ended": self.ended}


def generated_load(
    requests: Sequence[JobRequest], nodes: Sequence[Node], speeds: Sequence[MeasuredSpeeds], slot_seconds: float
) -> Workload | None:
    """A small load of jobs with these requests, in turn, on the nodes that take tasks; None if there are none.

    ``speeds`` are those that were measured; of other kinds the throughput model's are taken.
    """
    resources = tuple(node.capacity for node in nodes if node.is_open)
    if not requests or not resources:
        return None
    rng = np.random.default_rng(0)
    tables = Speeds(GaussianProcess(by_kind(speeds)), requests).means()
    jobs = []
    for number in range(_JOBS):
        request = requests[number % len(requests)]
        size = request.min_size
        ps = max(size.ps, 1) if request.architecture is Architecture.PS else 0
        speed = tables[TrainingKind.of(request)].samples_per_second(size.workers, ps)
        epochs = rng.uniform(1.0, _MAX_LENGTH) * slot_seconds * speed / request.epoch_samples
        if epochs > 0:  # else the size was seen to fail
            jobs.append(DayJob(request, rng.uniform(0.0, _SLOTS) * slot_seconds, epochs, epochs))
    return workload_of(Day(name="generated", begin=0.0, jobs=tuple(jobs), nodes=resources), tables, slot_seconds)


def replay_check(
    policy: Policy,
    placement: Placement,
    workloads: Mapping[str, Workload],
    guard: GuardRules,
    *,
    clock: Callable[[], float],
    most_seconds: float,
    progress: Count = uncounted,
) -> ReplayCheck:
    """Replay a policy on workloads, whose names follow "in a replay of", until something is wrong or time is up.

    Wrong is a decision that fails, and jobs that are left waiting or tasks that are moved about without end. ``clock``
    gives seconds on a monotonic clock; ``progress`` is told how many of how many jobs have ended.
    """
    rules = Rules(most_slots=_MAX_SLOTS, guard=guard, floors=True)
    total, before, ended = sum(len(workload.jobs) for workload in workloads.values()), 0, 0
    until = clock() + most_seconds

    def show(done: int, _: int) -> None:
        nonlocal ended
        ended = before + done
        progress(ended, total)
        if clock() > until:
            raise _TimeUp

    def found(problem: str = "", cut_short: Sequence[str] = ()) -> ReplayCheck:
        return ReplayCheck(problem=problem, ended=ended, jobs=total, cut_short=tuple(cut_short))

    for number, (name, workload) in enumerate(workloads.items()):
        try:
            done = replay(workload, policy, placement, rules=rules, timer=clock, progress=show)
        except _TimeUp:
            return found(cut_short=list(workloads)[number:])
        except IdleCluster as error:
            count, jobs = error.waiting, len(workload.jobs)
            return found(f"leaves {count} of {jobs} jobs waiting on an idle cluster in a replay of {name}")
        except Dl2dError as error:
            return found(f"fails in a replay of {name}: {error}")
        if done.failure:
            return found(f"fails in a replay of {name}: {done.failure}")
        before = ended
    return found()


class _TimeUp(Exception):
    """The replays have taken as long as they may."""
