"""A site in one process that depends on a seed alone: two daemons on one store, a resource manager and coordinators.

Listings are lost, late, torn and doubled; ids are given again, jobs are requeued, marks are forged, answers to starts
are lost, tasks fail, nodes are drained, and the clocks of the two daemons differ and are set. Between any two calls of
the store or the resource manager a daemon may crash or stand still, so that the other one takes the lease and goes on,
and coordinators and users may call. With ``outages`` the store is also away for some time, with heartbeats and ticks
in vain, or fails at one call, of which it may or may not have done what was asked.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs
from tick.fake_coordinator import PromptCoordinator
from tick.scripted_manager import ScriptedManager
from tick.world import World

from dl2d.core.cluster import NodeState, Task, TaskState, parse_tag, task_tag
from dl2d.core.errors import AlreadyRunning, ResourceManagerError, StoreUnavailable, Unavailable
from dl2d.core.jobs import Allocation, FailureCause, JobKey, JobState, Owner, Progress, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resource_manager import Claim, RmIdentity, RmJob, RmJobState, RmListing, TaskSpec
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, RuntimePlan, TaskChange
from dl2d.daemon.api.recent_heartbeats import AnsweredHeartbeats
from dl2d.simulation.in_memory_store import MemoryStore
from dl2d.testing import make_job, make_nodes
from dl2d.tick.record_slot import Report
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import GuardRules, Timeouts
from dl2d.tick.tick_state import SlotDecision, TickState

_TIMEOUTS = Timeouts(unseen_listings=3, unseen_seconds=30, start_failures=10_000)
_SLOT_SECONDS = 60.0
#: The resource manager forgets what ended so long ago.
_FORGET_SECONDS = 100.0
#: Methods of the store that change it: they are refused to a daemon that has lost the lease.
_FENCED = frozenset(
    {"change_job", "report_progress", "ask_tasks", "change_tasks", "record_slot", "keep_guard_state", "check_lease"}
)
_OWNERS = [Owner("ann", 1, 1, "a", "p"), Owner("ann", 1, 1, "b", "p"), Owner("bob", 2, 2, "a", "p")]
_LIMITS = [Resources(), Resources.of(gpu=3), Resources.of(cpu=12), Resources.of(gpu=4, cpu=15)]


class Crash(BaseException):
    """A daemon's process ends here."""


