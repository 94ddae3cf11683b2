"""A store in which dl2d looked on: users' jobs of fixed sizes, which a scheduler of the site's own runs in turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from tick.world import World

from dl2d.core.cluster import Node
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.jobs import Owner
from dl2d.core.resource_manager import RmJobState, StaticJob
from dl2d.core.resources import Resources
from dl2d.testing import make_nodes

#: What users ask for: workers, by type of model.
SIZES = {"bert": 6, "resnet-50": 3, "vgg-16": 2}
OWNER = Owner("eve", 1007, 1007, partition="gpu")
TASK = Resources.of(cpu=2, gpu=1)
POLL = 60.0


@dataclass
class ForeignJob:
    handle: str
    model: str
    submitted: float
    #: How long it runs, seconds.
    seconds: float
    placed: tuple[str, ...] = ()
    started: float = 0.0


@dataclass
class ForeignScheduler:
    """First come, first served, each job whole or not at all; it knows nothing of dl2d."""

    world: World
    waiting: list[ForeignJob] = field(default_factory=list)
    running: list[ForeignJob] = field(default_factory=list)
    count: int = 0

    def submit(self, model: str, seconds: float) -> None:
        self.count += 1
        job = ForeignJob(str(self.count), model, self.world.now, seconds)
        self.waiting.append(job)
        self._tell(job, RmJobState.PENDING, "Resources")

    def go_on(self) -> None:
        """End those that are done, and start those that have room, in turn."""
        for job in [job for job in self.running if self.world.now >= job.started + job.seconds]:
            self.running.remove(job)
            self.world.manager.end(job.handle, RmJobState.DONE)
        while self.waiting and (placed := self._room(SIZES[self.waiting[0].model])):
            job = self.waiting.pop(0)
            job.placed, job.started = placed, self.world.now
            self.running.append(job)
            self._tell(job, RmJobState.RUNNING)

    def _room(self, count: int) -> tuple[str, ...]:
        used = Counter(node for job in self.running for node in job.placed)
        free = [node.name for node in self.world.cluster_nodes for _ in range(_slots(node) - used[node.name])]
        return tuple(free[:count]) if len(free) >= count else ()

    def _tell(self, job: ForeignJob, state: RmJobState, reason: str = "") -> None:
        static = StaticJob(
            name=f"{job.model}-{job.handle}", model=job.model, owner=OWNER, workers=SIZES[job.model], task=TASK,
            nodes=job.placed, limit=4 * 3600.0, started=job.started,
        )  # fmt: skip
        self.world.manager.set_static(job.handle, static, state, submitted=int(job.submitted), reason=reason)


def _slots(node: Node) -> int:
    return int(node.capacity.get("gpu"))


def observe(url: str, *, hours: float = 12.0, seed: int = 0, poll: float = POLL, begin: float | None = None) -> World:
    """Look on for some hours from a time on; returns the world, to be closed."""
    rng = np.random.default_rng(seed)
    world = World(cluster_nodes=make_nodes(5, cpu=8, gpu=4), url=url, mode=Mode.OBSERVE)
    world.now = world.now if begin is None else begin
    scheduler = ForeignScheduler(world)
    for _ in range(int(hours * 3600 / poll)):
        if rng.random() < poll / 900:
            scheduler.submit(str(rng.choice(sorted(SIZES))), float(rng.uniform(1800, 7200)))
        scheduler.go_on()
        world.tick(poll)
    return world
