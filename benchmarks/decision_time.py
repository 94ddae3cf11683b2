"""How long one decision takes, from small clusters to large ones, and how that grows.

    python benchmarks/decision_time.py [--jobs 250 1000 4000 16000] [--policies fifo drf ...] [--running] [--repeats 3]
        [--room scarce plentiful] [--users 0]

Every job is new, or with `--running` has what a first decision gave it, and asks for workers and PSs of one of two
shapes; there are 2.5 nodes a job, as in Optimus' 4,000 jobs on 10,000 nodes (Peng et al., EuroSys 2018: 5 s). Where
room is scarce a node holds 4 tasks, and a job may have 8 of each role; where it is plentiful a node holds 8 (10,000
nodes: 80,000 tasks), and a job may have 16. Jobs could use more than there is, so each ends with a reason. They are of
six model types with speeds of their own; `optimus` and `lookahead` fit them to some measured sizes, `optimus-true` and
`lookahead-true` are told, and `optimus-loss` fits 32 losses of each job as well. With `--users` so many users have the
jobs by turns, and each may hold half as many GPUs as there are for a user. A time is that of
`Packing.for_decision` and `Policy.decide` together, without collection of garbage as in the daemon, the least of the
repeats.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from harness import options_of, show
from msgspec import structs
from numpy.typing import NDArray

from dl2d.core.cluster import Node, SharedLimit, Snapshot, TaskState
from dl2d.core.jobs import Allocation, Architecture, Consistency, Job, JobKey, JobState
from dl2d.core.measured_speeds_and_losses import (
    MAX_LOSSES,
    LossPoint,
    MeasuredLoss,
    MeasuredSpeeds,
    SpeedPoint,
    TrainingKind,
)
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import Policy
from dl2d.core.resources import Resources
from dl2d.placement.load_balance import LoadBalance
from dl2d.plugins import POLICIES, available, load_policy
from dl2d.policies.lookahead import Lookahead
from dl2d.policies.optimus import Optimus
from dl2d.simulation.speeds.speed_models import PsSync
from dl2d.testing import make_job, make_request
from dl2d.tick.place.place import place
from dl2d.tick.policy_check.policy_call import gc_paused

MODELS = {
    f"m{number}": PsSync((0.01 + 0.004 * number, 0.1 * number, 0.3 / (1 + number), 0.002 * number, 0.004), 32 << number)
    for number in range(6)
}
#: CPUs and GPUs of a node, where a task takes two CPUs; and the most tasks of each role that a job may have.
ROOM = {"scarce": (8, 8), "plentiful": (16, 16)}
SIZES = [Allocation(workers, ps) for workers in (1, 2, 4, 8) for ps in (1, 2, 4, 8)]


class Known:
    """The models' own speeds."""

    def __init__(self) -> None:
        self._grids: dict[tuple[str, int, int], NDArray[np.float64]] = {}

    def grid(self, job: Job) -> NDArray[np.float64]:
        key = job.request.model, job.request.max_workers, job.request.max_ps
        if key not in self._grids:
            self._grids[key] = MODELS[key[0]].grid(*key[1:])
        return self._grids[key]


def snapshot(jobs: int, room: str, users: int) -> Snapshot:
    """A full queue and an empty cluster; each of so many users may hold half of their share of the GPUs."""
    amount, most = ROOM[room]
    shapes = [
        make_request(
            model=model, epochs=1 + number, batch=1, worker=Resources.of(cpu=2, gpu=gpu), ps=Resources.of(cpu=2),
            max_workers=most, max_ps=most,
        )
        for number, model in enumerate(MODELS)
        for gpu in (1, 2)
    ]  # fmt: skip
    ready = make_job(state=JobState.READY)
    queue = tuple(
        replace(ready, key=JobKey("c", str(number), number), request=shapes[number % len(shapes)])
        for number in range(jobs)
    )
    capacity = Resources.of(cpu=amount, gpu=amount)
    nodes = tuple(Node(f"n{number}", capacity) for number in range(int(2.5 * jobs)))
    speeds = tuple(
        MeasuredSpeeds(
            TrainingKind(model, Architecture.PS, Consistency.SYNC),
            tuple(SpeedPoint(size, speed.samples_per_second(*size), 1) for size in SIZES),
        )
        for model, speed in MODELS.items()
    )
    curve = tuple(LossPoint(epoch / 64, 1 / (0.1 * epoch + 1) + 0.2) for epoch in range(MAX_LOSSES))
    losses = tuple(MeasuredLoss(job.key, curve) for job in queue)
    limits = tuple(
        SharedLimit(
            tuple(job.key for job in queue[user::users]), (("gpu", 1000 * amount * len(nodes) // (2 * users)),),
            f"limit of user {user}",
        )
        for user in range(users)
    )  # fmt: skip
    return Snapshot(0.0, 1, nodes, queue, (), speeds=speeds, losses=losses, limits=limits)


def packing_of(seen: Snapshot) -> Packing:
    """What a policy packs into."""
    return Packing.for_decision(seen.nodes, seen.tasks, LoadBalance(), limits=seen.limits)


def running(policy: Policy, seen: Snapshot) -> Snapshot:
    """The same cluster after a first decision: its tasks run where they were placed."""
    decision = policy.decide(seen, packing_of(seen), np.random.default_rng(0))
    plan = place(seen, decision, LoadBalance())
    tasks = tuple(start.task(number, state=TaskState.CONFIRMED) for number, start in enumerate(plan.starts))
    held: dict[str, list[Resources]] = defaultdict(list)
    for task in tasks:
        held[task.node].append(task.demand)
    nodes = tuple(structs.replace(node, used=Resources.total(held[node.name])) for node in seen.nodes)
    jobs = tuple(replace(job, state=JobState.RUNNING) for job in seen.jobs)
    return structs.replace(seen, nodes=nodes, jobs=jobs, tasks=tasks)


def seconds(policy: Policy, seen: Snapshot, repeats: int) -> float:
    """Least time of some decisions."""
    times = []
    for _ in range(repeats):
        with gc_paused():
            begin = time.perf_counter()
            policy.decide(seen, packing_of(seen), np.random.default_rng(0))
            times.append(time.perf_counter() - begin)
    return min(times)


def contenders() -> dict[str, Callable[[], Policy]]:
    """All heuristics that are there, by name."""
    names = ("fifo", "srtf", "drf", "tetris", "optimus", "optimus-loss", "lookahead", "dl2")
    made: dict[str, Callable[[], Policy]] = {
        name: lambda name=name: load_policy(name) for name in names if name in available(POLICIES)
    }
    return made | {
        "optimus-true": lambda: Optimus(known=Known()),
        "lookahead-true": lambda: Lookahead(known=Known()),
    }


def main() -> None:
    there = contenders()
    options = options_of(
        __doc__,
        jobs=[250, 1000, 4000, 16000],
        policies=list(there),
        room=list(ROOM),
        running=False,
        repeats=3,
        users=0,
    )
    for name, room in itertools.product(options.policies, options.room):
        policy, before = there[name](), 0.0
        for jobs in options.jobs:
            seen = snapshot(jobs, room, options.users)
            if options.running:
                seen = running(policy, seen)
            took = seconds(policy, seen, options.repeats)
            growth = took / jobs / before if before else None
            before = took / jobs
            show(policy=name, room=room, jobs=jobs, nodes=len(seen.nodes), seconds=took, growth_per_job=growth)
    show(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