class WholeStore(MemoryStore):
    """Keeps ended tasks too, as a store on disk does, and when tasks were asked for."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site
        self.ended: dict[str, Task] = {}
        #: When tasks beyond the minimum size of their job were asked for, by tag; not those that were never started.
        self.growth: dict[str, float] = {}
        #: Tags of tasks that running jobs lacked of their minimum size, or that replace one of it.
        self.floors: set[str] = set()
        #: When the tasks of a job last changed.
        self.resized: dict[JobKey, float] = {}
        #: by tag of a task that was asked for: the same, before it was
        self.resized_before: dict[str, float] = {}

    def ask_tasks(self, starts: Sequence[Start], at: float) -> tuple[Task, ...]:
        asked = []
        for start in starts:
            present = Counter(task.role for task in self.tasks(live=True, job=start.job) if task.state.wanted)
            job = self.job(start.job)
            assert job is not None
            (task,) = super().ask_tasks([start], at)
            asked.append(task)
            if (before := self.resized.get(start.job)) is not None:
                self.resized_before[task.tag] = before
            beyond = present[start.role] - job.request.min_size.count(start.role)
            if beyond >= 0 and start.node:
                self.growth[task.tag] = task.asked_at
            # It may have been cancelled since the tick began. With claims, the one above the floor may replace another.
            elif job.state is JobState.RUNNING or job.state.ended:
                self.floors.add(task.tag)
            # One in the queue starts whatever others have of a limit by then.
            if (beyond == 0 and self._site.claims) or not start.node:
                self.floors.add(task.tag)
        # A start counts from the listing that its tick began with, however long the tick took.
        self._note(asked, since_listing=0.0 if self._site.clocks_wrong else self._site.world.now - at)
        return tuple(asked)

    def change_tasks(self, changes: Sequence[TaskChange], at: float) -> tuple[Task, ...]:
        moved = super().change_tasks(changes, at)
        for change in changes:
            if change.cause in (FailureCause.NOT_STARTED, FailureCause.REFUSED):
                tag = task_tag(change.job, change.task)
                self.growth.pop(tag, None)
                # nothing was resized: what counted before it was asked for counts again
                self.resized.pop(change.job, None)
                if (before := self.resized_before.pop(tag, None)) is not None:
                    self.resized[change.job] = before
        self.ended |= {task.tag: task for task in moved if task.state.ended}
        # that a task has drained is seen by one tick only, which may crash; that it was to leave is recorded before
        self._note(task for task in moved if not task.state.ended and task.state is not TaskState.DRAINED)
        return moved

    def _note(self, tasks: Iterable[Task], since_listing: float = 0.0) -> None:
        self.resized |= {task.job: self._site.world.elapsed - since_listing for task in tasks}

    def tasks(self, *, live: bool, job: JobKey | None = None) -> tuple[Task, ...]:
        ended = () if live else [task for task in self.ended.values() if job in (None, task.job)]
        return (*super().tasks(live=live, job=job), *ended)

    def add_runtime_plans(self, job: JobKey, plans: Sequence[RuntimePlan]) -> None:
        del job, plans


class FaultyManager(ScriptedManager):
    """A resource manager whose answers are lost, late, torn or doubled; it checks what it is told to stop.

    A task that runs is missing from at most two complete listings in a row of a daemon: that is what
    ``unseen_listings`` allows.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(make_nodes(3), lambda: site.world.now)
        self._site, self._draw = site, site.draw
        #: Daemon that asks, and in how many of its last complete listings each job was missing.
        self.asked_by = ""
        self._absent: dict[str, Counter[str]] = {}
        self._before: tuple[RmJob, ...] = ()
        self._absent_before: Counter[str] = Counter()
        #: Jobs that carry a mark of ours and are not ours.
        self.forged: set[RmIdentity] = set()
        #: Tasks that were requeued, with their new submit time.
        self.requeued: set[RmIdentity] = set()

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        listing = super().listing(ended_since, tasks)
        happens = self._site.happens
        if happens(0.05):
            raise Unavailable("squeue did not answer")
        jobs = list(self._before if happens(0.1) else listing.jobs)
        self._before = listing.jobs
        torn = happens(0.1)
        if torn or happens(0.15):
            jobs = [job for job in jobs if self._draw.random() < 0.6]
        if happens(0.1):
            jobs += self._draw.sample(jobs, len(jobs) // 2)
        self._draw.shuffle(jobs)
        if not torn:
            there = {job.identity for job in jobs}
            absent = self._absent.setdefault(self.asked_by, Counter())
            for job in self.live():
                absent[job.handle] = 0 if job.identity in there else absent[job.handle] + 1
                if absent[job.handle] > 2:
                    jobs.append(job)
                    absent[job.handle] = 0
        self._site.count["incomplete listings"] += torn
        return replace(listing, jobs=tuple(jobs), incomplete=("torn",) if torn else ())

    def tick_begins(self, daemon: str) -> None:
        """A tick may fail before it asks for a listing, or after that."""
        self.asked_by = daemon
        self._absent_before = self._absent.get(daemon, Counter()).copy()

    def last_listing_does_not_count(self) -> None:
        """The tick has failed, and its daemon knows nothing of the listing, if it had asked for one."""
        self._absent[self.asked_by] = self._absent_before

    def submit(self, task: TaskSpec) -> str:
        happens = self._site.happens
        if happens(0.05):
            raise Unavailable("sbatch did not answer")
        self.pending = happens(0.1)
        handle = super().submit(task)
        if happens(0.05):
            raise Unavailable("sbatch did not answer, but has started it")
        return handle

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        live = {job.identity for job in self.live()}
        for identity in jobs:
            if identity in live:
                self._site.count["stops"] += 1
                assert parse_tag(identity.tag), f"{identity} without a mark was stopped"
                assert identity not in self._site.healthy(), f"{identity} was healthy and stopped"
                assert identity not in self.forged, f"{identity} is not ours and was stopped"
        super().stop(jobs, grace)

    def change_ids(self) -> None:
        """Give ids of ended tasks to somebody else's jobs, requeue tasks that run, forge marks."""
        happens, now = self._site.happens, int(self._site.world.now)
        entries = [entry.job for entry in self._entries.values()]
        ended = [job for job in entries if job.state.ended]
        self.forget([job.handle for job in ended if job.ended < now - _FORGET_SECONDS])
        ended = [job for job in ended if job.ended >= now - _FORGET_SECONDS]
        if ended and happens(0.3):
            user = self._draw.choice(["eve", "ann", "bob"])
            other = structs.replace(self._draw.choice(ended), tag="", user=user, submitted=now + 1)
            self.put(structs.replace(other, state=RmJobState.RUNNING), ())
        tasks = [job for job in self.tasks() if job.state is RmJobState.RUNNING]
        if tasks and happens(0.03):
            job = self._draw.choice(tasks)
            requeued = structs.replace(job, submitted=max(now, job.submitted) + 1)
            self.put(requeued, self._entries[job.handle].held)
            self.requeued.add(requeued.identity)
        if tasks and happens(0.1):
            self._forge(self._draw.choice(tasks))
        if happens(0.3):
            self.run_pending()

    def tasks(self) -> list[RmJob]:
        """Jobs with a mark that have not ended, without forged ones and anchors."""
        return [job for job in self.live() if "-" in job.tag and job.identity not in self.forged]

    def _forge(self, task: RmJob) -> None:
        """A job of another user, of an earlier incarnation of the job, or from before the task, has its mark."""
        handle = f"f{len(self.forged)}"
        parsed = parse_tag(task.tag)
        assert parsed is not None
        key, name = parsed
        known = {each.tag: each for each in self._site.store.tasks(live=True) if each.handle and each.submitted}
        kinds = [{"user": "eve"}, {"tag": f"dl2:{key._replace(submitted=key.submitted - 9).slug}:{name}"}]
        # Only the task that is known can be older: a requeued one has a later time of submission in the listing.
        kinds += [{"submitted": known[task.tag].submitted - 1}] if task.tag in known else []
        forged = structs.replace(task, handle=handle, **self._draw.choice(kinds))
        self.put(forged, ())
        self.forged.add(forged.identity)
        self._site.count["forged marks"] += 1


class Calls:
    """A daemon's calls of the store or the resource manager; anything may happen before and after each."""

    def __init__(self, daemon: Daemon, inner: Any) -> None:
        self._daemon, self._inner = daemon, inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any, **more: Any) -> Any:
            self._daemon.interrupted(f"before {name}")
            self._fail(f"before {name}")
            self._daemon.count_call(name)
            if name == "stop":
                self._daemon.site.check_told(*args)
            if name == "stop" and self._daemon.incomplete:
                self._daemon.site.check_order(*args)
            if name == "listing":
                self._daemon.site.manager.asked_by = self._daemon.name
            answer = method(*args, **more)
            if name == "listing":
                answer = replace(answer, at=self._daemon.clock())
                self._daemon.incomplete = bool(answer.incomplete)
            self._daemon.interrupted(f"after {name}")
            self._fail(f"after {name}")
            return answer

        return call if callable(method) else method

    def _fail(self, where: str) -> None:
        site = self._daemon.site
        if self._inner is site.store and site.fails(0.01):
            site.count["failed calls of the store"] += 1
            raise StoreUnavailable(where)


