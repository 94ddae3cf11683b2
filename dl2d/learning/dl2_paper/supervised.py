"""Supervised learning as an end in itself: a network that decides as a scheduler did, and how near it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import NOTHING
from dl2d.core.packing import Packing
from dl2d.learning.dl2_paper.demonstrations import Recording, lessons_of, taught
from dl2d.learning.dl2_paper.errors import TooFewSamples
from dl2d.learning.dl2_paper.imitation import Lessons, imitate
from dl2d.learning.dl2_paper.networks import Net, begin, described, deterministic, policy_network, weights_of
from dl2d.learning.dl2_paper.settings import NetworkKind, Settings
from dl2d.learning.dl2_paper.teachers import SERVE_WHOLE
from dl2d.learning.dl2_paper.validation import Score, score
from dl2d.policies.checkpoint import Checkpoint
from dl2d.policies.dl2_paper.observation import Sight
from dl2d.policies.dl2_paper.policy import Dl2Original, network_of
from dl2d.simulation.policy_lookup import find_policy
from dl2d.simulation.preset import PresetName, preset
from dl2d.simulation.replay import replay
from dl2d.simulation.vectorized.library import Library
from dl2d.simulation.workload.format import Workload

#: The largest J that is chosen for a network that can have any.
_WIDEST: Final = 128
#: Workloads that a teacher plays.
_LESSON_WORKLOADS: Final = 32
#: Every so many-th decision of a scheduler that is held out.
_HELD_OUT: Final = 5
_FEWEST: Final = 2
#: Mean completion times that differ by less, as a share, are as good.
_NEAR: Final = 1e-3

#: Told which update of how many is over, and the loss.
Told = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """How near a network comes to slots that it did not learn from."""

    #: Slots and jobs in them; the share of these jobs that were given the same size, and tasks that differ, of all.
    slots: int
    jobs: int
    same: float
    differing: float
    #: Jobs that had nothing before and were given something; the share of these that were given the same size.
    started: int
    started_same: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schooled:
    """What came of it."""

    checkpoint: Checkpoint
    #: By update.
    losses: tuple[float, ...]
    #: Decisions that were learned from, and how often the best action was a right one in those held out.
    lessons: int
    agreement: float
    #: From recorded slots.
    followed: Followed | None = None
    #: From a built-in teacher: mean completion times in slots on the validation workloads.
    score: Score | None = None
    teacher: float | None = None


def school_by_teacher(
    workloads: Sequence[Workload],
    validation: Sequence[Workload],
    settings: Settings,
    *,
    seed: int,
    told: Told | None = None,
) -> Schooled:
    """Learn from what the settings' teacher does with workloads, under the rules of preset ``dl2-paper``.

    ``settings.window`` is widened as for recordings, to the number of jobs of a workload.

    Raises
    ------
    WorkloadError
        There are no workloads, or they differ in resources that the observations show.
    TrainingError
        See ``TooFewSamples``, ``Diverged``.
    """
    if not workloads or not validation:
        raise WorkloadError("jobs", "supervised learning needs workloads to learn from, and others to validate with")
    everything = Library.of([*workloads, *validation])
    library = Library.of(validation, models=everything.models)
    if library.resources != everything.resources:
        raise WorkloadError("cluster", "workloads to learn from and to validate with differ in their resources")
    name = settings.teacher
    settings = _widened(settings, max(len(one.jobs) for one in (*workloads, *validation)))
    sight = Sight(
        window=settings.window, models=everything.models, resources=everything.resources,
        first_bundles=settings.first_bundles and name not in SERVE_WHOLE,
        slot_seconds=float(library.slot_seconds[0]), extras=settings.supervised_extras,
    )  # fmt: skip
    with deterministic():
        rng = np.random.default_rng([seed, 2])
        lessons = taught(name, workloads[:_LESSON_WORKLOADS], sight, labels=settings.labels, rng=rng)
        network, losses, agreement, count = _learn(lessons, sight, settings, seed, rng, told)
        weights = weights_of(network, "policy")
        acting = network_of(weights, described(sight, settings.network, sampled=False))
        found = score(
            library, replace(settings, first_bundles=sight.first_bundles, extras=sight.extras), acting, seed=seed
        )
    chosen = preset(PresetName.DL2_PAPER)
    teachers = [
        replay(
            one, find_policy(name, one, chosen), chosen.placement_of(name), rules=chosen.rules, timer=time.perf_counter
        )
        for one in validation
    ]
    mean = float(np.mean([played.avg_jct for played in teachers]))
    # What is wanted is the teacher's result; where both are as near, without draws.
    sampled = abs(found.sampled - mean) + _NEAR * mean < abs(found.greedy - mean)
    record = {"teacher": name, "teacher_jct_slots": mean, "greedy_jct_slots": found.greedy,
              "sampled_jct_slots": found.sampled, "agreement": agreement}  # fmt: skip
    return Schooled(
        checkpoint=_checkpoint(network, sight, settings, seed, record, sampled=sampled), losses=losses, lessons=count,
        agreement=agreement, score=found, teacher=mean,
    )  # fmt: skip


def school_by_recordings(
    recordings: Sequence[Recording],
    settings: Settings,
    *,
    slot_seconds: float,
    seed: int,
    told: Told | None = None,
) -> Schooled:
    """Learn from slots that a daemon recorded, oldest first; the last fifth is held out.

    ``settings.window`` is widened for a shared network so that all jobs of a slot are in one batch: what is left for
    jobs of later batches is not to be seen.

    Raises
    ------
    TrainingError
        See ``TooFewSamples``, ``Diverged``.
    """
    given = [each for each in recordings if each.snapshot.jobs]
    if len(given) < _FEWEST:
        raise TooFewSamples(
            f"supervised learning: {_FEWEST} slots with jobs are needed, the store has {len(given)} "
            f"({len(recordings)} with those that had none)"
        )
    settings = _widened(settings, max(len(each.snapshot.jobs) for each in given))
    sight = Sight(
        window=settings.window,
        models=tuple(sorted({job.request.model for each in given for job in each.snapshot.jobs})),
        resources=tuple(
            sorted(
                {name for each in given for node in each.snapshot.nodes for name, _ in node.capacity.thousandths}
                | {
                    name
                    for each in given
                    for job in each.snapshot.jobs
                    for demand in (job.request.worker, job.request.ps)
                    for name, _ in demand.thousandths
                }
            )
        ),
        first_bundles=settings.first_bundles and not serves_whole(given),
        slot_seconds=slot_seconds,
        extras=settings.supervised_extras,
    )
    last = max(len(given) - max(len(given) // _HELD_OUT, 1), 1)
    with deterministic():
        rng = np.random.default_rng([seed, 2])
        mixed = [given[place] for place in rng.permutation(last).tolist()]
        lessons = lessons_of(mixed, sight, labels=settings.labels, kept=1.0, rng=rng, most=40_000)
        network, losses, agreement, count = _learn(lessons, sight, settings, seed, rng, told)
        ways = {}
        for sampled in (False, True):
            made = _checkpoint(network, sight, settings, seed, {}, sampled=sampled)
            ways[sampled] = follow(Dl2Original(made), given[last:], seed=seed)
    sampled = ways[True].differing < ways[False].differing
    record = {
        "slots": last, "policies": sorted({each.decision.policy for each in given}), "agreement": agreement,
        "held_out": asdict(ways[sampled]),
    }  # fmt: skip
    return Schooled(
        checkpoint=_checkpoint(network, sight, settings, seed, record, sampled=sampled), losses=losses, lessons=count,
        agreement=agreement, followed=ways[sampled],
    )  # fmt: skip


def serves_whole(recordings: Sequence[Recording]) -> bool:
    """Whether a scheduler gives some jobs more than their least size while others wait, as FIFO does.

    True where that holds of most jobs that were left with nothing. One that does not gives every job its least size
    first. Jobs that run at fixed sizes tell nothing: they wait for room for these, whatever others have.
    """
    waiting, passed_over = 0, 0
    for each in recordings:
        sizes = each.decision.allocations()
        elastic = [job for job in each.snapshot.jobs if not job.static and job.key in sizes]
        idle = sum(sizes[job.key] == NOTHING for job in elastic)
        grown = any(sizes[job.key] != NOTHING and sizes[job.key] != job.request.least for job in elastic)
        waiting += idle
        passed_over += idle * grown
    return 2 * passed_over > waiting


def follow(policy: Dl2Original, recordings: Sequence[Recording], *, seed: int) -> Followed:
    """Have a policy decide on recorded snapshots, and compare sizes."""
    jobs, same, tasks, differing, started, started_same = 0, 0, 0, 0, 0, 0
    for each in recordings:
        snapshot = each.snapshot
        packing = Packing.for_decision(snapshot.nodes, snapshot.tasks, each.placement)
        sizes = policy.decide(snapshot, packing, np.random.default_rng([seed, snapshot.slot])).allocations()
        for entry in each.decision.jobs:
            got, wanted = sizes[entry.job], entry.allocation
            new = entry.previous == NOTHING != wanted
            started += new
            started_same += new and got == wanted
            jobs += 1
            same += got == wanted
            tasks += sum(wanted)
            differing += abs(got.workers - wanted.workers) + abs(got.ps - wanted.ps)
    return Followed(
        slots=len(recordings), jobs=jobs, same=same / max(jobs, 1), differing=differing / max(tasks, 1),
        started=started, started_same=started_same / max(started, 1),
    )  # fmt: skip


def _widened(settings: Settings, jobs: int) -> Settings:
    shared = settings.network is NetworkKind.SHARED
    return replace(settings, window=max(settings.window, min(jobs, _WIDEST))) if shared else settings


def _learn(
    lessons: Lessons, sight: Sight, settings: Settings, seed: int, rng: np.random.Generator, told: Told | None
) -> tuple[Net, tuple[float, ...], float, int]:
    """Network, losses, agreement in decisions that were held out, decisions that were learned from."""
    order = rng.permutation(len(lessons))
    kept = max(len(lessons) // _HELD_OUT, 1)
    seen, unseen = (lessons.take(order[kept:]), lessons.take(order[:kept])) if len(lessons) > 1 else (lessons, lessons)
    network = policy_network(
        settings.network, jobs=sight.window, width=sight.width, free=len(sight.resources), hidden=settings.hidden
    )
    begin(network, torch.Generator().manual_seed(seed), sight)
    updates = settings.supervised_updates
    losses = imitate(
        network, seen, loss=settings.supervised_loss, updates=updates, minibatch=min(settings.minibatch, len(seen)),
        rate=settings.supervised_rate, rng=rng,
        told=None if told is None else lambda done, loss: told(done, updates, loss),
    )  # fmt: skip
    with torch.no_grad():
        logits = network(torch.from_numpy(unseen.observations))
        best = torch.where(torch.from_numpy(unseen.masks), logits, -torch.inf).argmax(dim=1).numpy()
    agreement = float(unseen.rights[np.arange(len(unseen)), best].mean())
    return network, tuple(losses), agreement, len(seen)


def _checkpoint(
    network: Net, sight: Sight, settings: Settings, seed: int, record: dict[str, Any], *, sampled: bool
) -> Checkpoint:
    return Checkpoint(
        policy="dl2-original",
        weights=weights_of(network, "policy"),
        settings=described(sight, settings.network, sampled=sampled),
        training={"supervised": record, "updates": settings.supervised_updates,
                  "loss": settings.supervised_loss.value, "seed": seed},
    )  # fmt: skip
