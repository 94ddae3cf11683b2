"""Replay a workload in virtual time: the daemon's own tick on a simulated cluster, slot after slot.

A slot goes as in DL2's simulator (Peng et al., section 6.1 and the authors' code): jobs are admitted at its start, the
tick decides and places, every job that has a worker and (with parameter servers) a PS runs the whole slot, and a job
that ends inside its last slot counts the fraction that it used.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dl2d.core.cluster import Task
from dl2d.core.errors import Dl2dError
from dl2d.core.jobs import Allocation, Architecture, Job, JobKey, JobState, Launch, Owner, Progress, Role
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.store import JobChange
from dl2d.daemon.credentials import Credentials
from dl2d.daemon.decide import Deciders
from dl2d.daemon.guard import GuardRules
from dl2d.daemon.launching import Launcher
from dl2d.daemon.reconcile import Patience
from dl2d.daemon.tick import Carry, Context, tick
from dl2d.simulation.books import Books, SlotSeries
from dl2d.simulation.manager import SimulatedManager
from dl2d.simulation.memory_store import MemoryStore
from dl2d.simulation.workload import SimulatedJob, Workload, to_request

_CLUSTER = "simulated"
_OWNER = Owner("simulated", 0, 0)
_LAUNCH = Launch(("simulated",), "/")
#: Ticks of one slot in which room that a shrinking job gives up is given on; more are a defect of a policy.
_MOST_TICKS = 20


class SimulationError(Dl2dError):
    """A simulation cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a simulation departs from a real cluster."""

    #: Empty the cluster at the end of each slot and place everything anew, as the DL2 authors' simulator does.
    empty_each_slot: bool = False
    #: Slots after which a simulation is given up.
    most_slots: int = 100_000


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
    jobs: tuple[JobOutcome, ...]
    slots: int
    #: Milliseconds of each decision.
    decision_ms: tuple[float, ...] = field(repr=False)
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
    progress: Callable[[int, int], None] | None = None,
    keep_series: bool = False,
) -> Replayed:
    """Run a workload to its end; ``keep_series`` asks for ``Replayed.series``.

    ``timer`` gives seconds on a monotonic clock, for the decisions' times alone: nothing else depends on real time, so
    equal arguments give equal results. ``progress`` is told how many of how many jobs have ended, after each slot.

    Raises
    ------
    SimulationError
        The jobs do not all end within ``rules.most_slots``, or a policy's decision never comes to rest.
    """
    run = _Run(workload, policy, placement, rules or Rules(), seed, timer, Books(keep=keep_series))
    while not run.done:
        run.slot()
        if progress is not None:
            progress(len(run.outcomes), len(workload.jobs))
    outcomes = sorted(run.outcomes.values(), key=lambda job: run.order[job.id])
    return Replayed(
        policy=policy.name,
        jobs=tuple(outcomes),
        slots=run.now,
        decision_ms=tuple(run.decision_ms),
        utilisation=run.books.utilisation(run.now),
        series=run.books.series,
    )


class _Run:
    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        placement: Placement,
        rules: Rules,
        seed: int,
        timer: Callable[[], float],
        books: Books,
    ) -> None:
        self.workload = workload
        self.rules = rules
        self.now = 0
        self.outcomes: dict[str, JobOutcome] = {}
        self.order = {job.id: place for place, job in enumerate(workload.jobs)}
        self.decision_ms: list[float] = []
        self._timer = timer
        self._manager = SimulatedManager(workload.nodes(), cluster=_CLUSTER)
        self._store = MemoryStore()
        self._coming = sorted(workload.jobs, key=lambda job: (job.submit_slot, self.order[job.id]), reverse=True)
        self._running: dict[JobKey, SimulatedJob] = {}
        self.books = books
        self._epochs: dict[JobKey, float] = {}
        self._carry = Carry()
        # A failure of the policy is a result here, not something to be papered over.
        deciders = Deciders(policy, policy, placement, patience=float("inf"))
        self._context = Context(
            cluster=_CLUSTER,
            manager=self._manager,
            store=self._store,
            deciders=deciders,
            launcher=Launcher("http://simulated", Credentials(b"\0" * 32)),
            rules=GuardRules(),
            # Simulated coordinators neither call nor fall silent, and nothing is lost on the way.
            patience=Patience(
                unseen=float("inf"), start=float("inf"), drain=float("inf"), end=float("inf"), silent=float("inf")
            ),
            slot_seconds=workload.slot_seconds,
            seed=seed,
            starts_anchors=False,
            grace=0.0,
            timer=timer,
        )

    @property
    def done(self) -> bool:
        return not self._coming and not self._running

    def slot(self) -> None:
        """Admit, decide, run; then the next slot begins."""
        if self.now >= self.rules.most_slots:
            left = ", ".join(job.id for job in list(self._running.values())[:5])
            raise SimulationError(f"{len(self._running)} jobs have not ended after {self.now} slots: {left} ...")
        if not self._running and self._coming:
            self.now = max(self.now, self._coming[-1].submit_slot)  # nothing happens in empty slots
        self._manager.now = self.now * self.workload.slot_seconds
        self._admit()
        self._decide()
        self._work()
        self.now += 1

    def _admit(self) -> None:
        while self._coming and self._coming[-1].submit_slot <= self.now:
            job = self._coming.pop()
            key = JobKey(_CLUSTER, job.id, int(job.submit_slot * self.workload.slot_seconds))
            # Jobs stay "ready": none holds a floor, so a policy may take everything from it and give it back later.
            self._store.add_job(
                Job(
                    key=key, request=to_request(job, self.workload), owner=_OWNER, launch=_LAUNCH,
                    state=JobState.READY, anchor=f"anchor-{job.id}", address="simulated",
                )
            )  # fmt: skip
            self._running[key] = job
            self._epochs[key] = 0.0

    def _decide(self) -> None:
        """Tick until what was decided is what runs: in a slot of minutes, seconds of starting do not count."""
        for _ in range(_MOST_TICKS):
            begin = self._timer()
            self._carry, report = tick(self._context, self._carry)
            if report.decided:
                self.decision_ms.append((self._timer() - begin) * 1e3)
            self._settle()
            plan = report.plan
            if not plan.starts and not plan.stops:
                return
            if not plan.deferred and not plan.moves and not report.outcome.failures:
                return  # all that was decided is done: another tick would find nothing to do
        raise SimulationError(f"slot {self.now}: after {_MOST_TICKS} ticks tasks are still being moved about")

    def _settle(self) -> None:
        """Started tasks take part, leaving ones are gone."""
        self._release(self._store.confirm_tasks(self._manager.now))

    def _release(self, tasks: Sequence[Task]) -> None:
        self._manager.stop([task.handle for task in tasks], 0.0)
        self._store.forget_tasks(tasks)

    def _work(self) -> None:
        tasks = self._store.tasks(live=True)
        held: dict[JobKey, list[int]] = {key: [0, 0] for key in self._running}
        for task in tasks:
            held[task.job][task.role is Role.PS] += 1
        done = list(self._epochs_in_slot(held))
        self.books.enter(
            self.now,
            self._manager.nodes,
            {self._running[key].id: Allocation(*counts) for key, counts in held.items()},
            {self._running[key].id for key, epochs in done if epochs > 0},
        )
        ended: set[JobKey] = set()
        end = self._manager.now + self.workload.slot_seconds
        for key, epochs in done:
            job = self._running[key]
            left = job.epochs - self._epochs[key]
            if epochs >= left > 0:
                fraction = left / epochs
                self.outcomes[job.id] = JobOutcome(
                    id=job.id, submit_slot=job.submit_slot, last_slot=self.now, fraction=fraction,
                    resizes=self.books.forget(job.id),
                )  # fmt: skip
                ended.add(key)
                self._store.change_job(key, JobChange(state=JobState.FINISHED, end_reason="did all epochs"), end)
                del self._running[key], self._epochs[key]
                continue
            self._epochs[key] += epochs
            self._store.report_progress(key, self._said(job, self._epochs[key], epochs, Allocation(*held[key]), end))
        # What a job held stays blocked until its last slot is over.
        self._release([task for task in tasks if self.rules.empty_each_slot or task.job in ended])

    def _epochs_in_slot(self, held: dict[JobKey, list[int]]) -> Iterator[tuple[JobKey, float]]:
        for key, (workers, ps) in held.items():
            job = self._running[key]
            runs = workers > 0 and (ps > 0 or job.architecture is Architecture.ALLREDUCE)
            yield key, self.workload.epochs_in_slot(job, workers, ps) if runs else 0.0

    def _said(self, job: SimulatedJob, epoch: float, done: float, has: Allocation, at: float) -> Progress:
        """What a coordinator would say: how far the job is by its declared length, and how fast it goes."""
        speed = done * job.samples_per_epoch / self.workload.slot_seconds
        return Progress(
            at=at,
            epoch=epoch * job.declared_epochs / job.epochs,
            samples_per_second=speed,
            workers=has.workers,
            ps=has.ps,
        )