@dataclass(eq=False)
class Daemon:
    """One of the daemons, on a machine with clocks of its own."""

    name: str
    site: Site
    #: By how much its clock is ahead, and what its monotonic clock began with, seconds.
    ahead: float = 0.0
    booted: float = 0.0
    #: Term of the lease that it holds or has lost; 0 before the first.
    term: int = 0
    state: TickState = field(default_factory=TickState)
    #: Whether its last listing was incomplete.
    incomplete: bool = False
    #: Whether its last call was a check of the lease, which it passed.
    checked: bool = False

    def __post_init__(self) -> None:
        site = self.site
        self.answered = AnsweredHeartbeats(self.timer, lambda: _TIMEOUTS.silent_seconds)
        self.context = replace(
            site.world.context(), store=Calls(self, site.store), manager=Calls(self, site.manager), timer=self.timer,
            last_heartbeat=self.answered.last,
        )  # fmt: skip

    def clock(self) -> float:
        return self.site.world.now + self.ahead

    def timer(self) -> float:
        return self.site.world.elapsed + self.booted

    def acquire(self) -> None:
        """Take the lease and begin anew, as a daemon's process does."""
        site = self.site
        site.term += 1
        site.leader, self.term = self, site.term
        self.answered = AnsweredHeartbeats(self.timer, lambda: _TIMEOUTS.silent_seconds)
        self.context = replace(self.context, last_heartbeat=self.answered.last)
        self.state = TickState(slot=site.store.last_slot_number())

    def count_call(self, name: str) -> None:
        """Check that a daemon without the lease writes and asks for nothing."""
        lost = self.term != self.site.term
        if name in _FENCED and lost:
            raise AlreadyRunning(f"{name}: another daemon has the lease")
        if name in ("submit", "stop"):
            assert self.checked, f"{name} without a check of the lease right before"
            self.site.count["requests after the lease was lost"] += lost
        self.checked = name == "check_lease"

    def interrupted(self, where: str) -> None:
        site = self.site
        if site.happens(0.004):
            raise Crash(where)
        if site.happens(0.003) and not site.standing:
            site.stand_still(self)
        if site.happens(0.01):
            site.something_else()

    def tick(self) -> Report | None:
        site = self.site
        site.manager.tick_begins(self.name)
        try:
            self.state, report = tick(self.context, self.state)
        except ResourceManagerError:
            return None
        except StoreUnavailable:
            site.manager.last_listing_does_not_count()
            return None
        except AlreadyRunning:
            assert site.leader is not self
            site.count["takeovers"] += 1
            return None
        except Crash:
            site.count["crashes"] += 1
            if site.leader is self:
                site.leader = None
            return None
        return report


