"""Replay a workload in virtual time: the daemon's own tick on a simulated cluster, slot after slot.

A slot goes as in DL2's simulator (Peng et al., section 6.1 and the authors' code): jobs are admitted at its start, the
tick decides and places, every job that has a worker and (with parameter servers) a PS runs the whole slot, and a job
that ends inside its last slot counts the fraction that it used.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from dl2d.core.cluster import ANCHOR, NodeState, Task, task_tag
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Count, uncounted
from dl2d.core.resource_manager import RmJob, RmJobState
from dl2d.core.store import JobChange
from dl2d.simulation.in_memory_resource_manager import MemoryManager
from dl2d.simulation.in_memory_store import MemoryStore
from dl2d.simulation.realism import Effects, NodeEvent, Outages, Realism, reported_epoch, resized
from dl2d.simulation.result_time_series import SlotRecorder, SlotSeries
from dl2d.simulation.seeded_random import SeededRandom
from dl2d.simulation.workload.workload_file import SimulatedJob, Workload, to_request
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Context, Deciders, GuardRules, Timeouts
from dl2d.tick.tick_state import TickState

_CLUSTER = "simulated"
_OWNER = Owner("simulated", 0, 0)
_LAUNCH = Launch(("simulated",), "/")
#: Slots in which nobody trains though every job that waits has room; more, and no job ever starts.
_MAX_IDLE_SLOTS = 50
#: Ticks of one slot in which room that a shrinking job gives up is given on; more are a defect of a policy.
_MAX_TICKS = 20


class SimulationError(Dl2dError):
    """A simulation cannot go on."""


class IdleCluster(SimulationError):
    """The policy leaves all jobs waiting although the cluster is idle."""

    def __init__(self, message: str, waiting: int) -> None:
        super().__init__(message)
        #: Number of these jobs.
        self.waiting = waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a simulation departs from a real cluster."""

    #: Empty the cluster at the end of each slot and place everything anew, as the DL2 authors' simulator does.
    empty_each_slot: bool = False
    #: Costs, noise and failures; by default none.
    realism: Realism = field(default_factory=Realism)
    #: Slots after which a simulation is given up.
    most_slots: int = 100_000
    #: Limits of the site's guard; by default none.
    guard: GuardRules = field(default_factory=GuardRules)
    #: Whether a running job keeps its minimum size, as in the daemon; the papers let a policy take everything from it.
    floors: bool = False
    #: The daemon's time-outs. Simulated coordinators report at the end of each slot, and tasks start at once.
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """When a job ended, in slots."""

    id: str
    submit_slot: int
    #: Last slot it ran in, and which fraction of it.
    last_slot: int
    fraction: float
    #: Slots in which it had another size than in the slot before, its first start aside.
    resizes: int = 0

    @property
    def jct(self) -> float:
        """Completion time: last slot - submit slot + fraction of the last slot."""
        return self.last_slot - self.submit_slot + self.fraction

    @property
    def jct_plain(self) -> int:
        """Completion time in whole slots."""
        return self.last_slot - self.submit_slot + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a policy made of a workload. Times are in slots unless they say otherwise."""

    policy: str
    #: Those that ended.
    jobs: tuple[JobOutcome, ...]
    slots: int
    #: Milliseconds of each decision.
    decision_ms: tuple[float, ...] = field(repr=False)
    #: Decisions that the guard changed.
    guarded: int = 0
    #: Why the first of the policy's decisions that failed did; empty if none failed.
    failure: str = ""
    #: By resource, amount x time held over amount x time there was, from the first job's slot to the end of the last.
    utilisation: Mapping[str, float] = field(default_factory=dict)
    #: Slot by slot, where it was asked for.
    series: SlotSeries | None = field(default=None, repr=False)

    @property
    def resizes(self) -> int:
        """Changes of size of all jobs together (see ``JobOutcome.resizes``)."""
        return sum(job.resizes for job in self.jobs)

    @property
    def avg_jct(self) -> float:
        """Mean completion time."""
        return statistics.fmean(job.jct for job in self.jobs)

    @property
    def avg_jct_plain(self) -> float:
        """Mean completion time in whole slots."""
        return statistics.fmean(job.jct_plain for job in self.jobs)

    @property
    def decision_percentiles(self) -> tuple[float, float]:
        """Median and 99th percentile of ``decision_ms``; 0 without decisions."""
        p50, p99 = np.percentile(self.decision_ms or (0.0,), (50, 99)).tolist()
        return p50, p99

    @property
    def makespan(self) -> float:
        """When the last job ended, counted from slot 0."""
        return max(job.last_slot + job.fraction for job in self.jobs)


def replay(
    workload: Workload,
    policy: Policy,
    placement: Placement,
    *,
    rules: Rules | None = None,
    seed: int = 0,
    timer: Callable[[], float],
    progress: Count = uncounted,
    keep_series: bool = False,
    awaited: Collection[str] = (),
) -> Replayed:
    """Run a workload until the jobs with the ids ``awaited`` have ended, or all where none is named.

    ``keep_series`` asks for ``Replayed.series``.

    ``timer`` gives seconds on a monotonic clock, for the decisions' times alone: nothing else depends on real time, so
    equal arguments give equal results. ``progress`` is told how many of how many jobs have ended, after each slot.

    Raises
    ------
    SimulationError
        The awaited jobs do not all end within ``rules.most_slots``, the policy leaves all jobs waiting beside room for
        them, or its decision never comes to rest.
    """
    run = _Run(workload, policy, placement, rules or Rules(), seed, timer, SlotRecorder(keep=keep_series), awaited)
    while not run.done:
        run.slot()
        progress(len(run.outcomes), len(workload.jobs))
    return Replayed(
        policy=policy.name,
        jobs=tuple(run.outcomes[job.id] for job in workload.jobs if job.id in run.outcomes),
        slots=run.now,
        decision_ms=tuple(run.decision_ms),
        guarded=run.guarded,
        failure=run.failure,
        utilisation=run.recorder.utilisation(run.now),
        series=run.recorder.series,
    )


@dataclass(slots=True)
class _Live:
    """A job that was admitted and has not ended."""

    job: SimulatedJob
    epochs: float = 0.0
    #: What it held at the end of the slot before.
    tasks: list[Task] = field(default_factory=list)
    #: Whether it ever had tasks.
    started: bool = False


class _Run:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        placement: Placement,
        rules: Rules,
        seed: int,
        timer: Callable[[], float],
        recorder: SlotRecorder,
        awaited: Collection[str],
    ) -> None:
        self.workload = workload
        self.rules = rules
        self.now = 0
        self.outcomes: dict[str, JobOutcome] = {}
        self._awaited = set(awaited) or {job.id for job in workload.jobs}
        self.decision_ms: list[float] = []
        self.guarded = 0
        self.failure = ""
        self._timer = timer
        self._nodes = {node.name: node for node in workload.nodes()}
        self._manager = MemoryManager(self._nodes.values(), lambda: self._at, cluster=_CLUSTER, keep_ended=False)
        self._store = MemoryStore()
        self._coming = sorted(workload.jobs, key=lambda job: job.submit_slot)[::-1]
        self._running: dict[JobKey, _Live] = {}
        self.recorder = recorder
        realism, draws = rules.realism, SeededRandom(seed)
        self._effects = Effects(workload, realism, draws)
        self._outages = Outages(self._manager.nodes, realism, draws, workload.capacity_changes, workload.slot_seconds)
        self._resizes_cost = any(
            (realism.start_seconds, realism.join_seconds, realism.move_seconds_per_mb, realism.restart_seconds)
        )
        self._state = TickState()
        #: Jobs that wait beside room for them after the last tick; slots in a row in which nobody trains beside them.
        self._idle: tuple[JobKey, ...] = ()
        self._idle_slots = 0
        # A failure of the policy is a result here, not something to be papered over.
        deciders = Deciders(policy, policy, placement)
        self._context = Context(
            cluster=_CLUSTER,
            manager=self._manager,
            store=self._store,
            deciders=deciders,
            task_specs=TaskSpecs("http://simulated", Credentials(b"\0" * 32)),
            guard_rules=rules.guard,
            timeouts=rules.timeouts,
            slot_seconds=workload.slot_seconds,
            seed=seed,
            starts_anchors=False,
            grace_seconds=0.0,
            timer=timer,
        )

    @property
    def _at(self) -> float:
        """Virtual time at which the slot begins, seconds."""
        return self.now * self.workload.slot_seconds

    @property
    def done(self) -> bool:
        return not self._awaited

    def slot(self) -> None:
        """Admit, decide, run; then the next slot begins."""
        if self.now >= self.rules.most_slots:
            left = ", ".join(live.job.id for live in list(self._running.values())[:5])
            raise SimulationError(f"{len(self._running)} jobs have not ended after {self.now} slots: {left} ...")
        if not self._running and self._coming:
            self.now = max(self.now, self._coming[-1].submit_slot)  # nothing happens in empty slots
        for event in self._outages.until(self._at, inclusive=True):
            self._turn(event)
        self._admit()
        self._decide()
        self._give_up_if_idle()
        self._work()
        self.now += 1

    def _give_up_if_idle(self) -> None:
        """Raise ``IdleCluster`` where the policy has left all jobs waiting beside room for them for many slots."""
        self._idle_slots = self._idle_slots + 1 if self._idle and not self._store.tasks(live=True) else 0
        if self._idle_slots >= _MAX_IDLE_SLOTS:
            some = ", ".join(key.id for key in self._idle[:5]) + (" ..." if len(self._idle) > 5 else "")
            policy = self._context.deciders.policy
            raise IdleCluster(
                f"no job can start: for {self._idle_slots} slots policy {policy.name} (version {policy.version}) has "
                f"given nothing to {len(self._idle)} jobs ({some}) on an idle cluster that has room for them",
                len(self._idle),
            )

    def _admit(self) -> None:
        while self._coming and self._coming[-1].submit_slot <= self.now:
            job = self._effects.as_declared(self._coming.pop())
            key = JobKey(_CLUSTER, job.id, int(job.submit_slot * self.workload.slot_seconds))
            owner, anchor = job.owner or _OWNER, _anchor(key)
            self._manager.put(
                RmJob(
                    handle=anchor, state=RmJobState.RUNNING, tag=task_tag(key, ANCHOR), user=owner.user,
                    submitted=key.submitted,
                ),
                (),
            )  # fmt: skip
            # Without floors jobs stay "ready": a policy may take everything from them and give it back later.
            self._store.add_job(
                Job(
                    key=key, request=to_request(job, self.workload), owner=owner, launch=_LAUNCH,
                    state=JobState.READY, anchor=anchor, address="simulated",
                    progress=Progress(at=self._at),
                )
            )  # fmt: skip
            self._running[key] = _Live(job)

    def _decide(self) -> None:
        """Tick until what was decided is what runs: in a slot of minutes, seconds of starting do not count."""
        for _ in range(_MAX_TICKS):
            begin = self._timer()
            self._state, report = tick(self._context, self._state)
            if report.decided:
                self.decision_ms.append((self._timer() - begin) * 1e3)
                proposed, in_force = report.slot_decision.proposed, report.slot_decision.in_force
                self.guarded += proposed is not in_force and proposed.allocations() != in_force.allocations()
                self.failure = self.failure or in_force.fallback_cause
            self._release(self._store.confirm_tasks(self._at))  # started tasks take part, leaving ones are gone
            self._idle = report.needless_wait.jobs
            plan = report.plan
            if not plan.starts and not plan.stops:
                return
            if not plan.deferred and not plan.moves and not report.outcome.failures:
                return  # all that was decided is done: another tick would find nothing to do
        raise SimulationError(f"slot {self.now}: tasks are still being moved after {_MAX_TICKS} ticks")

    def _release(self, tasks: Sequence[Task]) -> None:
        self._manager.forget(task.handle for task in tasks)
        self._store.forget_tasks(tasks)

    def _work(self) -> None:
        """Have the jobs train for the slot, and nodes fail in it."""
        seconds = self.workload.slot_seconds
        begin, end = self._at, self._at + seconds
        nodes = self._manager.nodes
        tasks = self._store.tasks(live=True)
        held: dict[JobKey, list[Task]] = {key: [] for key in self._running}
        crowded: dict[str, set[str]] = defaultdict(set)
        for task in tasks:
            held[task.job].append(task)
            crowded[task.node].add(task.job.id)
        progress = {key: self._progress(live, held[key], crowded) for key, live in self._running.items()}
        sizes = {key: _size(own) for key, own in held.items()}
        for event in self._outages.until(end):
            self._turn(event)
            for key in [key for key, own in held.items() if any(task.node == event.node for task in own)]:
                held[key] = [task for task in held[key] if task.node != event.node]
                speed = self._effects.epochs_in_slot(self._running[key].job, self.now, held[key], crowded)
                standstill = self.rules.realism.failure_seconds / seconds
                progress[key].change((event.at - begin) / seconds, standstill, speed)
        trained = {key.id for key, within in progress.items() if within.trains}
        self.recorder.enter(self.now, nodes, {key.id: size for key, size in sizes.items()}, trained)
        ended: set[JobKey] = set()
        for key, within in progress.items():
            live = self._running[key]
            job = live.job
            reached = within.run(job.epochs - live.epochs)
            if reached.ended is not None:
                self.outcomes[job.id] = JobOutcome(
                    id=job.id, submit_slot=job.submit_slot, last_slot=self.now, fraction=reached.ended,
                    resizes=self.recorder.forget(job.id),
                )  # fmt: skip
                ended.add(key)
                self._awaited.discard(job.id)
                # A coordinator reports every second, so what it said last was of this slot.
                live.epochs, live.tasks = job.epochs, held[key]
                said = self._said(live, within.last_speed, begin + reached.ended * seconds)
                self._store.report_progress(key, said)
                self._store.change_job(key, JobChange(state=JobState.FINISHED, end_reason="did all epochs"), end)
                del self._running[key]
                continue
            live.epochs += reached.epochs
            live.tasks = held[key]
            if not live.started and sizes[key] != NOTHING:
                live.started = True
                if self.rules.floors:
                    self._store.change_job(key, JobChange(state=JobState.RUNNING), begin)
            self._store.report_progress(key, self._said(live, within.last_speed, end))
        # What a job held stays blocked until its last slot is over.
        self._release([task for task in tasks if self.rules.empty_each_slot or task.job in ended])
        self._manager.forget(map(_anchor, ended))

    def _progress(self, live: _Live, tasks: list[Task], crowded: Mapping[str, Collection[str]]) -> SlotProgress:
        """How the job trains in this slot as long as no node fails."""
        job, realism = live.job, self.rules.realism
        progress = SlotProgress(self._effects.epochs_in_slot(job, self.now, tasks, crowded))
        if not self._resizes_cost or not tasks:
            return progress
        change = resized(live.tasks, tasks, by_count=self.rules.empty_each_slot)
        speed, slot = progress.last_speed, self.workload.slot_seconds
        starting = realism.start_seconds / slot if change.joined else 0.0
        if not live.tasks:
            # It starts, or goes on from its checkpoint after it had nothing for a while.
            again = realism.restart_seconds / slot if live.started else 0.0
            progress.change(0.0, starting + again, speed)
        elif change.joined or change.left:
            standstill = self._effects.standstill(job, live.tasks, change) / slot
            if realism.restart_seconds:
                progress.change(0.0, starting + standstill, speed)
            else:
                progress.change(0.0, 0.0, self._effects.epochs_in_slot(job, self.now, change.kept, crowded))
                progress.change(starting, standstill, speed)
        return progress

    def _turn(self, event: NodeEvent) -> None:
        state = NodeState.UP if event.up else NodeState.DOWN
        self._manager.set_node(structs.replace(self._nodes[event.node], state=state, remark=event.reason))

    def _said(self, live: _Live, speed: float, at: float) -> Progress:
        """What a coordinator would say: how far the job is, how fast it goes and how its loss has fallen."""
        job, size = live.job, _size(live.tasks)
        return Progress(
            at=at,
            epoch=reported_epoch(job, live.epochs),
            loss=self._effects.loss(job, self.now, live.epochs) if live.epochs else None,
            samples_per_second=speed * job.samples_per_epoch / self.workload.slot_seconds,
            workers=size.workers,
            ps=size.ps,
        )


def _anchor(job: JobKey) -> str:
    """Handle of a job's anchor, which the manager lists for as long as the job has not ended."""
    return f"anchor-{job.id}"


