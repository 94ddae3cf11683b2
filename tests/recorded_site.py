"""A store in which a site's days are recorded: a workload, replayed under a policy, as a daemon would have kept it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Job, JobKey, JobState, Progress
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.plan_of_starts_and_stops import Outcome, Plan
from dl2d.core.policy import Policy
from dl2d.core.resources import NO_RESOURCES
from dl2d.core.store import JobChange, Slot
from dl2d.learning.site_records.recorded_days import DAY_SECONDS
from dl2d.placement.load_balance import LoadBalance
from dl2d.simulation.replay import replay
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import load_source
from dl2d.store import schema_version
from dl2d.store.sql_store import SqlStore

#: A Monday, 0:00 UTC, some weeks ago.
MONDAY = 1_760_313_600.0
SITE = "generator:poisson?nodes=2&jobs=150&rate=0.5&stretch=8&median_seconds=9000&most_gpus=4"
#: Six busy days of a small site: the gate needs at least three that training did not see.
BUSY_DAYS = "generator:poisson?nodes=1&jobs=140&rate=0.5&stretch=8&median_seconds=3000&most_gpus=4&slot_seconds=1200"
#: Six quiet days of a node: a job that gets its minimum size alone leaves most of it idle.
QUIET_DAYS = "generator:poisson?nodes=1&jobs=70&rate=0.16&median_seconds=3000&most_gpus=4&slot_seconds=1200"


def a_site(seed: int = 3) -> Workload:
    """Some five days of a small site, in slots of 20 minutes."""
    return load_source(SITE, seed=seed).workload


class Listening:
    """A policy, and all that it was shown."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.version, self.needs = policy.name, policy.version, policy.needs
        self.heard: list[tuple[Snapshot, Decision]] = []

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        decision = self._policy.decide(snapshot, packing, rng)
        self.heard.append((snapshot, decision))
        return decision


def record(
    url: str, workload: Workload, policy: Policy, *, begin: float = MONDAY, decided_by: str | None = None,
    reports: bool = True, first_slot: int = 1,
) -> None:  # fmt: skip
    """Replay a workload and keep it in a store: jobs, their progress slot by slot, and the slots from a number on.

    ``decided_by`` is the name of the policy that is recorded, if not that of ``policy``; where it is ``observed``, dl2
    would have decided the same in mode shadow. Without ``reports`` the jobs are static ones of which nothing is known
    but how long they ran, and at which size.
    """
    listening = Listening(policy)
    ended = {
        job.id: (job.last_slot + job.fraction) * workload.slot_seconds
        for job in replay(workload, listening, LoadBalance(), timer=time.perf_counter).jobs
    }
    real = {job.id: job.epochs for job in workload.jobs}

    def moved(key: JobKey) -> JobKey:
        return JobKey("site", key.id, int(begin) + key.submitted)

    if first_slot == 1:  # a store that is there may be open, and would lose its locks
        schema_version.upgrade(url)
    with closing(SqlStore(url, progress_seconds=0)) as store:
        known: dict[JobKey, Job] = {}
        idle = _idle(*listening.heard[-1], until=time.time() - begin)
        for number, (snapshot, decision) in enumerate([*listening.heard, *idle], start=first_slot):
            for job in snapshot.jobs:
                key = moved(job.key)
                if key not in known:
                    known[key] = replace(job, key=key) if reports else _silent(replace(job, key=key))
                    store.add_job(replace(known[key], progress=type(job.progress)()))
                    if reports:
                        store.change_job(key, JobChange(state=JobState.RUNNING), begin + snapshot.at)
                if reports and job.progress.at:
                    store.report_progress(key, replace(job.progress, at=begin + job.progress.at))
            if not reports:
                for entry in decision.jobs:
                    key = moved(entry.job)
                    if entry.allocation != NOTHING and known[key].started_at is None:
                        known[key] = store.change_job(key, JobChange(state=JobState.RUNNING), begin + snapshot.at)
                        workers, ps = entry.allocation
                        store.report_progress(key, Progress(at=begin + snapshot.at, workers=workers, ps=ps))
            seen = _shifted(snapshot, begin, moved)
            if not reports:
                shown = (replace(known[job.key], progress=known[job.key].progress_at(seen.at)) for job in seen.jobs)
                seen = structs.replace(seen, jobs=tuple(shown))
            store.record_slot(
                Slot(
                    number=number, at=seen.at, snapshot=seen, proposed=_renamed(decision, moved, decided_by),
                    decision=_renamed(decision, moved, decided_by), plan=Plan(), outcome=Outcome(), inputs_hash="",
                    seed=0, seconds=0.1,
                    shadow=_renamed(decision, moved, "dl2") if decided_by == "observed" else None,
                )
            )  # fmt: skip
        for key in known:
            last = max(store.series(key), key=lambda one: one.at, default=None)
            at = begin + ended[key.id]
            if reports and last is not None:
                store.report_progress(key, replace(last, at=at, epoch=real[key.id]))
            store.change_job(key, JobChange(state=JobState.FINISHED, end_reason="did all epochs"), at)


def _idle(snapshot: Snapshot, decision: Decision, *, until: float) -> list[tuple[Snapshot, Decision]]:
    """Slots without jobs, one an hour, from the last one with jobs until its day is over, but not after ``until``."""
    midnight = (snapshot.at // DAY_SECONDS + 1) * DAY_SECONDS
    times = np.arange(snapshot.at + 3600.0, min(midnight, until), 3600.0).tolist()
    nothing = Decision(decision.policy, decision.policy_version, (), decision.measure)
    # No job of others is recorded.
    nodes = tuple(msgspec.structs.replace(node, used=NO_RESOURCES) for node in snapshot.nodes)
    return [(structs.replace(snapshot, at=at, nodes=nodes, jobs=(), tasks=()), nothing) for at in times]


def _silent(job: Job) -> Job:
    """The job as one of fixed size that declares and reports nothing."""
    hours = replace(job.request, epochs=48.0, samples_per_epoch=None, steps_per_epoch=3600.0, batch=None)
    return replace(job, request=hours, progress=type(job.progress)(), started_at=None, address="", static=True)


def _shifted(snapshot: Snapshot, begin: float, moved: Callable[[JobKey], JobKey]) -> Snapshot:
    return structs.replace(
        snapshot,
        at=begin + snapshot.at,
        jobs=tuple(replace(job, key=moved(job.key)) for job in snapshot.jobs),
        tasks=tuple(msgspec.structs.replace(task, job=moved(task.job)) for task in snapshot.tasks),
        speeds=(),
    )


def _renamed(decision: Decision, moved: Callable[[JobKey], JobKey], policy: str | None) -> Any:
    jobs = tuple(replace(entry, job=moved(entry.job), alternatives=()) for entry in decision.jobs)
    actions = tuple((moved(key), step) for key, step in decision.actions)
    return Decision(policy or decision.policy, decision.policy_version, jobs, decision.measure, actions)
