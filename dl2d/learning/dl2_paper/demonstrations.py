"""Demonstrations for imitation: recorded decisions of a scheduler, as the steps that a network would take."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from dl2d.core.array_types import Bools
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.errors import Dl2dError, TooFewSamples
from dl2d.core.jobs import NOTHING, Allocation, Job, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.placement import Placement
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Tell
from dl2d.learning.dl2_paper.samples import Demonstrations
from dl2d.learning.dl2_paper.settings import Labels
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.policies.dl2_paper.observation import ObservationEncoding, Observations
from dl2d.policies.dl2_paper.sizing_step_by_step import Sizing
from dl2d.simulation.policy_by_name import find_policy
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.workload.workload_file import Workload

_WORKER, _PS, _BUNDLE = range(3)
#: Workloads that demonstrations are taken from, where there are so many.
_WORKLOADS = 16
#: Slots after which a replay is ended.
_MAX_SLOTS = 2000


def demonstrations_in(
    recordings: Iterable[Recording],
    encoding: ObservationEncoding,
    *,
    labels: Labels | None,
    kept: float,
    rng: Generator,
    most: int | None = None,
) -> Demonstrations:
    """Steps that lead to the recorded sizes.

    Parameters
    ----------
    recordings
        In the order in which they are used.
    encoding
        How the network sees them.
    labels
        Which actions count as right; None: ``steps`` where a decision has them, else ``sizes``.
    kept
        Share of the steps that is kept.
    rng
        Draws which are kept, and the order of actions where any that leads to the sizes is right.
    most
        Most steps that are kept.

    Raises
    ------
    TooFewSamples
        Nothing was kept.
    """
    return _collected(itertools.islice(_states(recordings, encoding, labels, kept, rng), most))


def demonstrations_of(
    name: str,
    workloads: Sequence[Workload],
    encoding: ObservationEncoding,
    *,
    labels: Labels | None = None,
    kept: float = 0.5,
    most: int = 20_000,
    rng: Generator,
) -> Demonstrations:
    """Steps of a built-in policy on workloads, under the rules of preset ``dl2-paper``.

    Parameters
    ----------
    name
        One of ``TEACHERS``.
    labels, kept
        As for ``demonstrations_in``.
    most
        Most steps; each workload contributes equally many.

    Raises
    ------
    TooFewSamples
        There is nothing to decide in the workloads.
    """
    each = most // min(len(workloads), _WORKLOADS) + 1

    def states() -> Iterator[Step]:
        for workload in workloads:
            slots = recordings_of(name, workload)
            mixed = [slots[place] for place in rng.permutation(len(slots)).tolist()]
            yield from itertools.islice(_states(mixed, encoding, labels, kept, rng), each)

    return _collected(itertools.islice(states(), most))


def recordings_of(name: str, workload: Workload) -> list[Recording]:
    """Decisions of a built-in policy on a workload under the rules of preset ``dl2-paper``, slot by slot."""
    chosen = preset(PresetName.DL2_PAPER)
    recorder = _Recorder(find_policy(name, workload, chosen))
    replay(workload, recorder, chosen.placement_of(name), rules=chosen.rules, timer=time.perf_counter)
    # The network's own steps are placed as the preset does for it, whatever its teacher's are.
    return [Recording(snapshot, decision, chosen.placement) for snapshot, decision in recorder.slots]


def demonstrations_with_floors(
    teacher: Policy, actor: Policy, workloads: Sequence[Workload], placement: Placement, tell: Tell
) -> list[Recording]:
    """Teacher's decisions in the states that ``actor`` reaches when running jobs keep their minimum size.

    A replay ends early if the actor starts no job any more, or cannot decide.
    """
    found: list[Recording] = []
    for number, workload in enumerate(workloads):
        tell("recorded days replayed", number, len(workloads), f"decided by {actor.name}")
        recorder = _Recorder(actor)
        with contextlib.suppress(Dl2dError):
            replay(workload, recorder, placement, rules=Rules(floors=True, most_slots=_MAX_SLOTS), timer=lambda: 0.0)
        for snapshot, decision in recorder.slots:
            seen = Recording(snapshot, decision, placement)
            asked = decision if actor is teacher else teacher.decide(snapshot, seen.packing(), np.random.default_rng(0))
            found.append(replace(seen, decision=asked))
    return found


class _Recorder:
    """A policy that records its decisions. Implements ``Policy``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.version, self.needs = policy.name, policy.version, policy.needs
        self.slots: list[tuple[Snapshot, Decision]] = []

    def decide(self, snapshot: Snapshot, packing: Packing, rng: Generator) -> Decision:
        """The policy's own decision."""
        decision = self._policy.decide(snapshot, packing, rng)
        self.slots.append((snapshot, decision))
        return decision


class Step(NamedTuple):
    """One step of a slot: the observation, the allowed actions, the right ones, and the one that is taken."""

    #: Number of the batch of J jobs in its slot.
    batch: int
    observation: Observations
    mask: Bools
    right: Bools
    action: int


def _collected(states: Iterable[Step]) -> Demonstrations:
    found = list(states)
    if not found:
        raise TooFewSamples(
            "supervised learning: the recorded slots leave nothing to learn from, since no job in them could have had "
            "more tasks or fewer: there were no jobs, each has one size only, or no room was left for more tasks"
        )
    _, observations, masks, rights, actions = zip(*found, strict=True)
    return Demonstrations(
        observations=np.stack(observations), masks=np.stack(masks), actions=np.array(actions), rights=np.stack(rights)
    )


