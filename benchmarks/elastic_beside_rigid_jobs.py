"""How long rigid jobs wait beside elastic ones, and how long elastic ones take, by which elastic jobs yield to whom.

    python benchmarks/elastic_beside_rigid_jobs.py [--jobs 200] [--nodes 16] [--load 0.8] [--seeds 3]
        [--slot-seconds 300]

Arrivals are Poisson, lengths lognormal as in Philly, half of the jobs are rigid. Rigid jobs go through a queue with
EASY backfill (first come, first served, as with Slurm's priority/basic), whose waiting jobs are the claims of dl2d's
own tick; the policy drf sizes elastic jobs. Compared are: all jobs at their static size in the queue; elastic jobs that
never yield; that yield to jobs of a higher priority, which here came earlier; and that always yield. The jobs are the
same each time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from harness import options_of, show

from dl2d.core.cluster import Node, Task
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.jobs import Architecture, Job, JobKey, JobState, Progress
from dl2d.core.resource_manager import Claim, RmJob, RmJobState, RmListing, Yields
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.drf import Drf
from dl2d.simulation.in_memory_resource_manager import MemoryManager
from dl2d.simulation.in_memory_store import MemoryStore
from dl2d.testing import OWNER, make_job
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Context, Deciders, GuardRules, Timeouts
from dl2d.tick.tick_state import TickState

STEP = 60.0
GPUS = 8
#: Number of GPUs of a job, with weights.
SIZES: Mapping[int, float] = {1: 0.45, 2: 0.15, 4: 0.2, 8: 0.15, 16: 0.05}
#: Speed with w workers is w to this power.
SCALING = 0.9
WORKER = Resources.of(cpu=4, gpu=1)


@dataclass(frozen=True, slots=True)
class Work:
    """A job: when it comes, its GPUs at its static size and how long it takes with them, and whether it is rigid."""

    number: int
    at: float
    gpus: int
    seconds: float
    rigid: bool

    @property
    def nodes(self) -> int:
        """Nodes of its static size."""
        return math.ceil(self.gpus / GPUS)

    @property
    def share(self) -> Resources:
        """What it demands on each of them."""
        return WORKER * min(self.gpus, GPUS)


def jobs_of(seed: int, count: int, gpus_in_all: int, load: float) -> list[Work]:
    """Jobs that offer this load, a fraction of the cluster's GPUs."""
    draw, at, works = random.Random(seed), 0.0, []
    drawn = [
        (
            draw.choices(list(SIZES), list(SIZES.values()))[0],
            min(max(draw.lognormvariate(6.79, 2.16), STEP), 86_400.0),
        )
        for _ in range(count)
    ]
    apart = sum(gpus * seconds for gpus, seconds in drawn) / count / (gpus_in_all * load)
    for number, (gpus, seconds) in enumerate(drawn):
        at += draw.expovariate(1 / apart)
        works.append(Work(number, at, gpus, seconds, draw.random() < 0.5))
    return works


class Queue(MemoryManager):
    """Resource manager with a queue of rigid jobs, which it starts first come, first served with EASY backfill."""

    def __init__(self, nodes: int, yields: Yields | None) -> None:
        self.now = 0.0
        machines = [Node(f"n{number}", Resources.of(cpu=64, gpu=GPUS)) for number in range(nodes)]
        super().__init__(machines, lambda: self.now, cluster="lab", keep_ended=False)
        self.yields = yields
        self.waiting: list[Work] = []
        #: End of each rigid job that runs, its nodes, and what it has on each.
        self.running: dict[int, tuple[float, list[str], Resources]] = {}
        self.started: dict[int, float] = {}
        self.anchors: dict[str, Job] = {}

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        listing = super().listing(ended_since, tasks)
        anchors = tuple(
            RmJob(
                handle=handle, state=RmJobState.RUNNING, user=OWNER.user, submitted=job.key.submitted,
                priority=10**6 - int(job.key.id), yields=self.yields or Yields.NEVER,
            )
            for handle, job in self.anchors.items()
        )  # fmt: skip
        claims = tuple(
            Claim(
                handle=f"r{work.number}", user="bob", priority=10**6 - work.number, nodes=work.nodes,
                demand=work.share * work.nodes,
            )
            for work in self.waiting
        )  # fmt: skip
        return replace(listing, jobs=(*listing.jobs, *anchors), claims=claims)

    def schedule(self) -> None:
        """End and start rigid jobs."""
        for number in [number for number, (end, *_) in self.running.items() if end <= self.now]:
            self.end(f"r{number}")
            del self.running[number]
        reserved: set[str] = set()
        shadow = math.inf
        for work in list(self.waiting):
            free = {node.name: node.capacity.minus(node.used) for node in self.nodes}
            room = [name for name in free if work.share.fits_in(free[name])]
            if shadow < math.inf and self.now + work.seconds > shadow:
                room = [name for name in room if name not in reserved]
            if len(room) >= work.nodes:
                # The fullest ones first.
                chosen = sorted(room, key=lambda name: free[name].get("gpu"))[: work.nodes]
                held = tuple((name, work.share) for name in chosen)
                handle = f"r{work.number}"
                self.put(RmJob(handle=handle, state=RmJobState.RUNNING, user="bob", node=chosen[0]), held)
                self.running[work.number] = self.now + work.seconds, chosen, work.share
                self.started[work.number] = self.now
                self.waiting.remove(work)
            elif not reserved:
                shadow, reserved = self._plan(work, free)

    def _plan(self, work: Work, free: Mapping[str, Resources]) -> tuple[float, set[str]]:
        """When and where the first job that waits has room as rigid jobs end; elastic jobs have no known end."""
        room = dict(free)
        for end, nodes, share in sorted(self.running.values(), key=lambda job: job[0]):
            for name in nodes:
                room[name] += share
            fits = [name for name in room if work.share.fits_in(room[name])]
            if len(fits) >= work.nodes:
                return end, set(fits[: work.nodes])
        return math.inf, {"nowhere"}


