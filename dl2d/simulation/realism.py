"""Imperfections of real clusters (noise, costs, failures), all off by default: options, effects, and node outages.

docs/simulator.md has the table of options with units, the values of the preset ``realistic`` and where they come from.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dl2d.core.cluster import Node, Task
from dl2d.core.jobs import TASK_ROLES, Architecture, Role
from dl2d.simulation.parse_key_value_options import Options, within
from dl2d.simulation.seeded_random import SeededRandom
from dl2d.simulation.speeds.speed_models import AllReduce, Physical, PsAsync, PsSync, SpeedModel
from dl2d.simulation.workload.workload_file import CapacityChange, SimulatedJob, Workload

_MAX_VALUE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Realism(Options):
    """Options of the simulated cluster; made with nothing, none has any effect."""

    #: Seconds from asking for a task until it takes part. Until then its job trains with the tasks it had.
    start_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Seconds that a running job stands still for each task that joins or leaves it.
    join_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Seconds that it stands still for each MB (10^6 bytes) of parameters that changes its server.
    move_seconds_per_mb: float = within(0.0, 0.0, _MAX_VALUE)
    #: MB of parameters of a model for which the workload does not tell.
    model_mb: float = within(100.0, 1e-6, _MAX_VALUE)
    #: Seconds that a job stands still when its tasks change, where it has to be ended and started from a checkpoint;
    #: instead of ``join_seconds`` and ``move_seconds_per_mb``. 0: jobs are resized while they run.
    restart_seconds: float = within(0.0, 0.0, _MAX_VALUE)
    #: Speed of a job in a slot: x U(1 - s, 1 + s).
    speed_noise: float = within(0.0, 0.0, 0.99)
    #: Speed of a job for its whole life: x lognormal of mean 1, standard deviation of the logarithm.
    job_spread: float = within(0.0, 0.0, 2.0)
    #: Declared epochs = real epochs x U(1 - e, 1 + e), in place of the workload's.
    declared_error: float = within(0.0, 0.0, 0.99)
    #: Share of jobs whose users say that they are of another type, any of the workload's.
    wrong_labels: float = within(0.0, 0.0, 1.0)
    #: Jobs report losses; an epoch lowers the loss by less than this part of the first loss from the real end on.
    #: 0: no losses.
    loss_threshold: float = within(0.0, 0.0, 0.5)
    #: A reported loss: x (1 + N(0, s)), not below 0.
    loss_noise: float = within(0.0, 0.0, 1.0)
    #: Share of reports in which the loss is 1.5 to 3 times too large.
    loss_outliers: float = within(0.0, 0.0, 0.5)
    #: Share of the communication between two tasks that they are spared where they are on one node.
    locality: float = within(0.0, 0.0, 0.99)
    #: Share of a step that is communication, for models whose speed is a table and does not tell.
    communication: float = within(0.3, 0.0, 1.0)
    #: Share of its speed that a job loses when all its tasks lie on nodes with tasks of other jobs.
    interference: float = within(0.0, 0.0, 0.99)
    #: Probability with which a worker is slow for a slot, and the share of its speed that it then has. Synchronous jobs
    #: go at the pace of the slowest.
    straggler_probability: float = within(0.0, 0.0, 1.0)
    straggler_speed: float = within(0.5, 0.01, 1.0)
    #: Mean time between failures of a node, exponential; 0: none fails. And how long it is down.
    node_mtbf_hours: float = within(0.0, 0.0, _MAX_VALUE)
    node_repair_hours: float = within(4.0, 0.0, _MAX_VALUE)
    #: Seconds that a job stands still when a node under it fails, to the end of the slot at most; then it goes on with
    #: the tasks that are left.
    failure_seconds: float = within(_MAX_VALUE, 0.0, _MAX_VALUE)


#: The preset ``realistic``; every value with its source in docs/simulator.md.
REALISTIC = Realism(
    start_seconds=8.0,
    join_seconds=0.01,
    move_seconds_per_mb=0.0026,
    speed_noise=0.05,
    job_spread=0.05,
    declared_error=0.2,
    loss_threshold=0.001,
    loss_noise=0.02,
    loss_outliers=0.02,
    locality=0.8,
    communication=0.5,
    interference=0.2,
    straggler_probability=0.01,
    straggler_speed=0.5,
    node_mtbf_hours=3692.0,
    node_repair_hours=4.0,
    failure_seconds=10.0,
)


_MB = 1e6
#: Factors of losses that are outliers.
_OUTLIERS = (1.5, 3.0)
#: Part of the declared epochs that a job which trains on beyond them says is left.
_JUST_BEFORE = 1e-6


class LossCurve(NamedTuple):
    """``loss = scale x (1 / (slope x epoch + offset) + asymptote)``: Optimus' curve (EuroSys 2018, section 3.1).

    ``scale`` is the loss at epoch 0.
    """

    slope: float
    offset: float
    asymptote: float
    scale: float

    def at(self, epoch: float) -> float:
        """Loss after so many epochs."""
        return self.scale * (1 / (self.slope * epoch + self.offset) + self.asymptote)


class Resized(NamedTuple):
    """How the tasks of a job changed from one slot to the next."""

    kept: list[Task]
    joined: list[Task]
    left: list[Task]


def resized(before: Sequence[Task], now: Sequence[Task], *, by_count: bool = False) -> Resized:
    """Compare; ``by_count`` where all tasks are started anew in each slot, so that only their numbers tell."""
    if not by_count:
        old, new = {task.id for task in before}, {task.id for task in now}
        return Resized(
            [task for task in now if task.id in old],
            [task for task in now if task.id not in old],
            [task for task in before if task.id not in new],
        )
    change = Resized([], [], [])
    for role in TASK_ROLES:
        had, has = ([task for task in tasks if task.role is role] for tasks in (before, now))
        change.kept.extend(has[: len(had)])
        change.joined.extend(has[len(had) :])
        change.left.extend(had[len(has) :])
    return change


class Effects:
    """Effects on the jobs of a workload; every draw belongs to a job and a slot and to nothing else."""

    def __init__(self, workload: Workload, realism: Realism, draws: SeededRandom) -> None:
        self._workload = workload
        self._realism = realism
        self._draws = draws

    def as_declared(self, job: SimulatedJob) -> SimulatedJob:
        """The job with what its user declares."""
        error = self._realism.declared_error
        if error:
            factor = self._draws.between(1 - error, 1 + error, "declared", job.id)
            job = replace(job, declared_epochs=job.epochs * factor)
        wrong = self._realism.wrong_labels
        if wrong and self._draws.uniform("label", job.id) < wrong:
            others = [model for model in sorted(self._workload.speeds) if model != job.model] or [job.model]
            job = replace(job, said_model=others[int(self._draws.uniform("said", job.id) * len(others))])
        return job

    def epochs_in_slot(
        self, job: SimulatedJob, slot: int, tasks: Sequence[Task], crowded: Mapping[str, Collection[str]]
    ) -> float:
        """Epochs that the job would do in a whole slot with these tasks; 0 where it cannot train.

        ``crowded`` has for each node the jobs with tasks on it.
        """
        workers = sum(task.role is Role.WORKER for task in tasks)
        ps = len(tasks) - workers
        if not workers or (not ps and job.architecture is Architecture.PS):
            return 0.0
        epochs = self._workload.epochs_in_slot(job, workers, ps)
        realism = self._realism
        if realism.speed_noise:
            s = realism.speed_noise
            epochs *= self._draws.between(1 - s, 1 + s, "noise", slot, job.id)
        if realism.job_spread:
            sigma = realism.job_spread
            epochs *= math.exp(sigma * self._draws.normal("spread", job.id) - sigma * sigma / 2)
        if realism.locality:
            model = self._workload.speeds[job.model]
            spared = communication(model, workers, ps, realism.communication) * realism.locality * _neighbours(tasks)
            epochs /= 1 - spared
        if realism.interference:
            shared = sum(len(crowded[task.node]) > 1 for task in tasks) / len(tasks)
            epochs *= 1 - realism.interference * shared
        if realism.straggler_probability:
            epochs *= self._straggling(job, slot, workers)
        return epochs

    def standstill(self, job: SimulatedJob, before: Sequence[Task], change: Resized) -> float:
        """Seconds that a running job stands still when tasks join and leave those it had ``before``."""
        realism = self._realism
        if realism.restart_seconds:
            return realism.restart_seconds
        seconds = realism.join_seconds * (len(change.joined) + len(change.left))
        if realism.move_seconds_per_mb and job.architecture is Architecture.PS:
            had, joined, left = (_servers(tasks) for tasks in (before, change.joined, change.left))
            # Each server has an equal part: newcomers get theirs from the others, leavers give theirs away.
            share = max(joined / (had - left + joined) if joined else 0.0, left / had if left else 0.0)
            seconds += realism.move_seconds_per_mb * share * self._megabytes(job)
        return seconds

    def loss(self, job: SimulatedJob, slot: int, epochs: float) -> float | None:
        """Loss that the job reports at the end of a slot, after so many epochs."""
        realism = self._realism
        if not realism.loss_threshold:
            return None
        loss = loss_curve(job, realism.loss_threshold, self._draws).at(epochs)
        if realism.loss_noise:
            loss *= max(1 + realism.loss_noise * self._draws.normal("loss", slot, job.id), 0.0)
        if self._draws.uniform("outlier", slot, job.id) < realism.loss_outliers:
            loss *= self._draws.between(*_OUTLIERS, "outlier size", slot, job.id)
        return loss

    def _straggling(self, job: SimulatedJob, slot: int, workers: int) -> float:
        realism = self._realism
        slow = sum(
            self._draws.uniform("straggler", slot, number, job.id) < realism.straggler_probability
            for number in range(workers)
        )
        if isinstance(self._workload.speeds[job.model], PsAsync):
            return 1 - slow / workers * (1 - realism.straggler_speed)
        return realism.straggler_speed if slow else 1.0

    def _megabytes(self, job: SimulatedJob) -> float:
        model = self._workload.speeds[job.model]
        return model.model_bytes / _MB if isinstance(model, Physical | AllReduce) else self._realism.model_mb


def reported_epoch(job: SimulatedJob, epochs: float) -> float:
    """What a coordinator says: epochs done. One that trains on beyond the declared end says that it is about to end."""
    return min(epochs, job.declared_epochs * (1 - _JUST_BEFORE))


def communication(model: SpeedModel, workers: int, ps: int, unknown: float) -> float:
    """Share of a step that a model communicates at a size; ``unknown`` for a table, which does not tell.

    For the formulas all that is not computing the worker's share of the batch counts as communication, for the physical
    ones without their fixed overhead.
    """
    steps_seconds = model.samples_per_second(workers, ps)
    match model:
        case PsSync():
            computing = model.theta[0] * model.batch / workers * steps_seconds / model.batch
        case PsAsync():
            computing = model.theta[0] * steps_seconds / model.worker_batch / workers
        case Physical() | AllReduce():
            computing = float(model.local_seconds(float(workers))) * steps_seconds / model.batch
        case _:
            return unknown
    return min(max(1 - computing, 0.0), 1.0)


def loss_curve(job: SimulatedJob, threshold: float, draws: SeededRandom) -> LossCurve:
    """The loss of a job: from its real last epoch on, and no sooner, an epoch lowers it by less than ``threshold``.

    The threshold is a part of the loss at epoch 0. Offset and loss at epoch 0 are drawn. A loss cannot fall by that
    much in each of more than about 1 / (4 x threshold) epochs: a longer job has the largest threshold that it can have,
    less a tenth.
    """
    offset = draws.between(1.0, 1.5, "loss offset", job.id)
    scale = math.exp(draws.between(0.0, math.log(10.0), "loss scale", job.id))
    end = job.epochs
    # 1/x - 1/(x + slope) = t with x = slope * end + offset, solved for the steeper slope.
    possible = 1 / (offset * (2 * end + 1 + 2 * math.sqrt(end * (end + 1))))
    t = min(threshold, 0.9 * possible)
    a, b, c = t * end * (end + 1), t * offset * (2 * end + 1) - 1, t * offset * offset
    slope = (-b + math.sqrt(max(b * b - 4 * a * c, 0.0))) / (2 * a)
    return LossCurve(slope, offset, 1 - 1 / offset, scale)


def _servers(tasks: Sequence[Task]) -> int:
    return sum(task.role is Role.PS for task in tasks)


def _neighbours(tasks: Sequence[Task]) -> float:
    """Share of the traffic of a job that stays on its nodes.

    Each worker talks to all servers alike; without servers, each to the next in a ring that goes from node to node.
    """
    workers = Counter(task.node for task in tasks if task.role is Role.WORKER)
    servers = Counter(task.node for task in tasks if task.role is Role.PS)
    if not servers:
        return 1.0 if len(workers) == 1 else 1 - len(workers) / workers.total()
    inside = sum(count * servers[node] for node, count in workers.items())
    return inside / (workers.total() * servers.total())


_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node that goes away or comes back; ``at`` is in seconds of virtual time."""

    at: float
    node: str
    up: bool
    #: Why it went.
    reason: str = ""