def _size(tasks: Sequence[Task]) -> Allocation:
    workers = sum(task.role is Role.WORKER for task in tasks)
    return Allocation(workers, len(tasks) - workers)


class Reached(NamedTuple):
    """Epochs done in a slot, and which fraction of the slot it took where the job has ended in it."""

    epochs: float
    ended: float | None


class SlotProgress:
    """Speeds of a job within one slot, in epochs per slot; times are fractions of the slot."""

    def __init__(self, speed: float) -> None:
        self._changes: list[tuple[float, float]] = [(0.0, speed)]

    @property
    def trains(self) -> bool:
        """Whether the job gets on at all."""
        return any(speed > 0 for at, speed in self._changes if at < 1)

    @property
    def last_speed(self) -> float:
        """Speed at the end of the slot."""
        return next(speed for at, speed in reversed(self._changes) if at < 1)

    def change(self, at: float, standstill: float, speed: float) -> None:
        """From ``at`` on, stand still for a while and then go at another speed; drops what was to come later."""
        if at >= 1:
            return
        self._changes = [change for change in self._changes if change[0] < at]
        if standstill > 0 or not self._changes:
            self._changes.append((at, 0.0 if standstill > 0 else speed))
        if standstill > 0 or at > 0:
            self._changes.append((at + standstill, speed))

    def run(self, left: float) -> Reached:
        """Go through the slot with so many epochs left to do."""
        done = 0.0
        ends = [at for at, _ in self._changes[1:]]
        for (begin, speed), end in zip(self._changes, [*ends, 1.0], strict=True):
            if begin >= 1:
                break
            gain = speed * (min(end, 1.0) - begin)
            if speed > 0 and done + gain >= left:
                return Reached(left, min(begin + (left - done) / speed, 1.0))
            done += gain
        return Reached(done, None)