def run(works: list[Work], nodes: int, yields: Yields | None, slot_seconds: float) -> tuple[list[float], list[float]]:
    """Waiting times of the rigid jobs and completion times of the others; ``yields`` None: all at static sizes."""
    manager, store, state = Queue(nodes, yields), MemoryStore(), TickState()
    context = Context(
        cluster="lab", manager=manager, store=store, deciders=Deciders(Drf(), Drf(), LoadBalance()),
        task_specs=TaskSpecs("http://none", Credentials(b"0" * 32)), guard_rules=GuardRules(), timeouts=Timeouts(),
        slot_seconds=slot_seconds, seed=0, starts_anchors=False, grace_seconds=1.0, timer=lambda: manager.now,
    )  # fmt: skip
    coming, done, left = list(works), dict[int, float](), dict[JobKey, float]()
    while coming or manager.waiting or manager.running or left:
        manager.now += STEP
        while coming and coming[0].at <= manager.now:
            work = coming.pop(0)
            if work.rigid or yields is None:
                manager.waiting.append(work)
                continue
            job = make_job(
                work.number, cluster="lab", submitted=int(work.at), state=JobState.READY, model="other", epochs=1.0,
                samples_per_epoch=1.0, batch=1, worker=WORKER, ps=Resources(), min_ps=0, max_ps=0, max_workers=16,
                architecture=Architecture.ALLREDUCE,
            )  # fmt: skip
            job = replace(job, anchor=f"a{work.number}", address="here", progress=Progress(at=manager.now))
            store.add_job(job)
            manager.anchors[job.anchor] = job
            left[job.key] = work.seconds * work.gpus**SCALING
        manager.schedule()
        for _ in range(3 if yields is not None else 0):
            for key in left:
                store.report_progress(key, Progress(at=manager.now))
            state, report = tick(context, state)
            ended = store.confirm_tasks(manager.now)
            manager.forget(task.handle for task in ended)
            store.forget_tasks(ended)
            manager.schedule()
            if not report.plan.starts and not report.plan.stops:
                break
        for key, workers in Counter(task.job for task in store.tasks(live=True)).items():
            store.change_job(key, JobChange(state=JobState.RUNNING), manager.now)
            left[key] -= STEP * workers**SCALING
            if left[key] <= 0:
                over = -left.pop(key) / workers**SCALING
                done[int(key.id)] = manager.now + STEP - over
                store.change_job(key, JobChange(state=JobState.FINISHED), manager.now)
                del manager.anchors[f"a{key.id}"]
                tasks = store.tasks(live=True, job=key)
                manager.forget(task.handle for task in tasks)
                store.forget_tasks(tasks)
    for number, start in manager.started.items():
        done[number] = start + works[number].seconds
    waits = [manager.started[work.number] - work.at for work in works if work.rigid]
    return waits, [done[work.number] - work.at for work in works if not work.rigid]


def main() -> None:
    given = options_of(__doc__, jobs=200, nodes=16, load=0.8, seeds=3, slot_seconds=300.0)
    for yields in (None, Yields.NEVER, Yields.HIGHER_PRIORITY, Yields.ALWAYS):
        waits: list[float] = []
        times: list[float] = []
        began = time.monotonic()
        for seed in range(given.seeds):
            works = jobs_of(seed, given.jobs, given.nodes * GPUS, given.load)
            waited, took = run(works, given.nodes, yields, given.slot_seconds)
            waits += waited
            times += took
        show(
            elastic_jobs_yield=yields or "static sizes", rigid_mean_wait=statistics.fmean(waits),
            rigid_p95_wait=statistics.quantiles(waits, n=20)[-1], elastic_mean_completion=statistics.fmean(times),
            elastic_median_completion=statistics.median(times), took=time.monotonic() - began,
        )  # fmt: skip


if __name__ == "__main__":
    main()
