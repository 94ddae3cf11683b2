"""Seeded simulation of daemon, resource manager and coordinators in one process, with faults between any two calls.

Listings are lost, late, torn and doubled, ids are given again, jobs are requeued, answers to starts are lost, the clock
is set, and the daemon crashes before or after any call of the store or the resource manager. Everything depends on the
seed alone, so that a failure is repeated by its number: ``played(17)``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog
from msgspec import structs
from tick.world import World

from dl2d.core.cluster import Task, TaskState, parse_tag
from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.jobs import JobKey, JobState, Role
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.store import RuntimePlan, TaskChange
from dl2d.testing import MemoryStore, PromptCoordinator, ScriptedManager
from dl2d.testing.builders import make_nodes
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Timeouts
from dl2d.tick.tick_state import TickState

#: One more than the last seed that the slow test tries.
_SEEDS = int(os.environ.get("DL2D_SIMULATION_SEEDS", "1000"))
_TIMEOUTS = Timeouts(unseen_listings=3, unseen_seconds=30, start_failures=10_000)


class Crash(BaseException):
    """The daemon's process ends here."""


class Crashing:
    """Passes calls on; the process may end before or after each."""

    def __init__(self, inner: Any, crashes: Callable[[], bool]) -> None:
        self._inner, self._crashes = inner, crashes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if not callable(method):
            return method

        def call(*args: Any, **more: Any) -> Any:
            if self._crashes():
                raise Crash(f"before {name}")
            answer = method(*args, **more)
            if self._crashes():
                raise Crash(f"after {name}")
            return answer

        return call


class WholeStore(MemoryStore):
    """Keeps ended tasks too, as a store on disk does."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, Task] = {}

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        moved = super().change_tasks(changes, at)
        self.ended |= {task.tag: task for task in moved if task.state.ended}
        return moved

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        ended = () if live else [task for task in self.ended.values() if job in (None, task.job)]
        return (*super().tasks(live=live, job=job), *ended)

    def add_runtime_plans(self, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
        del job, plans


class FaultyManager(ScriptedManager):
    """A resource manager whose answers are lost, late, torn or doubled; it checks what it is told to stop.

    A task that runs is missing from at most two complete listings in a row: that is what ``unseen_listings`` allows.
    """

    def __init__(self, world: World, draw: random.Random) -> None:
        super().__init__(make_nodes(3), lambda: world.now)
        self._world, self._draw = world, draw
        self._absent: Counter[str] = Counter()
        self._before: tuple[RmJob, ...] = ()
        self.faulty = True
        self.incomplete_listings = self.stops = 0

    def happens(self, probability: float) -> bool:
        return self.faulty and self._draw.random() < probability

    def listing(self, ended_since: float | None = None) -> RmListing:
        listing = super().listing(ended_since)
        if self.happens(0.05):
            raise Unavailable("squeue did not answer")
        jobs = list(self._before if self.happens(0.1) else listing.jobs)
        self._before = listing.jobs
        torn = self.happens(0.1)
        if torn or self.happens(0.15):
            jobs = [job for job in jobs if self._draw.random() < 0.6]
        if self.happens(0.1):
            jobs += self._draw.sample(jobs, len(jobs) // 2)
        self._draw.shuffle(jobs)
        if not torn:
            there = {job.identity for job in jobs}
            for job in self.live():
                self._absent[job.handle] = 0 if job.identity in there else self._absent[job.handle] + 1
                if self._absent[job.handle] > 2:
                    jobs.append(job)
                    self._absent[job.handle] = 0
        self.incomplete_listings += torn
        return replace(listing, jobs=tuple(jobs), incomplete=("torn",) if torn else ())

    def submit(self, task: TaskSpec) -> str:
        if self.happens(0.05):
            raise Unavailable("sbatch did not answer")
        handle = super().submit(task)
        if self.happens(0.05):
            raise Unavailable("sbatch did not answer, but has started it")
        return handle

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        live = {job.identity: job for job in self.live()}
        for identity in jobs:
            if identity in live:
                self.stops += 1
                assert parse_tag(identity.tag), f"{identity} without a mark was stopped"
                assert identity not in healthy(self._world), f"{identity} was healthy and stopped"
        super().stop(jobs, grace)

    def change_an_id(self) -> None:
        """Give the id of an ended task to somebody else's job, or requeue a task that runs."""
        entries = [entry.job for entry in self._entries.values()]
        ended = [job for job in entries if job.state.ended]
        now = int(self._world.now)
        if ended and self.happens(0.3):
            user = self._draw.choice(["eve", "ann"])
            other = structs.replace(self._draw.choice(ended), tag="", user=user, submitted=now + 1)
            self.put(structs.replace(other, state=RmJobState.RUNNING), ())
        tasks = [job for job in entries if not job.state.ended and "-" in job.tag]
        if tasks and self.happens(0.03):
            job = self._draw.choice(tasks)
            held = self._entries[job.handle].held
            self.put(structs.replace(job, submitted=max(now, job.submitted) + 1), held)


