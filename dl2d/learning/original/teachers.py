"""Schedulers to imitate: what they would do at each single decision of a window."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Decision
from dl2d.core.jobs import NOTHING, Allocation, JobKey
from dl2d.core.packing import Packing
from dl2d.core.policy import Evidence, Policy
from dl2d.placement.dl2_paper import Dl2Paper
from dl2d.simulation.contenders import contender
from dl2d.simulation.library import Floats, Ints
from dl2d.simulation.preset import PresetName, preset
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.windows import Windows
from dl2d.simulation.workload import Workload

_WORKER, _PS, _BUNDLE = range(3)


#: Says what to do next in each cluster: actions, shape (N,), 0 to 3J; 3J, void, where the batch has enough.
Teacher = Callable[[Windows], Ints]


def drf(windows: Windows) -> Ints:
    """DRF of preset ``dl2-paper``: the job with the least dominant share gets a bundle, until one has no room."""
    clusters = windows.clusters
    rows, jobs = np.arange(clusters.count)[:, None], np.maximum(windows.window, 0)
    demand = clusters.demand[rows, jobs]
    sizes = clusters.sizes[rows, jobs]
    held = (sizes[..., None] * demand).sum(axis=2)
    shares: Floats = (held / np.maximum(clusters.capacity, 1)[:, None, :]).max(axis=2)
    return _next(windows, shares)


def fifo(windows: Windows) -> Ints:
    """FIFO of preset ``dl2-paper``: jobs are served whole in submit order, until a bundle has no room."""
    return _next(windows, np.zeros(windows.window.shape))


def _next(windows: Windows, keys: Floats) -> Ints:
    """A bundle for the job with the least key that may grow, the first of equals; all-reduce jobs get a worker."""
    clusters = windows.clusters
    rows, jobs = np.arange(clusters.count)[:, None], np.maximum(windows.window, 0)
    sizes, most = clusters.sizes[rows, jobs], clusters.most[rows, jobs]
    lone = most[:, :, 1] == 0
    grows = (windows.window >= 0) & (sizes[:, :, 0] < most[:, :, 0]) & (lone | (sizes[:, :, 1] < most[:, :, 1]))
    column = np.where(grows, keys, np.inf).argmin(axis=1)
    row = np.arange(clusters.count)
    wanted = 3 * column + np.where(lone[row, column], _WORKER, _BUNDLE)
    fits = grows.any(axis=1) & (windows.mask()[row, wanted] != 0)
    actions: Ints = np.where(fits, wanted, 3 * windows.jobs)
    return actions


#: Teachers that need no recording.
QUICK: Final[Mapping[str, Teacher]] = {"drf": drf, "fifo": fifo}


class _Recorder:
    """A policy that writes down its steps, slot by slot."""

    def __init__(self, policy: Policy, slot_seconds: float) -> None:
        self._policy = policy
        self._seconds = slot_seconds
        self.slots: dict[int, list[tuple[str, Allocation]]] = defaultdict(list)

    @property
    def name(self) -> str:
        return self._policy.name

    @property
    def version(self) -> str:
        return self._policy.version

    @property
    def needs(self) -> frozenset[Evidence]:
        return self._policy.needs

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """The policy's own decision."""
        decision = self._policy.decide(snapshot, packing, rng)
        final = decision.allocations()
        given: dict[JobKey, Allocation] = defaultdict(lambda: NOTHING)
        steps = []
        for job, step in decision.actions:
            given[job] = Allocation(given[job].workers + step.workers, given[job].ps + step.ps)
            steps.append((job.id, step))
        for job, size in final.items():
            # Policies that choose sizes as wholes say less of the order: the rest comes at the end.
            rest = Allocation(max(size.workers - given[job].workers, 0), max(size.ps - given[job].ps, 0))
            if max(rest) > 0:
                steps.append((job.id, rest))
        # Snapshots count ticks: idle slots have none.
        self.slots[round(snapshot.at / self._seconds)] = steps
        return decision


class Recorded:
    """Any built-in policy, as it decided in a replay of each workload under the rules of ``dl2-paper``.

    The windows must play these workloads, cluster i the one of index ``clusters.workload[i]``. What a window cannot
    carry out (its order is by batches) is passed over.
    """

    def __init__(self, name: str, workloads: Sequence[Workload], *, first_bundles: bool) -> None:
        chosen = preset(PresetName.DL2_PAPER)
        self._first_bundles = first_bundles
        self._slots: list[dict[int, list[tuple[str, Allocation]]]] = []
        for workload in workloads:
            recorder = _Recorder(contender(name, workload, chosen), workload.slot_seconds)
            replay(workload, recorder, Dl2Paper(), rules=Rules(empty_each_slot=True), timer=time.perf_counter)
            self._slots.append(recorder.slots)
        #: By cluster: the batch that the list is of, and the actions that are left of it, last first.
        self._at: dict[int, tuple[int, int, int]] = {}
        self._left: dict[int, list[int]] = {}

    def __call__(self, windows: Windows) -> Ints:
        """See ``Teacher``."""
        clusters, void = windows.clusters, 3 * windows.jobs
        actions: Ints = np.full(clusters.count, void, dtype=np.int64)
        masks = windows.mask()
        for cluster in range(clusters.count):
            at = int(clusters.workload[cluster]), int(clusters.slot[cluster]), int(windows.batch[cluster])
            if self._at.get(cluster) != at:
                self._at[cluster] = at
                self._left[cluster] = self._of_batch(windows, cluster, at[0], at[1])[::-1]
            left = self._left[cluster]
            while left and not masks[cluster, left[-1]]:
                left.pop()
            if left:
                actions[cluster] = left.pop()
        return actions

    def _of_batch(self, windows: Windows, cluster: int, workload: int, slot: int) -> list[int]:
        clusters = windows.clusters
        ids = clusters.library.ids[workload]
        columns = {ids[job]: column for column, job in enumerate(windows.window[cluster].tolist()) if job >= 0}
        had: dict[str, list[int]] = {}
        if self._first_bundles:
            # The windows have given these already.
            had = {
                ids[job]: clusters.sizes[cluster, job].tolist() for job in windows.window[cluster].tolist() if job >= 0
            }
        actions: list[int] = []
        for job, step in self._slots[workload].get(slot, ()):
            if job not in columns:
                continue
            rest = [step.workers, step.ps]
            for role in (0, 1):
                taken = min(rest[role], had.get(job, [0, 0])[role])
                if taken:
                    had[job][role] -= taken
                    rest[role] -= taken
            both = min(rest)
            kinds = [_BUNDLE] * both + [_WORKER] * (rest[0] - both) + [_PS] * (rest[1] - both)
            actions += [3 * columns[job] + kind for kind in kinds]
        return actions
