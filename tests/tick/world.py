"""A cluster in memory with virtual time, on which whole ticks are run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from migrated import sqlite_store
from tick.fake_coordinator import PromptCoordinator
from tick.scripted_manager import ScriptedManager

from dl2d.core.cluster import Node, Snapshot, Task, TaskState
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import ResourceManagerError
from dl2d.core.jobs import Allocation, Job, JobKey, Role
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Policy
from dl2d.core.resource_manager import RmJob, StartAllowance
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.store.sql_store import SqlStore
from dl2d.testing import MemoryStore, make_job, make_nodes
from dl2d.tick.record_slot import Report
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Context, Deciders, GuardRules, LastHeartbeat, Timeouts
from dl2d.tick.tick_state import TickState


class GivesNothing:
    """A policy that never gives a job anything, however much room there is."""

    name = "nothing"
    version = "1"
    needs = NO_EVIDENCE

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        del packing, rng
        reason, held = Reason(Constraint.SATISFIED, "is content"), snapshot.held()
        return Decision(
            self.name,
            self.version,
            tuple(JobDecision(job.key, held[job.key], reason, held[job.key]) for job in snapshot.jobs),
        )


class IgnoresLimits(Drf):
    """A policy that gives jobs more than their limits allow, so that the guard takes it away."""

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        del packing
        return super().decide(snapshot, Packing.for_decision(snapshot.nodes, snapshot.tasks, LoadBalance()), rng)


@dataclass
class World:
    """Everything a tick needs, and hands to make things happen between ticks."""

    cluster_nodes: list[Node] = field(default_factory=make_nodes)
    policy: Policy = field(default_factory=Drf)
    rules: GuardRules = field(default_factory=GuardRules)
    timeouts: Timeouts = field(default_factory=Timeouts)
    slot_seconds: float = 300.0
    #: Without one, ticks run on the simulator's store, which is several times as fast and forgets what has ended.
    url: str = "sqlite://"
    mode: Mode = Mode.LIVE
    idle_seconds: float = 300.0
    submit_seconds: float = math.inf
    start_allowance: Callable[[], StartAllowance] | None = None
    output: str = ""
    fallback: Policy = field(default_factory=Fifo)
    queues_tasks: bool = False

    def __post_init__(self) -> None:
        self.now = 1_000_000.0
        #: Monotonic clock, which a change of ``now`` by hand does not move.
        self.elapsed = 0.0
        self.manager = ScriptedManager(self.cluster_nodes, lambda: self.now)
        file = Path(self.url.removeprefix("sqlite:///"))
        if self.url.startswith("sqlite:///") and not file.exists():
            sqlite_store(file)
        self.store = SqlStore(self.url, progress_seconds=0) if self.url else MemoryStore()
        self.coordinator = PromptCoordinator(self.store, self.manager)
        self.state = TickState()
        self.number = 0
        #: Number of ticks in which changes of containers were allowed.
        self.allowed = 0
        #: What the resource manager knows of jobs that it does not list any more, or why it does not answer; and the
        #: handles that it was asked about.
        self.accounted: Sequence[RmJob] = ()
        self.no_accounting: ResourceManagerError | None = None
        self.asked_states: list[str] = []
        #: Tasks that have reached their coordinators and not joined yet; None where these do not say.
        self.starting: Collection[str] | None = None
        #: Jobs whose coordinators say that their training is done.
        self.ending: Collection[JobKey] = ()
        #: Jobs whose last heartbeats were the first after a gap.
        self.after_gap: Collection[JobKey] = ()

    def close(self) -> None:
        if self.url:
            self.store.close()

    def submit(self, **changes: object) -> JobKey:
        self.number += 1
        submitted = make_job(self.number, submitted=int(self.now), **changes)
        self.store.add_job(submitted)
        return submitted.key

    def ready(self, **changes: object) -> JobKey:
        """A job whose coordinator has called."""
        key = self.submit(**changes)
        self.tick(1.0)
        self.beat()
        return key

    def job(self, key: JobKey) -> Job:
        job = self.store.job(key)
        assert job is not None
        return job

    def tick(self, seconds: float = 10.0) -> Report:
        self.now += seconds
        self.elapsed += max(seconds, 0.0)
        self.state, report = tick(self.context(), self.state)
        return report

    def allow_changes(self) -> None:
        self.allowed += 1

    def final_states(self, handles: Collection[str]) -> Sequence[RmJob]:
        self.asked_states += sorted(handles)
        if self.no_accounting is not None:
            raise self.no_accounting
        return self.accounted

    def context(self) -> Context:
        return Context(
            cluster="test",
            manager=self.manager,
            store=self.store,
            deciders=Deciders(self.policy, self.fallback, LoadBalance()),
            task_specs=TaskSpecs("http://127.0.0.1:1", Credentials(b"k" * 32), daemon_uid=64),
            guard_rules=self.rules,
            timeouts=self.timeouts,
            slot_seconds=self.slot_seconds,
            seed=7,
            starts_anchors=True,
            mode=self.mode,
            scheduler="memory 1",
            idle_seconds=self.idle_seconds,
            submit_seconds=self.submit_seconds,
            start_allowance=self.start_allowance,
            output=self.output,
            queues_tasks=self.queues_tasks,
            grace_seconds=1.0,
            allow_changes=self.allow_changes,
            final_states=self.final_states,
            last_heartbeat=lambda job: LastHeartbeat(
                connected_tasks=self.starting, training_done=job in self.ending, after_gap=job in self.after_gap
            ),
            timer=lambda: self.elapsed,
        )

    def beat(self, *keys: JobKey, **said: object) -> None:
        for key in keys or [job.key for job in self.store.jobs(live=True)]:
            self.coordinator.beat(key, self.now, **said)  # type: ignore[arg-type]

    def settle(self, ticks: int = 6, seconds: float = 1.0) -> None:
        """Ticks and heartbeats in turn, until what was decided is what runs."""
        for _ in range(ticks):
            self.tick(seconds)
            self.beat()

    def settled(self, **changes: object) -> JobKey:
        """A job that has what it gets."""
        key = self.submit(**changes)
        self.settle()
        return key

    def tasks(self, key: JobKey | None = None) -> tuple[Task, ...]:
        """Live tasks."""
        return self.store.tasks(live=True, job=key)

    def nodes_of(self, key: JobKey | None = None) -> set[str]:
        return {task.node for task in self.tasks(key)}

    def has(self, key: JobKey, *, state: TaskState = TaskState.CONFIRMED) -> Allocation:
        tasks = [task for task in self.tasks(key) if task.state is state]
        return Allocation(*(sum(task.role is role for task in tasks) for role in (Role.WORKER, Role.PS)))