def healthy(world: World) -> set[RmIdentity]:
    """Jobs that run and are tasks of live jobs that the store wants."""
    wanted = {task.tag: task for task in world.store.tasks(live=True) if task.state.wanted}
    jobs = {job.key for job in world.store.jobs(live=True)}
    found = set()
    for job in world.manager.live():
        task = wanted.get(job.tag)
        same = task is not None and task.handle == job.handle and task.submitted in (0, job.submitted)
        if same and task is not None and task.job in jobs and job.state is RmJobState.RUNNING:
            found.add(job.identity)
    return found


def check(world: World, before: set[RmIdentity]) -> None:
    """Check what must hold after each tick; ``before`` was healthy before it."""
    running = Counter(job.tag for job in world.manager.live() if job.tag)
    assert max(running.values(), default=0) <= 1, f"runs twice: {running.most_common(1)}"
    alive = {job.identity for job in world.manager.live()}
    ended = {task.tag: task for task in world.store.ended.values()}
    for identity in before & alive:
        task = ended.get(identity.tag)
        assert task is None, f"{identity} was healthy and counts as ended: {task}"
    for job in world.store.jobs(live=True):
        roles = Counter(task.role for task in world.store.tasks(live=True, job=job.key) if task.state.wanted)
        # A task that is moved has its replacement beside it for a while.
        assert roles[Role.WORKER] <= job.request.max_workers + 1, f"{job.key} has too many workers"
        assert roles[Role.PS] <= job.request.max_ps + 1, f"{job.key} has too many PSs"
    for node in world.manager.nodes:
        assert node.used.fits_in(node.capacity), node


def played(seed: int) -> tuple[int, int, int]:
    """One run: 40 ticks with faults, then calm; returns the numbers of crashes, incomplete listings and stops."""
    draw = random.Random(seed)
    world = World(timeouts=_TIMEOUTS, slot_seconds=60.0)
    world.store.close()
    store = world.store = WholeStore()
    manager = world.manager = FaultyManager(world, draw)
    coordinator = PromptCoordinator(store, manager)
    plain = world.context()
    context = replace(
        plain,
        store=Crashing(store, lambda: manager.happens(0.004)),
        manager=Crashing(manager, lambda: manager.happens(0.004)),
    )
    crashes, keys = 0, []

    def step() -> None:
        nonlocal crashes
        seconds = draw.choice([1.0, 10.0, 15.0, 60.0])
        world.elapsed += seconds
        world.now += seconds + (draw.choice([-5000.0, 5000.0]) if manager.happens(0.05) else 0.0)
        manager.change_an_id()
        before = healthy(world)
        try:
            world.state, _ = tick(context, world.state)
        except ResourceManagerError:
            pass
        except Crash:
            crashes += 1
            world.state = TickState(slot=store.last_slot_number())
        check(world, before)

    for number in range(40):
        if number % 8 == 0 and len(keys) < 4:
            keys.append(world.submit(max_workers=draw.randint(1, 4), max_ps=draw.randint(1, 3)))
        step()
        for job in store.jobs(live=True):
            if not manager.happens(0.2):
                coordinator.beat(job.key, world.now, state="finished" if manager.happens(0.02) else "")
    manager.faulty = False
    for _ in range(60):
        step()
        for job in store.jobs(live=True):
            trains = job.state is JobState.RUNNING
            coordinator.beat(job.key, world.now, state="finished" if trains and draw.random() < 0.3 else "")
    assert {store.job(key).state.ended for key in keys} == {True}, "a job is forgotten"
    assert [job.tag for job in manager.live() if job.tag] == [], "a task is forgotten"
    assert [task for task in store.tasks(live=True) if task.state is not TaskState.FAILED] == []
    return crashes, manager.incomplete_listings, manager.stops


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        (22, "tasks of an ended job ran on until a clock that was set back had caught up"),
        (14, "a task of an ended job that was not listed was moved to make room, which failed each tick"),
    ],
)
def test_what_was_found_once(seed: int, found: str) -> None:
    assert run(seed), found


def test_faults_of_any_kind_end_nothing_healthy_and_forget_nothing() -> None:
    crashes, incomplete, stops = (sum(numbers) for numbers in zip(*(run(seed) for seed in range(200)), strict=True))
    assert min(crashes, incomplete, stops) > 100, "the faults did not happen"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, _SEEDS, 400))
def test_faults_of_any_kind_in_many_runs(first: int) -> None:
    """``DL2D_SIMULATION_SEEDS=10000`` tries so many."""
    for seed in range(first, min(first + 400, _SEEDS)):
        run(seed)


def run(seed: int) -> tuple[int, int, int]:
    try:
        return played(seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error