def _states(
    recordings: Iterable[Recording],
    encoding: ObservationEncoding,
    labels: Labels | None,
    kept: float,
    rng: Generator,
) -> Iterator[Step]:
    for recording in recordings:
        own = labels or (Labels.STEPS if recording.decision.actions else Labels.SIZES)
        yield from steps_of(recording, encoding, own, kept, rng)


def steps_of(
    recording: Recording, encoding: ObservationEncoding, labels: Labels, kept: float, rng: Generator, *,
    exploration: float = 0.0,
) -> Iterator[Step]:  # fmt: skip
    """Steps that lead to the sizes of one recorded slot, batch after batch; each is kept with probability ``kept``.

    ``exploration`` is that of the version of the policy that decided: it says which actions were allowed.
    """
    sizing = Sizing(recording.snapshot, recording.packing(), encoding, exploration=exploration)
    sizes = recording.decision.allocations()
    order = _steps(recording.decision)
    allocations = sizing.allocation.allocations
    void = encoding.void
    for number, batch in enumerate(sizing.batches()):
        columns = {job.key: column for column, job in enumerate(batch.jobs)}
        queue = _queue(order, columns, allocations, batch.jobs) if labels is Labels.STEPS else []
        blocked: set[int] = set()
        turns = rng.permutation(len(batch.jobs)) if labels is Labels.SIZES else ()
        while True:
            wanted = _towards(batch.jobs, sizes, sizing, void)
            wanted[list(blocked)] = False
            if labels is Labels.STEPS:
                while queue and not wanted[queue[-1]]:
                    queue.pop()
                action = queue.pop() if queue else _first(wanted, void)
            else:
                action = _of_first(wanted, turns, void, rng)
            if rng.random() < kept:
                sizing.look(batch.jobs)
                mask = batch.mask().copy()
                if labels is Labels.STEPS:
                    # The mask has found that the step has no room.
                    if action != void and not mask[action]:
                        blocked.add(action)
                        continue
                    right = np.zeros(void + 1, bool)
                    right[action] = True
                else:
                    right = wanted & mask
                    if not right.any():
                        right[void] = True
                    if not right[action]:
                        blocked.add(action)
                        continue
                if mask[:void].any():
                    yield Step(number, batch.observation[0].copy(), mask, right, action)
            if action == void:
                break
            if not batch.act(action):
                blocked.add(action)


def _towards(jobs: Sequence[Job], sizes: dict[JobKey, Allocation], sizing: Sizing, void: int) -> Bools:
    """Actions that lead to the sizes and not beyond, shape (3J + 1,); void is none of them.

    Any of the three gives a job that is below its first size what it lacks of that.
    """
    steps = np.zeros(void + 1, bool)
    for place, job in enumerate(jobs):
        wanted, now = sizes.get(job.key, NOTHING), sizing.allocation.allocations[job.key]
        if not now.covers(sizing.first_size(job)):
            steps[3 * place : 3 * place + 3] = wanted != NOTHING
            continue
        for number, step in enumerate(sizing.steps(job)):
            after = now.plus(step)
            workers, ps = now.workers < after.workers <= wanted.workers, now.ps < after.ps <= wanted.ps
            steps[3 * place + number] = (workers, ps, workers and ps)[number]
    return steps


def _of_first(wanted: Bools, turns: Iterable[int], void: int, rng: Generator) -> int:
    """An action of the first job, in the order of ``turns``, that has one left; void where none has.

    One job after the other, as the network acts later. If actions were drawn from all jobs, states in which all but one
    job have their sizes would be rare, and in those it is decided whether that one starts.
    """
    for place in turns:
        steps = np.flatnonzero(wanted[3 * place : 3 * place + 3])
        if len(steps):
            return int(3 * place + rng.choice(steps))
    return void


def _first(wanted: Bools, void: int) -> int:
    """The first job's step, a bundle before a single task; void where there is none."""
    steps = np.flatnonzero(wanted)
    if not len(steps):
        return void
    place = int(steps[0]) // 3
    return 3 * place + _BUNDLE if wanted[3 * place + _BUNDLE] else int(steps[0])


def _steps(decision: Decision) -> list[tuple[JobKey, Allocation]]:
    """The order in which tasks were given, as far as the decision has it."""
    given: dict[JobKey, Allocation] = defaultdict(lambda: NOTHING)
    final = decision.allocations()
    steps = []
    for job, step in decision.actions:
        given[job] = given[job].plus(step)
        steps.append((job, step))
    for job, size in final.items():
        # The decision of a policy that chooses whole sizes lacks part of the order: that part comes at the end.
        rest = size.beyond(given[job])
        if rest != NOTHING:
            steps.append((job, rest))
    return steps


def _queue(
    order: Sequence[tuple[JobKey, Allocation]],
    columns: dict[JobKey, int],
    has: dict[JobKey, Allocation],
    jobs: Sequence[Job],
) -> list[int]:
    """Actions of one batch in reverse order of the steps, without what the jobs have already."""
    had = {job.key: list(has[job.key]) for job in jobs}
    actions: list[int] = []
    for job, step in order:
        if job not in columns:
            continue
        rest = [step.workers, step.ps]
        for role in (0, 1):
            taken = min(rest[role], had[job][role])
            had[job][role] -= taken
            rest[role] -= taken
        both = min(rest)
        kinds = [_BUNDLE] * both + [_WORKER] * (rest[0] - both) + [_PS] * (rest[1] - both)
        actions += [3 * columns[job] + kind for kind in kinds]
    return actions[::-1]