class Site:
    """Two daemons and everything around them."""

    def __init__(self, seed: int, *, outages: bool = False, claims: bool = False) -> None:
        """With ``claims``, jobs of others wait in the resource manager for room, run and end, and tasks may queue."""
        self.claims = claims
        self.draw = draw = random.Random(seed)
        #: Draws outages, so that the course of a seed without them is what it was; None for none.
        self.outages = random.Random(-1 - seed) if outages else None
        #: Since when each coordinator has known that a task is to leave, on the monotonic clock, by the task's tag.
        self.told: dict[str, float] = {}
        #: When tasks that had joined were to leave, right before an outage.
        self.drained: dict[str, float] = {}
        rules = GuardRules(
            per_user=draw.choice(_LIMITS),
            per_account=draw.choice(_LIMITS),
            per_partition=draw.choice(_LIMITS),
            cooldown_up=draw.choice([0.0, 0.0, 90.0]),
            cooldown_down=draw.choice([0.0, 0.0, 90.0]),
            churn=draw.choice([0, 0, 3, 6]),
        )
        #: Draws when tasks in the queue start.
        self.queue = random.Random(-2 - seed)
        timeouts = replace(_TIMEOUTS, queue_seconds=60.0)
        self.world = World(timeouts=timeouts, slot_seconds=_SLOT_SECONDS, rules=rules, queues_tasks=claims)
        self.world.store.close()
        self.rules = rules
        #: Whether clocks differ and are set; where they do not, cool-downs and churn are exact.
        self.clocks_wrong = draw.random() < 0.6
        self.faulty = True
        self.standing = False
        self.term = 0
        self.leader: Daemon | None = None
        self.count: Counter[str] = Counter()
        self.keys: list[JobKey] = []
        self.number = 0
        self.store = WholeStore(self)
        self.manager = FaultyManager(self)
        self.world.store, self.world.manager = self.store, self.manager  # type: ignore[assignment]
        self.coordinator = PromptCoordinator(self.store, self.manager)  # type: ignore[arg-type]
        apart = draw.choice([-5000.0, -40.0, 3.0, 700.0]) if self.clocks_wrong else 0.0
        self.daemons = [Daemon("one", self, booted=50.0), Daemon("two", self, ahead=apart, booted=1e6)]

    def happens(self, probability: float) -> bool:
        return self.faulty and self.draw.random() < probability

    def fails(self, probability: float) -> bool:
        return self.faulty and self.outages is not None and self.outages.random() < probability

    # What happens

    def play(self) -> Counter[str]:
        """40 ticks with faults, then calm until all has ended; returns how often what happened."""
        for number in range(40):
            if number % 8 == 0 and len(self.keys) < 4:
                self.submit()
            self.step()
            for job in self.store.jobs(live=True):
                if not self.happens(0.2):
                    self.beat(job.key, "finished" if self.happens(0.02) else "")
        self.faulty = False
        self.manager.run_pending()
        for name in [node.name for node in self.manager.nodes]:
            self._set_node(name, NodeState.UP)
        for _ in range(150):
            self.step()
            self.manager.run_pending()
            for job in self.store.jobs(live=True):
                trains = job.state is JobState.RUNNING
                self.beat(job.key, "finished" if trains and self.draw.random() < 0.3 else "")
            left = [job.tag for job in self.manager.live() if job.tag and job.identity not in self.manager.forged]
            if not (self.store.jobs(live=True) or left or self.store.tasks(live=True)):
                break
        assert {self.store.job(key).state.ended for key in self.keys} == {True}, "a job is forgotten"  # type: ignore[union-attr]
        assert left == [], f"a task is forgotten: {left}"
        assert self.store.tasks(live=True) == ()
        return self.count

    def submit(self) -> None:
        draw, number = self.draw, len(self.keys) + 1
        most = {"max_workers": draw.randint(1, 4), "max_ps": draw.randint(1, 3)}
        if draw.random() < 0.3:
            most |= {"min_workers": min(2, most["max_workers"])}
        job = make_job(number, submitted=int(self.world.now), **most)
        self.store.add_job(replace(job, owner=draw.choice(_OWNERS)))
        self.keys.append(job.key)

    def step(self) -> None:
        """One tick of the daemon that has the lease, and what happened since the last one."""
        self.pass_time(self.draw.choice([1.0, 10.0, 15.0, 60.0]))
        if self.fails(0.1):
            self.outage()
            if self.leader is None:
                return
        if self.clocks_wrong and self.happens(0.05):
            self.draw.choice(self.daemons).ahead += self.draw.choice([-5000.0, 5000.0])
        self.manager.change_ids()
        if self.claims:
            self.change_queue()
        daemon = self.leader
        if daemon is None:
            daemon = self.draw.choice(self.daemons)
            daemon.acquire()
        before, resized, last = self.healthy(), dict(self.store.resized), daemon.state.slot_decision
        report = daemon.tick()
        self.check(before)
        if report is not None and self.leader is daemon:
            self.check_moves(report)
        if report is None:  # a tick that crashes may be the only one that saw the end of a task that had to leave
            self.store.resized.clear()
        exact = not (self.clocks_wrong or self.standing or self.outages)
        if report is not None and report.decided and exact:
            self.check_cool_downs(report, resized, last)

    def outage(self) -> None:
        """Heartbeats and ticks are in vain for some time; a task was to leave, which its coordinator does not know."""
        assert self.outages is not None
        self.count["outages"] += 1
        tasks = [task for task in self.store.tasks(live=True) if task.state is TaskState.CONFIRMED]
        if tasks and self.leader is not None:
            task = self.outages.choice(tasks)
            self.store.change_tasks([TaskChange(task.job, task.id, TaskState.DRAINING)], self.leader.clock())
            self.drained[task.tag] = self.world.elapsed
            self.leader.tick()
        self.pass_time(self.outages.choice([40.0, 300.0, 1500.0]))
        for job in self.store.jobs(live=True):  # some call before the first tick, and have drained nothing yet
            if job.address and self.fails(0.7):
                self.beat(job.key, drains=False)

    def change_queue(self) -> None:
        """Jobs of others come, vanish, start as soon as they have room, and end."""
        draw, manager, happens = self.draw, self.manager, self.happens
        if happens(0.3):
            self.number += 1
            whole, nodes = draw.random() < 0.5, draw.randint(1, 3)
            demand = Resources.of(cpu=nodes * draw.randint(1, 8), gpu=nodes * draw.randint(0, 2))
            eligible = frozenset(draw.sample(["n1", "n2", "n3"], draw.randint(1, 3)))
            planned = tuple(draw.sample(["n1", "n2", "n3"], nodes)) if draw.random() < 0.3 else ()
            manager.claims.append(
                Claim(
                    handle=f"c{self.number}", user="eve", priority=draw.choice([50, 150, 250]), nodes=nodes,
                    demand=demand, whole=whole, eligible=draw.choice([None, eligible]), planned=planned,
                    expected_start=self.world.now + draw.choice([-100.0, 30.0, 300.0]) if planned else 0.0,
                )
            )  # fmt: skip
        if manager.claims and happens(0.1):
            manager.claims.remove(draw.choice(manager.claims))
        if draw.random() < 0.7 and self.faulty:
            self.count["claims started"] += len(manager.start_claims())
        if self.queue.random() < 0.3 or not self.faulty:
            self.count["queued tasks started"] += len(manager.start_queued(self.queue.choice([1, 1000])))
        others = [job.handle for job in manager.live() if job.handle.startswith("c")]
        if not self.faulty:
            manager.claims.clear()
        for handle in others:
            if not self.faulty or draw.random() < 0.1:
                manager.end(handle)

    def pass_time(self, seconds: float) -> None:
        self.world.elapsed += seconds
        self.world.now += seconds

    def beat(self, key: JobKey, state: str = "", *, drains: bool = True) -> None:
        """A heartbeat, which the daemon with the lease receives."""
        if self.leader is not None:
            leaving = [task for task in self.store.tasks(live=True, job=key) if not task.state.wanted]
            if drains:
                self.coordinator.beat(key, self.leader.clock(), state=state)
            else:
                self.store.report_progress(key, Progress(at=self.leader.clock()))
            self.leader.answered.note(key)
            for task in leaving:
                self.told.setdefault(task.tag, self.world.elapsed)

    def stand_still(self, daemon: Daemon) -> None:
        """The daemon's process stands still; if that takes long, the other one takes the lease and ticks meanwhile."""
        self.standing = True
        seconds = self.draw.choice([2.0, 50.0, 500.0])
        self.pass_time(seconds)
        if seconds > 10 and self.leader is daemon:
            (other,) = (each for each in self.daemons if each is not daemon)
            other.acquire()
            for _ in range(self.draw.randint(0, 6)):
                self.step_other(other)
        self.standing = False

    def step_other(self, other: Daemon) -> None:
        if self.leader is None:
            other.acquire()
        self.step()
        for job in self.store.jobs(live=True):
            self.beat(job.key)

    def something_else(self) -> None:
        """What others do while a daemon ticks."""
        draw = self.draw
        jobs, tasks = self.store.jobs(live=True), self.manager.tasks()
        kind = draw.choice(["time", "beat", "finish", "cancel", "fail", "node"])
        if kind == "time":
            self.pass_time(draw.choice([1.0, 40.0]))
        elif kind == "beat" and jobs:
            self.beat(draw.choice(jobs).key)
        elif kind == "finish" and jobs and draw.random() < 0.3:
            self.beat(draw.choice(jobs).key, "finished")
        elif kind == "cancel" and jobs and draw.random() < 0.3 and self.leader is not None:
            cancelled = JobChange(state=JobState.CANCELLED, end_reason="cancelled through dl2d")
            self.store.change_job(draw.choice(jobs).key, cancelled, self.leader.clock())
        elif kind == "fail" and tasks:
            self.manager.end(draw.choice(tasks).handle, RmJobState.FAILED, "exit status 1")
        elif kind == "node":
            self._set_node(draw.choice(["n1", "n2", "n3"]), draw.choice([NodeState.UP, NodeState.DRAINING]))

    def _set_node(self, name: str, state: NodeState) -> None:
        node = next(node for node in make_nodes(3) if node.name == name)
        self.manager.set_node(structs.replace(node, state=state))

    # What must hold

    def healthy(self) -> set[RmIdentity]:
        """Jobs that run and are tasks of live jobs that the store wants."""
        wanted = {task.tag: task for task in self.store.tasks(live=True) if task.state.wanted}
        jobs = {job.key for job in self.store.jobs(live=True)}
        found = set()
        for job in self.manager.tasks():
            task = wanted.get(job.tag)
            same = task is not None and task.handle == job.handle and task.submitted in (0, job.submitted)
            if same and task is not None and task.job in jobs and job.state is RmJobState.RUNNING:
                found.add(job.identity)
        return found

    def check(self, before: set[RmIdentity]) -> None:
        """Check what must hold after each tick; ``before`` was healthy before it."""
        ours = [job for job in self.manager.live() if job.tag and job.identity not in self.manager.forged]
        running = Counter(job.tag for job in ours)
        assert max(running.values(), default=0) <= 1, f"runs twice: {running.most_common(1)}"
        alive = {job.identity for job in ours}
        for identity in before & alive:
            task = self.store.ended.get(identity.tag)
            # The first listing with a task may show it as it was before it was requeued, and the next one that it was.
            requeued = (
                task is not None and identity in self.manager.requeued and 0 < task.submitted < identity.submitted
            )
            assert task is None or requeued, f"{identity} was healthy and counts as ended: {task}"
        for node in self.manager.nodes:
            assert node.used.fits_in(node.capacity), node
        jobs = {job.key: job for job in self.store.jobs(live=False)}
        tasks = self.store.tasks(live=True)
        for key, job in jobs.items():
            roles = Counter(task.role for task in tasks if task.job == key and task.state.wanted and task.node)
            # A task that is moved has its replacement beside it for a while (``check_moves``).
            assert roles[Role.WORKER] <= 2 * job.request.max_workers, f"{key} has too many workers"
            assert roles[Role.PS] <= 2 * job.request.max_ps, f"{key} has too many PSs"
        self.check_limits(jobs, tasks)
        # Tasks of floors move off claimed nodes, however many were started.
        if self.rules.churn and not (self.clocks_wrong or self.outages or self.claims):
            # A start counts from the listing that its tick began with, however long the tick took.
            times = [at for at in self.store.growth.values() if at > self.world.now - _SLOT_SECONDS]
            assert len(times) <= self.rules.churn, f"{len(times)} starts in a slot"

    def check_moves(self, report: Report) -> None:
        """Beyond its maximum a job has only replacements that the last tick asked for: each tick ends earlier moves.

        Tasks of a job whose coordinator is silent stay, and after an incomplete listing those of all jobs do.
        """
        if report.incomplete:
            return
        moved = Counter((move.job, start.role) for _, move, start in report.plan.replacements())
        tasks = [task for task in self.store.tasks(live=True) if task.node]  # without those that wait in the queue
        wanted = Counter((task.job, task.role) for task in tasks if task.state.wanted)
        for job in report.snapshot.jobs:
            for role in (Role.WORKER, Role.PS) if job.key not in report.snapshot.silent else ():
                group = job.key, role
                most = job.request.max_size.count(role) + moved[group]
                assert wanted[group] <= most, f"{group} has {wanted[group]} tasks, {moved[group]} of them replacements"

    def check_limits(self, jobs: Any, tasks: Sequence[Task]) -> None:
        """No limit is exceeded by tasks that run or were asked for, those that leave included; floors are harder."""
        for limit, name_of in (
            (self.rules.per_user, lambda owner: owner.user),
            (self.rules.per_account, lambda owner: owner.account),
            (self.rules.per_partition, lambda owner: owner.partition),
        ):
            names = dict(limit.thousandths)
            for name in {name_of(owner) for owner in _OWNERS} if names else ():
                held = Resources.total(
                    task.demand
                    for task in tasks
                    if name_of(jobs[task.job].owner) == name and task.tag not in self.store.floors
                )
                excess = [short for short in held.shortfalls(limit) if short.resource in names]
                assert not excess, f"jobs of {name} hold {held}, the limit is {limit}"

    def check_told(self, identities: Sequence[RmIdentity], grace: float) -> None:
        """A task of a job that lives is stopped only if its coordinator has known for long that it is to leave."""
        del grace
        leaving = {task.tag: task for task in self.store.tasks(live=True) if task.state is TaskState.DRAINING}
        jobs = {job.key for job in self.store.jobs(live=True)}
        running = {job.identity: job for job in self.manager.tasks() if job.state is RmJobState.RUNNING}
        for identity in identities:
            task = leaving.get(identity.tag)
            if task is None or task.job not in jobs or identity not in running or task.tag not in self.drained:
                continue
            told = self.told.get(task.tag, math.inf)
            late = told - self.drained[task.tag]
            known = self.world.elapsed - told
            if known < _TIMEOUTS.drain_seconds:  # it may have been told somewhat late, but then it calls without a gap
                assert late <= _TIMEOUTS.silent_seconds, f"{task} is stopped {known} s after its coordinator was told"

    def check_order(self, identities: Sequence[RmIdentity], grace: float) -> None:
        """After an incomplete listing only what belongs to cancelled jobs is stopped."""
        del grace
        for parsed in map(parse_tag, (identity.tag for identity in identities)):
            job = self.store.job(parsed[0]) if parsed else None
            assert job is not None, identities
            assert job.state is JobState.CANCELLED, f"{identities} stopped after an incomplete listing"

    def check_cool_downs(self, report: Report, resized: dict[JobKey, float], last: SlotDecision) -> None:
        """A job that was resized a short while ago keeps its size, as far as harder rules allow."""
        requests = {job.key: job.request for job in report.snapshot.jobs}
        decided = {entry.job: entry.allocation for entry in last.in_force.jobs}
        floors, now = dict(report.snapshot.floors), self.world.elapsed
        if report.snapshot.grants:
            return
        for entry in report.decision.jobs:
            elapsed = now - resized.get(entry.job, float("-inf"))
            # The replacement of a task that is moved was not decided on, so it may end at once.
            request, after = requests[entry.job], entry.allocation
            most = decided.get(entry.job, request.max_size).common(request.max_size)
            before = Allocation(*map(min, entry.previous, map(max, most, after)))
            gave_way = any(str(why.gave_way) == "cooldown" for why in entry.guarded)
            grows = after.workers > before.workers or after.ps > before.ps
            shrinks = after.workers < before.workers or after.ps < before.ps
            floor = floors.get(entry.job)
            lacks = floor is not None and (before.workers < floor.workers or before.ps < floor.ps)
            if before == (0, 0) or gave_way or lacks:
                continue
            assert not (grows and elapsed < self.rules.cooldown_up), f"{entry} grew after {elapsed} s"
            assert not (shrinks and elapsed < self.rules.cooldown_down), f"{entry} shrank after {elapsed} s"