class Outages:
    """The events of a cluster's nodes, in order of time.

    Each node fails after exponential times of its own, and is repaired after a fixed one. A node is up when it neither
    failed nor was taken away; events tell only what changes that.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        realism: Realism,
        draws: SeededRandom,
        changes: Sequence[CapacityChange] = (),
        slot_seconds: float = 1.0,
    ) -> None:
        self._draws = draws
        self._mtbf = realism.node_mtbf_hours * _HOUR
        self._repair = realism.node_repair_hours * _HOUR
        #: Reasons for which each node is away now.
        self._away: dict[str, set[str]] = {node.name: set() for node in nodes}
        self._coming: list[tuple[float, int, str, bool, str]] = []
        self._number = itertools.count()
        self._failures = dict.fromkeys(self._away, 0)
        for change in changes:
            members = [node.name for node in nodes if node.name.rpartition("-")[0] == change.name]
            for place, name in enumerate(members):
                self._add(change.slot * slot_seconds, name, "taken away", up=place < change.up)
        if self._mtbf:
            for node in nodes:
                self._fail_next(node.name, 0.0)

    def until(self, end: float, *, inclusive: bool = False) -> Iterator[NodeEvent]:
        """Events before ``end`` (or at it) that were not told yet."""
        while self._coming and (self._coming[0][0] < end or (inclusive and self._coming[0][0] == end)):
            at, _, name, up, reason = heapq.heappop(self._coming)
            away = self._away[name]
            before = bool(away)
            (away.discard if up else away.add)(reason)
            if reason == "failed":
                if up:
                    self._fail_next(name, at)
                else:
                    self._add(at + self._repair, name, reason, up=True)
            if before != bool(away):
                yield NodeEvent(at, name, up, "" if up else reason)

    def _fail_next(self, name: str, since: float) -> None:
        self._failures[name] += 1
        after = self._draws.exponential(self._mtbf, "failure", self._failures[name], name)
        self._add(since + after, name, "failed", up=False)

    def _add(self, at: float, name: str, reason: str, *, up: bool) -> None:
        heapq.heappush(self._coming, (at, next(self._number), name, up, reason))
